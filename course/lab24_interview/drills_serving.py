"""Drills about serving: caches, batches, queues, speculation, quantization, adapters."""

import math
from random import Random

from course.lab24_interview.numbers import data, n, si
from course.shared.decisions import Decision
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import DEVICES
from minillm.predict.serving import queueing, speculation

MODELS = ("llama-3-8b", "llama-3-70b", "llama-3-405b", "llama-2-13b", "mistral-7b")


def weights(draw: Random) -> Decision:
    model, bits = architecture(draw.choice(MODELS)), draw.choice((4, 8, 16))
    value = model.parameters * bits / 8
    return Decision(
        f"Bytes of the weights of {model.name} in {bits} bits (without scales)?",
        value,
        "B",
        f"{model.parameters / 1e9:.1f} billion parameters times {bits / 8:g} bytes: {data(value)}.",
    )


def cache_bytes(draw: Random) -> Decision:
    model, tokens = architecture(draw.choice(MODELS)), draw.choice((1024, 4096, 32768))
    value, query = tokens * model.kv_bytes(), model.num_heads / model.num_kv_heads
    return Decision(
        f"Bytes of cache of {tokens:,} tokens of {model.name} ({model.num_layers} layers, {model.num_kv_heads} kv "
        "heads of "
        f"{model.head_dim}, 16 bits)?",
        value,
        "B",
        f"{tokens:,} · 2 · {model.num_layers} · {model.num_kv_heads} · {model.head_dim} · 2 = {data(value)}.",
        slips={0.5: "Keys and values are two tensors, and each number has two bytes."}
        | ({query: "Only kv heads are kept, not all query heads."} if query > 1 else {}),
    )


def tokens_per_second(draw: Random) -> Decision:
    model, name = (
        architecture(draw.choice(("llama-3-8b", "mistral-7b"))),
        draw.choice(("a100-80", "h100", "h200", "l4")),
    )
    device = DEVICES[name]
    value = device.bandwidth / (2 * model.parameters)
    return Decision(
        f"Tokens per second at most, one sequence, {model.name} in 16 bits on {si(device.bandwidth)}B/s?",
        value,
        "tokens/s",
        f"{si(device.bandwidth)}B/s over {data(2 * model.parameters)}, read once per token: {n(value, 3)}.",
        slips={0.5: "A weight is read once per token; the 2 belongs to FLOPs.", 2: "16 bits are 2 bytes."},
        tolerance=0.12,
    )


def waiting(draw: Random) -> Decision:
    load = draw.choice((0.5, 0.6, 0.75, 0.8, 0.9, 0.95))
    value = queueing.mean_wait(load, 1.0)
    return Decision(
        f"Mean wait in a random queue at {load:.0%} load, in service times?",
        value,
        "",
        f"ρ/(1-ρ) = {load}/{1 - load:.2g} = {n(value, 3)}.",
        slips={1 / load: "That includes the service itself."},
        tolerance=0.03,
    )


def accepted(draw: Random) -> Decision:
    alpha, k = draw.choice((0.6, 0.7, 0.8, 0.9)), draw.choice((2, 3, 4))
    value = speculation.tokens_per_pass(alpha, k)
    return Decision(
        f"Tokens per pass of the target: acceptance {alpha}, K = {k}?",
        value,
        "",
        f"(1 - {alpha}^{k + 1})/(1 - {alpha}) = {n(value, 3)}.",
        slips={
            (1 + alpha * k) / value: "What follows a rejection is lost: the sum is geometric.",
            1 - alpha**k / value: "The target adds a token of its own: the sum has K + 1 terms.",
        },
        tolerance=0.03,
    )


def adapter(draw: Random) -> Decision:
    rank, rows, columns = draw.choice((4, 8, 16, 64)), draw.choice((4096, 8192)), draw.choice((4096, 14336))
    value = rank * (rows + columns)
    return Decision(
        f"Parameters of LoRA of rank {rank} on a {rows} x {columns} matrix?",
        value,
        "",
        f"r(d + k) = {rank} · {rows + columns:,} = {value:,}.",
        slips={
            rows / (rows + columns): "Both factors count: d·r and r·k.",
            rows * columns / value: "That is the matrix.",
        },
        tolerance=0.05,
    )


