"""Numeric drills: mental arithmetic as interviewers ask for it, fresh numbers each time, judged with a tolerance.

A drill is a `Decision`: a number that is off by a known factor is told which (bits for bytes, one GPU for all).
"""

from collections.abc import Callable
from random import Random

from course.lab24_interview.deck import topics_of
from course.lab24_interview.numbers import data, n, si
from course.shared.decisions import Decision
from minillm.predict import faults
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import DEVICES
from minillm.predict.serving import queueing, speculation
from minillm.predict.training import pipeline

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


def states(draw: Random) -> Decision:
    billions, ranks = draw.choice((1, 3, 7, 13, 30, 70)), draw.choice((8, 16, 64, 256))
    value = 18e9 * billions / ranks
    return Decision(
        f"Bytes of training states per GPU: {billions}B parameters at 18 bytes, ZeRO-3 over {ranks} GPUs?",
        value,
        "B",
        f"18 · {billions}e9 / {ranks} = {data(value)}.",
        slips={2 / 18: "That is the 16-bit weights alone.", 16 / 18: "That is with 16-bit gradients."},
        tolerance=0.1,
        gpus=ranks,
    )


def all_reduce(draw: Random) -> Decision:
    ranks, size = draw.choice((2, 4, 8, 64)), draw.choice((0.1, 1, 2, 14)) * 1e9
    value = 2 * size * (ranks - 1) / ranks
    return Decision(
        f"Bytes each rank sends in a ring all-reduce of {data(size)} on {ranks} ranks?",
        value,
        "B",
        f"2P(N-1)/N = 2 · {data(size)} · {ranks - 1}/{ranks} = {data(value)}.",
        tolerance=0.1,
    )


def transfer(draw: Random) -> Decision:
    gigabits, gigabytes = draw.choice((10, 100, 200, 400)), draw.choice((1, 5, 16, 140))
    value = gigabytes / (gigabits / 8)
    return Decision(
        f"Seconds to move {gigabytes} GB over a {gigabits} Gb/s link at its full rate?",
        value,
        "s",
        f"{gigabits} Gb/s are {gigabits / 8:g} GB/s: {n(value, 3)} s.",
        slips={1 / 8: "The link is in bits per second: divide its rate by 8."},
    )


def train_days(draw: Random) -> Decision:
    billions, trillions, gpus, mfu = (
        draw.choice((7, 13, 70)),
        draw.choice((1, 2, 15)),
        draw.choice((64, 256, 1024)),
        draw.choice((0.4, 0.5)),
    )
    value = 6 * billions * 1e9 * trillions * 1e12 / (gpus * 989e12 * mfu) / 86400
    return Decision(
        f"Days to train {billions}B on {trillions} trillion tokens with {gpus} H100 (989 TFLOP/s) at {mfu:.0%} MFU?",
        value,
        "days",
        f"6 · {billions}e9 · {trillions}e12 / ({gpus} · 989e12 · {mfu}) / 86,400 = {n(value, 3)}.",
        slips={mfu: "That is at the peak.", 1 / 3: "6 FLOPs per parameter and token, not 2.", 24: "Those are hours."},
    )


def cache_bytes(draw: Random) -> Decision:
    model, tokens = architecture(draw.choice(MODELS)), draw.choice((1024, 4096, 32768))
    value = tokens * model.kv_bytes()
    return Decision(
        f"Bytes of cache of {tokens:,} tokens of {model.name} ({model.num_layers} layers, {model.num_kv_heads} kv "
        "heads of "
        f"{model.head_dim}, 16 bits)?",
        value,
        "B",
        f"{tokens:,} · 2 · {model.num_layers} · {model.num_kv_heads} · {model.head_dim} · 2 = {data(value)}.",
        slips={model.num_heads / model.num_kv_heads: "Only kv heads are kept, not all query heads."}
        if model.num_heads > model.num_kv_heads
        else {},
    )


def tokens_per_second(draw: Random) -> Decision:
    model, name = architecture(draw.choice(MODELS[:2])), draw.choice(("a100-80", "h100", "h200", "l4"))
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


