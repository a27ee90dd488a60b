"""Drills about training: states, pipelines, data, failures, days and money."""

from random import Random

from course.lab24_interview.numbers import data, n, si
from course.shared.decisions import Decision
from minillm.predict import faults
from minillm.predict.training import pipeline


def states(draw: Random) -> Decision:
    billions, ranks = draw.choice((1, 3, 7, 13, 30, 70)), draw.choice((8, 16, 64, 256))
    value = 18e9 * billions / ranks
    return Decision(
        f"Bytes of training states per GPU: {billions}B parameters at 18 bytes, ZeRO-3 over {ranks} GPUs?",
        value,
        "B",
        f"18 · {billions}e9 / {ranks} = {data(value)}.",
        slips={
            2 / 18: "That is the 16-bit weights alone.",
            16 / 18: "That is with 16-bit gradients.",
            ranks: f"That is the number of all {ranks} GPUs together; the question asks for one.",
            1 / ranks: "You divided by the GPUs once too often.",
        },
        tolerance=0.1,
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


def bubble(draw: Random) -> Decision:
    stages, chunks = draw.choice((4, 8, 16)), draw.choice((1, 1, 2, 4))
    count = stages * draw.choice((1, 2, 4))  # a multiple: otherwise ranks also wait between their chunks
    value = pipeline.idle_share(stages, count, chunks)
    inner = f" and {chunks} chunks per rank" if chunks > 1 else ""
    return Decision(
        f"Share of a step that is bubble: {stages} stages, {count} microbatches{inner}?",
        value,
        "",
        f"(n-1)/(vM+n-1) = {stages - 1}/({chunks * count}+{stages - 1}) = {n(value, 3)}.",
        slips={(stages - 1) / (chunks * count) / value: "That is bubble over useful time, not over the step."},
        tolerance=0.03,
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


def matmul_flops(draw: Random) -> Decision:
    m, k, columns = draw.choice((512, 1024, 8192)), draw.choice((4096, 8192)), draw.choice((4096, 14336))
    value = 2.0 * m * k * columns
    return Decision(
        f"FLOPs of a matmul [{m}, {k}] @ [{k}, {columns}]?",
        value,
        "FLOP",
        f"2 · {m} · {k} · {columns} = {si(value)}FLOP: a multiplication and an addition per term.",
    )


def checkpoint_size(draw: Random) -> Decision:
    billions = draw.choice((1, 7, 13, 34, 70, 405))
    value = 12e9 * billions
    return Decision(
        f"Bytes of a checkpoint of {billions}B parameters: 32-bit master weights and Adam's two moments?",
        value,
        "B",
        f"4 + 4 + 4 = 12 bytes each: {data(value)}.",
        slips={2 / 3: "Two moments and the weights are three numbers.", 1 / 6: "Those are the 16-bit weights."},
        tolerance=0.08,
    )


def save_time(draw: Random) -> Decision:
    billions, gigabytes = draw.choice((7, 70, 405)), draw.choice((2, 10, 50, 200))
    value = 12 * billions / gigabytes
    return Decision(
        f"Seconds to write a checkpoint of {billions}B parameters (12 bytes each) at {gigabytes} GB/s in all?",
        value,
        "s",
        f"{12 * billions} GB / {gigabytes} GB/s = {n(value, 3)} s.",
    )


def job_failures(draw: Random) -> Decision:
    years, gpus = draw.choice((3, 5, 6, 10)), draw.choice((512, 1024, 4096, 16384))
    value = years * 8760 / gpus
    return Decision(
        f"Hours between failures of a job on {gpus:,} GPUs, if one GPU fails every {years} years?",
        value,
        "h",
        f"{years} · 8,760 h / {gpus:,} = {n(value, 3)} h: any of them stops the job.",
        slips={1 / 24: "Those are days."},
        tolerance=0.1,
    )


def run_cost(draw: Random) -> Decision:
    gpus, days, price = draw.choice((64, 512, 2048)), draw.choice((7, 30, 90)), draw.choice((1.5, 2, 3))
    value = gpus * days * 24 * price
    return Decision(
        f"Dollars for {gpus:,} GPUs over {days} days at {price} dollars per GPU-hour?",
        value,
        "dollars",
        f"{gpus:,} · {days} · 24 · {price} = {value:,.0f}.",
        slips={1 / 24: "A day has 24 hours."},
        tolerance=0.08,
    )


def energy(draw: Random) -> Decision:
    gpus, days, watts = draw.choice((256, 1024, 16384)), draw.choice((10, 30, 60)), draw.choice((400, 700, 1000))
    value = gpus * days * 24 * watts / 1e6
    return Decision(
        f"MWh of {gpus:,} GPUs at {watts} W over {days} days, without cooling?",
        value,
        "MWh",
        f"{gpus:,} · {watts} W · {days * 24} h = {n(value, 3)} MWh.",
        slips={1e3: "Those are kWh.", 1 / 24: "A day has 24 hours."},
        tolerance=0.08,
    )


def mfu(draw: Random) -> Decision:
    billions, gpus, share = draw.choice((7, 13, 70)), draw.choice((8, 64, 512)), draw.choice((0.31, 0.38, 0.44, 0.52))
    speed = float(f"{share * gpus * 989e12 / (6 * billions * 1e9):.2g}")
    value = 6 * billions * 1e9 * speed / (gpus * 989e12)
    return Decision(
        f"MFU of {billions}B at {speed:,.0f} tokens per second on {gpus} H100 (989 TFLOP/s)?",
        value,
        "",
        f"6 · {billions}e9 · {speed:,.0f} / ({gpus} · 989e12) = {value:.0%}.",
        slips={1 / 3: "6 FLOPs per parameter and token in training, not 2."},
        tolerance=0.08,
    )


def logits(draw: Random) -> Decision:
    tokens, words, bits = draw.choice((4096, 8192, 16384)), draw.choice((32000, 128256)), draw.choice((16, 32))
    value = tokens * words * bits // 8
    return Decision(
        f"Bytes of the logits of {tokens:,} tokens over {words:,} words in {bits} bits?",
        value,
        "B",
        f"{tokens:,} · {words:,} · {bits // 8} = {data(value)}, and their gradient as much again.",
        tolerance=0.1,
    )


def enough_microbatches(draw: Random) -> Decision:
    stages, percent = draw.choice((4, 8, 16)), draw.choice((10, 20, 25))
    value = pipeline.microbatches_needed(stages, percent / 100)
    return Decision(
        f"Microbatches that keep the bubble of {stages} stages at {percent} % or less, without chunks?",
        value,
        "",
        f"(n-1)/(M+n-1) <= {percent / 100}: M >= (n-1)(1/{percent / 100} - 1) = {value}.",
        tolerance=0.003,
        below="With so few the bubble is larger.",
        above="Fewer are enough.",
    )


def in_flight(draw: Random) -> Decision:
    stages, stage, count = draw.choice((4, 8, 16)), draw.choice((0, 1, 2, 3)), draw.choice((4, 8, 32))
    value = min(stages - stage, count)
    return Decision(
        f"Microbatches in flight on stage {stage} (from 0) of {stages} under 1F1B with {count} of them?",
        value,
        "",
        f"min(n - s, M) = min({stages} - {stage}, {count}) = {value}.",
        slips={count / value: "That is GPipe, which keeps all of them."} if count != value else {},
        tolerance=0.01,
    )


def batch_tokens(draw: Random) -> Decision:
    size, count, replicas, seq = draw.choice((1, 2)), draw.choice((4, 8, 16)), draw.choice((8, 32)), 4096
    value = size * count * replicas * seq
    return Decision(
        f"Tokens per step: {size} sequence{'s' if size > 1 else ''} of {seq:,} per microbatch, {count} microbatches, "
        f"{replicas} replicas?",
        value,
        "tokens",
        f"{size} · {count} · {replicas} · {seq:,} = {value:,}.",
        tolerance=0.05,
    )


def enough_tokens(draw: Random) -> Decision:
    billions = draw.choice((1, 3, 7, 13, 34, 70))
    return Decision(
        f"Tokens for {billions}B parameters by the Chinchilla rule?",
        20e9 * billions,
        "tokens",
        f"About 20 per parameter: {20 * billions} billion.",
        tolerance=0.1,
    )


def id_bytes(draw: Random) -> Decision:
    trillions, words = draw.choice((0.5, 1, 2, 15)), draw.choice((32000, 50257, 128256, 200000))
    each = 2 if words <= 65536 else 4
    return Decision(
        f"Bytes of {trillions} trillion token ids of a vocabulary of {words:,}, in the smallest whole number type?",
        trillions * 1e12 * each,
        "B",
        f"{each} bytes hold {words:,} ids: {data(trillions * 1e12 * each)}.",
        tolerance=0.05,
    )


def slow_rank(draw: Random) -> Decision:
    percent = draw.choice((5, 10, 15, 25, 50))
    value = 1 - 1 / (1 + percent / 100)
    return Decision(
        f"Share of throughput lost if one of many ranks takes {percent} % longer for every step?",
        value,
        "",
        f"All wait for it: 1 - 1/{1 + percent / 100:g} = {n(value, 3)}.",
        slips={percent / 100 / value: "The time grows by that; throughput falls by less."},
        tolerance=0.03,
    )
