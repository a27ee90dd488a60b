"""Drills about messages: what a collective sends, in how many rounds, and how long a message takes."""

from random import Random

from course.lab24_interview.numbers import data, n
from course.shared.decisions import Decision


def all_reduce(draw: Random) -> Decision:
    ranks, size = draw.choice((2, 4, 8, 64)), draw.choice((0.1, 1, 2, 14)) * 1e9
    value = 2 * size * (ranks - 1) / ranks
    return Decision(
        f"Bytes each rank sends in a ring all-reduce of {data(size)} on {ranks} ranks?",
        value,
        "B",
        f"2P(N-1)/N = 2 · {data(size)} · {ranks - 1}/{ranks} = {data(value)}.",
        slips={0.5: "That is one phase, the reduce-scatter; the all-gather sends as much again."},
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


def reduce_scatter(draw: Random) -> Decision:
    ranks, size = draw.choice((4, 8, 32, 64)), draw.choice((0.5, 1, 4, 16)) * 1e9
    value = size * (ranks - 1) / ranks
    return Decision(
        f"Bytes each rank sends in a ring reduce-scatter of {data(size)} on {ranks} ranks?",
        value,
        "B",
        f"P(N-1)/N = {data(size)} · {ranks - 1}/{ranks} = {data(value)}.",
        slips={2: "That is an all-reduce: a reduce-scatter is half of it."},
        tolerance=0.08,
    )


def ring_rounds(draw: Random) -> Decision:
    ranks = draw.choice((4, 6, 8, 16, 24, 32, 64, 128))
    return Decision(
        f"Rounds of a ring all-reduce on {ranks} ranks?",
        2 * (ranks - 1),
        "",
        f"2(N-1) = {2 * (ranks - 1)}: N-1 for the reduce-scatter, N-1 for the all-gather.",
        slips={0.5: "That is one of the two phases."},
        tolerance=0.003,
    )


def message_time(draw: Random) -> Decision:
    latency, size, rate = draw.choice((5, 10, 20)), draw.choice((0.1, 1, 10, 100)), draw.choice((10, 25, 50))
    value = latency * 1e-6 + size * 1e6 / (rate * 1e9)
    return Decision(
        f"Seconds for a message of {size} MB, with {latency} µs of latency and {rate} GB/s?",
        value,
        "s",
        f"{latency} µs + {size} MB / {rate} GB/s = {n(value * 1e6, 3)} µs.",
        slips={1e6: "Those are microseconds; the question asks for seconds."},
    )


def half_way(draw: Random) -> Decision:
    latency, rate = draw.choice((2, 5, 10, 20, 50)), draw.choice((10, 25, 50, 200, 450))
    value = latency * 1e-6 * rate * 1e9
    return Decision(
        f"Bytes of the message whose latency and transfer take equally long: {latency} µs and {rate} GB/s?",
        value,
        "B",
        f"{latency} µs · {rate} GB/s = {data(value)}.",
    )


def two_levels(draw: Random) -> Decision:
    nodes, each = draw.choice((2, 4, 8, 16)), draw.choice((4, 8))
    value = 2 * (each - 1) + 2 * (nodes - 1)
    return Decision(
        f"Rounds of a two-level all-reduce over {nodes} nodes of {each} GPUs?",
        value,
        "",
        f"2(g-1) + 2(n-1) = {2 * (each - 1)} + {2 * (nodes - 1)}; a flat ring needs {2 * (nodes * each - 1)}.",
        slips={2 * (nodes * each - 1) / value: "That is a flat ring over all ranks."},
        tolerance=0.02,
    )


def fsdp_bytes(draw: Random) -> Decision:
    billions, ranks, count = draw.choice((1, 7, 13)), draw.choice((8, 64)), draw.choice((1, 2, 4, 8))
    value = 3 * 2e9 * billions * (ranks - 1) / ranks * count
    return Decision(
        f"Bytes each rank sends per step under ZeRO-3: {billions}B parameters in 16 bits, {ranks} ranks, {count} "
        f"microbatch{'es' if count > 1 else ''}?",
        value,
        "B",
        f"3P(N-1)/N per microbatch: two gathers and a reduce-scatter, {count} · 3 · {2 * billions} GB: {data(value)}.",
        slips={2 / 3: "Weights are gathered twice, for forward and for backward.", 1 / (3 * count): "That is P once."}
        | {ranks: f"That is the number of all {ranks} ranks together; the question asks for one."},
        tolerance=0.1,
    )


def tensor_bytes(draw: Random) -> Decision:
    tokens, hidden, ranks = draw.choice((2048, 8192)), draw.choice((4096, 8192)), draw.choice((2, 4, 8))
    value = 4 * 2 * (ranks - 1) / ranks * tokens * hidden * 2
    return Decision(
        f"Bytes a rank sends per layer under TP {ranks}, both passes: {tokens:,} tokens, hidden {hidden:,}, 16 bits?",
        value,
        "B",
        f"4 all-reduces of 2(t-1)/t · {data(tokens * hidden * 2)}: {data(value)}.",
        slips={0.5: "Two all-reduces forward, and two backward."},
        tolerance=0.1,
    )


def stage_message(draw: Random) -> Decision:
    size, seq, hidden = draw.choice((1, 2, 4)), draw.choice((2048, 4096, 8192)), draw.choice((4096, 8192, 16384))
    value = size * seq * hidden * 2
    return Decision(
        f"Bytes that a pipeline stage hands on per microbatch: {size} x {seq:,} tokens, hidden {hidden:,}, 16 bits?",
        value,
        "B",
        f"{size} · {seq:,} · {hidden:,} · 2 = {data(value)}.",
        tolerance=0.1,
    )


def expert_bytes(draw: Random) -> Decision:
    tokens, k, hidden, ranks = draw.choice((2048, 8192)), draw.choice((2, 8)), draw.choice((4096, 7168)), 8
    value = tokens * k * hidden * 2 * (ranks - 1) / ranks
    return Decision(
        f"Bytes each of {ranks} ranks sends in one all-to-all: {tokens:,} tokens, top {k}, hidden {hidden:,}, 16 bits?",
        value,
        "B",
        f"{tokens:,} · {k} · {hidden:,} · 2 · {ranks - 1}/{ranks} = {data(value)}.",
        slips={1 / k: "Every token goes to all of its experts."},
        tolerance=0.12,
    )