def bubble(draw: Random) -> Decision:
    stages, count, chunks = draw.choice((4, 8, 16)), draw.choice((8, 16, 32, 64)), draw.choice((1, 1, 2, 4))
    value = pipeline.idle_share(stages, count, chunks)
    inner = f" and {chunks} chunks per stage" if chunks > 1 else ""
    return Decision(
        f"Share of a step that is bubble: {stages} stages, {count} microbatches{inner}?",
        value,
        "",
        f"(n-1)/(vM+n-1) = {stages - 1}/({chunks * count}+{stages - 1}) = {n(value, 3)}.",
        slips={(stages - 1) / (chunks * count) / value: "That is bubble over useful time, not over the step."},
        tolerance=0.06,
    )


def save_interval(draw: Random) -> Decision:
    save, hours = draw.choice((10, 30, 60, 120)), draw.choice((1, 3, 8, 24))
    value = faults.young_interval(save, hours * 3600)
    return Decision(
        f"Seconds between saves that waste least: a save takes {save} s, a failure every {hours} h?",
        value,
        "s",
        f"√(2 · {save} · {hours * 3600:,}) = {n(value, 3)} s.",
        slips={0.5**0.5: "The 2 belongs under the root."},
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
        tolerance=0.06,
    )


def accepted(draw: Random) -> Decision:
    alpha, k = draw.choice((0.5, 0.6, 0.7, 0.8, 0.9)), draw.choice((2, 3, 4, 6))
    value = speculation.tokens_per_pass(alpha, k)
    return Decision(
        f"Tokens per pass of the target: acceptance {alpha}, K = {k}?",
        value,
        "",
        f"(1 - {alpha}^{k + 1})/(1 - {alpha}) = {n(value, 3)}.",
        slips={(1 + alpha * k) / value: "What follows a rejection is lost: the sum is geometric."},
        tolerance=0.06,
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
    value = max(1, int((0.9 * gigabytes * 1e9 - 2 * model.parameters) // (tokens * model.kv_bytes())))
    return Decision(
        f"Sequences of {tokens:,} tokens beside Llama 3 8B in 16 bits on {gigabytes} GB, 90 % of it usable?",
        value,
        "",
        f"(0.9 · {gigabytes} GB - {data(2 * model.parameters)}) / {data(tokens * model.kv_bytes())} = {value}.",
        slips={0.25: "8 kv heads, not 32."},
        tolerance=0.2,
    )


DRILLS: dict[str, Callable[[Random], Decision]] = {
    made.__name__: made
    for made in (
        weights,
        states,
        all_reduce,
        transfer,
        train_days,
        cache_bytes,
        tokens_per_second,
        bubble,
        save_interval,
        waiting,
        accepted,
        adapter,
        sequences,
    )
}


def drill(name: str) -> Decision:
    """A drill as sessions name it: KIND:SEED."""
    kind, seed = name.split(":")
    return DRILLS[kind](Random(int(seed)))


def different(topic: str, draw: Random, count: int) -> list[str]:
    """Up to so many drills of a topic of the cards ("" for all), all with different questions: kinds take turns."""
    kinds = sorted({kind for each in topics_of(topic) for kind in (TOPICS[each] if each else DRILLS)})
    draw.shuffle(kinds)
    names: dict[str, str] = {}  # by question
    for attempt in range(20 * count):
        if len(names) == count:
            break
        name = f"{kinds[attempt % len(kinds)]}:{draw.randrange(10**6)}"
        names.setdefault(drill(name).question, name)
    return list(names.values())


TOPICS = {  # of the cards: which drills go with them
    "hardware": ("transfer", "tokens_per_second"),
    "collectives": ("all_reduce", "transfer"),
    "data parallel and ZeRO": ("states", "all_reduce"),
    "tensor and sequence parallel": ("all_reduce", "weights"),
    "pipeline parallel": ("bubble",),
    "long context and experts": ("cache_bytes", "weights"),
    "memory and precision": ("states", "weights"),
    "checkpoints and faults": ("save_interval", "transfer"),
    "data": ("train_days",),
    "decoding and the cache": ("cache_bytes", "tokens_per_second", "sequences"),
    "batching and scheduling": ("waiting", "sequences"),
    "speculative decoding": ("accepted",),
    "quantisation and adapters": ("adapter", "weights"),
    "serving systems": ("waiting", "sequences", "tokens_per_second"),
    "debugging": ("transfer", "states"),
    "planning": ("train_days", "states", "bubble"),
}
