"""Lab 00's claims, each once: the notebook prints them, the tour runs those in CLAIMS."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.utils.flop_counter import FlopCounterMode

from course.kit.answers import answers_of
from course.kit.receipts import Receipt, format_value, formula, receipt, row
from course.lab00_start_here import experiments
from course.shared.diagnose import expect_number
from course.shared.table import Table, seconds, table
from minillm.comm import Group, HangError, Link, RankError, launch
from minillm.measure import machine
from minillm.measure.machine import Machine
from minillm.predict import comms, roofline

ANSWERS = answers_of("00_start_here")
MIB, WORLD = 1 << 20, 4
SLOW = Link(latency_s=0.020, bandwidth_bytes_per_s=50e6)
H100 = {"peak_flops": 989e12, "bandwidth": 3.35e12}  # bf16 without sparsity, HBM3 (NVIDIA's data sheet of the SXM card)


number = partial(expect_number, returns="a number")  # of what a reader's function returns, be it a tensor


# What the machine can do.


def memory_against_link(card: Machine, guess: float) -> Receipt:
    """How many times slower a byte travels to another rank than it comes from memory."""
    memory, link = card.memory_bandwidth_bytes_per_s, card.link(2).bandwidth_bytes_per_s
    return receipt(
        "from memory, and to another rank",
        [
            row("bandwidth of memory", None, memory, "B/s"),
            row("bandwidth of a message between 2 ranks", None, link, "B/s"),
            row("    memory / link", None, memory / link, guess=guess),
        ],
    )


def intensities(matmul_cost: Callable, tokens: Sequence[int] = (1, 8, 64, 512)) -> Table:
    """FLOP per byte of [tokens, 4096] @ [4096, 4096] in fp32, by the reader's function."""
    costs = [(count, *map(number, matmul_cost(count, 4096, 4096, 4))) for count in tokens]
    return table("fp32 weights [4096, 4096]", ("tokens", "FLOP per byte"), [(str(t), f / b) for t, f, b in costs])


def under_the_roof(card: Machine, rates: Sequence[tuple[int, float]], attainable: Callable) -> Table:
    """Measured matmuls [tokens, 4096] @ [4096, 4096] beside the roof at their intensity."""
    peak, bandwidth = card.peak_flops, card.memory_bandwidth_bytes_per_s
    lines = []
    for tokens, rate in rates:
        intensity = roofline.matmul_intensity(tokens, 4096, 4096, 4)
        limit = "memory" if intensity < peak / bandwidth else "cores"
        highest = number(attainable(intensity, peak, bandwidth))
        lines.append(
            (str(tokens), f"{intensity:.1f}", limit, *(format_value(x, "FLOP/s") for x in (highest, rate)),
             f"{rate / highest:.0%}")
        )  # fmt: skip
    return table(
        f"ridge at {peak / bandwidth:.1f} FLOP/byte",
        ("tokens", "FLOP/byte", "limit", "roof", "measured", "share of the roof"),
        lines,
    )


# Ranks.


def launched() -> Receipt:
    """Ranks agree on a sum; one that fails and one that stays away are named."""
    sums = launch(_sum_of_ranks, WORLD)
    try:
        launch(_fail_on_rank_2, WORLD)
        failing = None
    except RankError as error:
        failing = error.rank
    try:
        launch(_stay_away_on_rank_1, 3, timeout=1.0)
        waiting = ""
    except HangError as error:
        waiting = error.table
    return receipt(
        "ranks of one machine",
        [
            row("4 ranks agree on the sum of their numbers", [6.0] * WORLD, sums),
            row("a failing rank is named, not its echoes", 2, failing),
            row(
                "a rank that never enters the collective is named",
                {"1"},
                {line.split()[-1] for line in waiting.splitlines() if "all_reduce" in line},
            ),
        ],
    )


def _sum_of_ranks(group: Group) -> float:
    return group.all_reduce(torch.tensor([float(group.rank)])).item()


def _fail_on_rank_2(group: Group) -> None:
    if group.rank == 2:
        raise RuntimeError("this rank fails on purpose")
    group.all_reduce(torch.ones(8))


def _stay_away_on_rank_1(group: Group) -> None:
    if group.rank == 1:
        time.sleep(60)
    group.all_reduce(torch.ones(8))