def sequences(draw: Random) -> Decision:
    model, gigabytes, tokens = architecture("llama-3-8b"), draw.choice((24, 40, 80, 141)), draw.choice((2048, 8192))
    held, each = 2 * model.parameters, tokens * model.kv_bytes()
    value = int((0.9 * gigabytes * 1e9 - held) // each)
    return Decision(
        f"Sequences of {tokens:,} tokens beside Llama 3 8B in 16 bits on {gigabytes} GB, 90 % of it usable?",
        value,
        "",
        f"(0.9 · {gigabytes} GB - {data(held)}) / {data(each)} = {value}.",
        slips={
            (0.9 * gigabytes * 1e9 - held) // (4 * each) / value: "8 kv heads, not 32.",
            0.9 * gigabytes * 1e9 // each / value: "The weights take their part first.",
            (gigabytes * 1e9 - held) // each / value: "90 % of the memory is usable, not all of it.",
        },
        tolerance=0.08,
        above="So many do not fit.",
    )


def ridge(draw: Random) -> Decision:
    device = DEVICES[draw.choice(("a100-80", "h100", "h200", "l4"))]
    value = device.flops / device.bandwidth
    return Decision(
        f"FLOPs per byte at the ridge: {si(device.flops)}FLOP/s and {si(device.bandwidth)}B/s?",
        value,
        "",
        f"{si(device.flops)}FLOP/s / {si(device.bandwidth)}B/s = {n(value, 3)}.",
    )


def first_token(draw: Random) -> Decision:
    billions, tokens, mfu = draw.choice((8, 13, 70)), draw.choice((1000, 4000, 16000)), draw.choice((0.4, 0.5))
    gpus = 8 if billions == 70 else 1
    value = 2 * billions * 1e9 * tokens / (gpus * 989e12 * mfu)
    return Decision(
        f"Seconds to prefill {tokens:,} tokens with {billions}B on {gpus} H100 (989 TFLOP/s) at {mfu:.0%} of the peak?",
        value,
        "s",
        f"2 · {billions}e9 · {tokens:,} / ({gpus} · 989e12 · {mfu}) = {n(value, 3)} s, attention left out.",
        slips={3: "2 FLOPs per parameter and token forward; 6 is training.", mfu: "That is at the peak."},
        tolerance=0.12,
    )


def in_service(draw: Random) -> Decision:
    rate, seconds = draw.choice((5, 20, 50, 200)), draw.choice((2, 6, 15))
    return Decision(
        f"Requests in flight: {rate} per second arrive, each stays {seconds} s?",
        rate * seconds,
        "",
        f"Little's law: {rate} · {seconds} = {rate * seconds}.",
        tolerance=0.02,
    )


def nodes(draw: Random) -> Decision:
    rate, tokens = draw.choice((50, 200, 500)), draw.choice((200, 300, 800))
    node, load = draw.choice((2500, 4000, 10000)), draw.choice((0.6, 0.7, 0.8))
    value = math.ceil(rate * tokens / (node * load))
    full = math.ceil(rate * tokens / node)
    return Decision(
        f"Nodes for {rate} requests per second of {tokens} tokens, {node:,} tokens/s each, planned at {load:.0%} load?",
        value,
        "",
        f"{rate * tokens:,} / ({node:,} · {load}) = {n(rate * tokens / (node * load), 3)}, so {value}.",
        slips={full / value: "That is at full load, where queues explode."} if full < value else {},
        tolerance=0.001,
        below="So few run above the planned load: round up.",
        above="Fewer nodes stay below the planned load.",
    )


def load_time(draw: Random) -> Decision:
    billions, bits, rate = draw.choice((8, 70, 405)), draw.choice((8, 16)), draw.choice((1, 2, 10, 25))
    value = billions * bits / 8 / rate
    return Decision(
        f"Seconds to load {billions}B weights in {bits} bits at {rate} GB/s?",
        value,
        "s",
        f"{billions * bits / 8:g} GB / {rate} GB/s = {n(value, 3)} s.",
    )


def blocks(draw: Random) -> Decision:
    count, tokens, size = draw.choice((10, 64, 200)), draw.choice((40, 100, 250)), draw.choice((16, 32))
    value = count * math.ceil(tokens / size)
    return Decision(
        f"Blocks of {size} tokens for {count} sequences of {tokens:,} tokens that share nothing?",
        value,
        "",
        f"{count} · ceil({tokens:,}/{size}) = {value:,}.",
        slips={count * tokens / value: "Those are token slots; a block holds several."},
        tolerance=0.005,
        below="The last block of every sequence counts whole.",
    )


def shared_blocks(draw: Random) -> Decision:
    count, tokens, size = draw.choice((4, 8, 16)), draw.choice((40, 100, 250)), draw.choice((16, 32))
    value = (count - 1) * (tokens // size)
    return Decision(
        f"Blocks saved if {count} requests share a prefix of {tokens:,} tokens in blocks of {size}?",
        value,
        "",
        f"Full blocks only, {tokens:,} // {size} = {tokens // size}, each kept once and not {count} times: {value:,}.",
        tolerance=0.005,
        above="Only full blocks can be shared, and one copy of each stays.",
    )


def tail(draw: Random) -> Decision:
    load = draw.choice((0.5, 0.6, 0.7, 0.75, 0.8))
    value = queueing.wait_quantile(load, 1.0, 0.99)
    return Decision(
        f"99th percentile of the wait at {load:.0%} load in a random queue, in service times?",
        value,
        "",
        f"ln({load}/0.01)/(1-{load}) = {n(value, 3)}.",
        slips={
            load / (1 - load) / value: "That is the mean; the tail is several times it.",
            math.log(100) / (1 - load) / value: "That is the time in the system, with the service itself.",
        },
        tolerance=0.04,
    )


def faster(draw: Random) -> Decision:
    alpha, k, cost = draw.choice((0.6, 0.7, 0.8, 0.9)), draw.choice((2, 3, 4)), draw.choice((0.05, 0.1, 0.2))
    value = speculation.speedup(alpha, cost, k)
    return Decision(
        f"Speedup of one stream by speculation: acceptance {alpha}, K = {k}, a draft token costs {cost} of a pass?",
        value,
        "",
        f"(1 - {alpha}^{k + 1})/(1 - {alpha}) / (1 + {k} · {cost}) = {n(value, 3)}.",
        slips={1 + k * cost: "The draft's passes cost, too."},
        tolerance=0.05,
    )


def overlap(draw: Random) -> Decision:
    p, q = draw.sample((0.2, 0.3, 0.5, 0.6, 0.8, 0.9), 2)
    value = min(p, q) + min(1 - p, 1 - q)
    return Decision(
        f"Acceptance rate of two tokens: the target says ({p}, {1 - p:.1f}), the draft ({q}, {1 - q:.1f})?",
        value,
        "",
        f"Σ min(p, q) = {min(p, q)} + {min(1 - p, 1 - q):.1f} = {value:.1f}.",
        tolerance=0.03,
    )


def group_bits(draw: Random) -> Decision:
    bits, group, scale = draw.choice((3, 4, 8)), draw.choice((32, 64, 128)), draw.choice((16, 32))
    value = bits + scale / group
    return Decision(
        f"Bits per weight: {bits}-bit weights, a {scale}-bit scale per group of {group}?",
        value,
        "bits",
        f"{bits} + {scale}/{group} = {n(value, 4)}.",
        tolerance=0.01,
    )


def quantized(draw: Random) -> Decision:
    billions, bits = draw.choice((3, 8, 70, 405)), draw.choice((4.25, 4.5, 8.25))
    value = billions * 1e9 * bits / 8
    return Decision(
        f"Bytes of {billions}B weights at {bits} bits each, scales included?",
        value,
        "B",
        f"{billions}e9 · {bits} / 8 = {data(value)}.",
        slips={int(bits) / bits: "Those are the bits without the scales."},
        tolerance=0.02,
    )


def experts_read(draw: Random) -> Decision:
    tokens, experts, k = draw.choice((1, 4, 16, 64)), draw.choice((8, 64)), draw.choice((2, 4))
    value = experts * (1 - (1 - k / experts) ** tokens)
    return Decision(
        f"Experts of {experts} that a layer reads for {tokens} token{'s' if tokens > 1 else ''}, top {k}, at random?",
        value,
        "",
        f"E(1 - (1 - k/E)^T) = {n(value, 3)}.",
        tolerance=0.12,
    )


def layer_cache(draw: Random) -> Decision:
    tokens, heads = draw.choice((8192, 131072, 1000000)), draw.choice((8, 64))
    value = 2 * tokens * heads * 128 * 2
    return Decision(
        f"Bytes of keys and values of {tokens:,} tokens in one layer, {heads} kv heads of 128, 16 bits?",
        value,
        "B",
        f"2 · {tokens:,} · {heads} · 128 · 2 = {data(value)}.",
        slips={0.5: "A layer keeps keys and values, at two bytes a number."},
        tolerance=0.1,
    )


def token_price(draw: Random) -> Decision:
    price, speed = draw.choice((8, 16, 24)), draw.choice((2000, 3500, 8000))
    value = price / (speed * 3600) * 1e6
    return Decision(
        f"Dollars per million output tokens: {price} dollars per node-hour, {speed:,} tokens/s, always full?",
        value,
        "dollars",
        f"{price} / ({speed:,} · 3,600) · 1e6 = {n(value, 3)}.",
        tolerance=0.1,
    )