def witnesses(average: Callable = ANSWERS.average, num_bytes: int = 8 * MIB) -> Receipt:
    """Bytes of a mean over 4 ranks: by each rank's ledger and by the system's counter."""
    found = launch(experiments.two_witnesses, WORLD, average, num_bytes)
    cost = comms.ring_all_reduce(num_bytes // 4, 4, WORLD)
    rows = [row(f"rank {r} sent, by its ledger", cost.sent_per_rank[r], found[r][0], "B") for r in range(WORLD)]
    rows.append(row("all ranks, on the wire", cost.total_bytes, found[0][1], "B", tolerance=0.03, noisy=True))
    return receipt("the mean of 8 MiB over 4 ranks", rows, open_rows=1, show="on the wire")


def links(card: Machine, fit_link: Callable) -> Table:
    """α and β of the card beside the reader's fit of the same samples."""
    lines = []
    for world_size, fit in card.links.items():
        latency, bandwidth = map(number, fit_link(*map(list, zip(*fit.samples, strict=True))))
        lines.append(
            (str(world_size), seconds(fit.latency_s), seconds(latency),
             *(format_value(b, "B/s") for b in (fit.bandwidth_bytes_per_s, bandwidth)))
        )  # fmt: skip
    return table("one round of a ring", ("ranks", "α, card", "α, yours", "β, card", "β, yours"), lines)


def all_reduce_time(guess_ms: float | None = None) -> Receipt:
    """An all-reduce of 1 MiB: seconds by α and β, and measured."""
    cost, line = comms.ring_all_reduce(MIB // 4, 4, WORLD), machine().link(WORLD)
    expected = cost.time(line.latency_s, line.bandwidth_bytes_per_s)
    runs = sorted(map(max, zip(*launch(experiments.time_all_reduce, WORLD, MIB), strict=True)))
    median = runs[len(runs) // 2]
    guess = guess_ms and guess_ms / 1e3
    tolerance = 3.0 if median > expected else 0.75  # of the prediction: four times it, or a quarter
    return receipt(
        f"all-reduce of 1 MiB on {WORLD} ranks: {cost.rounds} rounds of α + bytes/β",
        [
            row("median run, allowed: a factor of 4", expected, median, "s", tolerance, guess=guess, noisy=True),
            row("    best run", None, runs[0], "s"),
            row("    worst run", None, runs[-1], "s"),
        ],
    )


def emulated_link(num_bytes: int = MIB) -> Receipt:
    """One message over the loopback and over an emulated link."""
    real, paced = (launch(experiments.one_message, 2, num_bytes, link=link)[0] for link in (None, SLOW))
    return receipt(
        "one message of 1 MiB from rank 0 to rank 1",
        [
            row("this machine's loopback", None, real[0], "s"),
            row("emulated: 20 ms + bytes / 50 MB/s", SLOW.seconds(num_bytes), paced[0], "s", 0.25, noisy=True),
            row("the ledger says which of the two is emulated", (False, True), (real[1], paced[1])),
        ],
    )


def counted_by_torch(matmul_cost: Callable = ANSWERS.matmul_cost) -> Receipt:
    """FLOPs of a matmul as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        torch.randn(64, 512) @ torch.randn(512, 256)
    counted = counter.get_total_flops()
    return receipt("[64, 512] @ [512, 256]", [row("FLOPs: yours, torch's", matmul_cost(64, 512, 256, 4)[0], counted)])


# Numbers for the questions.


def interview() -> Receipt:
    """What the answers rest on, by formula from this machine's card."""
    card = machine()
    line = card.link(WORLD)
    decode = roofline.matmul_intensity(1, 4096, 4096, 2)

    def all_reduce_s(world_size: int, num_bytes: int = MIB) -> float:
        return comms.ring_all_reduce(num_bytes // 4, 4, world_size).time(line.latency_s, line.bandwidth_bytes_per_s)

    return receipt(
        "this machine, by its card",
        [
            formula("1. ridge, fp32", card.peak_flops / card.memory_bandwidth_bytes_per_s, "FLOP/B"),
            formula("2. intensity of 1 token, bf16 weights [4096, 4096]", decode, "FLOP/B"),
            formula("    ridge of an H100, bf16", roofline.ridge_point(**H100), "FLOP/B"),
            formula("3. all-reduce of 1 MiB on 4 ranks", all_reduce_s(WORLD), "s"),
            formula("    as 64 all-reduces of 16 KiB", 64 * all_reduce_s(WORLD, MIB // 64), "s"),
            formula(
                "4. α·β: message size at which latency is half of the time",
                round(line.latency_s * line.bandwidth_bytes_per_s),
                "B",
            ),
            formula("5. all-reduce of 1 MiB on 64 ranks", all_reduce_s(64), "s"),
        ],
        open_rows=7,
    )


def design() -> Receipt:
    """The batch at which an H100 stops waiting for memory; 7 billion gradients in one call and in 4,000."""
    ridge = roofline.ridge_point(**H100)
    bound = next(m for m in range(1, 4096) if roofline.matmul_intensity(m, 4096, 4096, 2) > ridge)
    whole, piece = (comms.ring_all_reduce(7 * 10**9 // calls, 2, 64) for calls in (1, 4000))
    return receipt(
        "by formula",
        [
            formula("A. sequences per pass from which the cores are the limit", bound),
            formula("B. one call at 50 GB/s", whole.time(10e-6, 50e9), "s"),
            formula("B. 4,000 calls at 50 GB/s", 4000 * piece.time(10e-6, 50e9), "s"),
            formula("    of which latency", 4000 * piece.rounds * 10e-6, "s"),
            formula("B. one call at 450 GB/s", whole.time(10e-6, 450e9), "s"),
            formula("B. 4,000 calls at 450 GB/s", 4000 * piece.time(10e-6, 450e9), "s"),
        ],
        open_rows=6,
    )


CLAIMS = (counted_by_torch, launched, witnesses, all_reduce_time, emulated_link)  # ranks can start meanwhile
