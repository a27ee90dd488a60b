"""Lab 00, start here: two lines that bound every program (the roofline, a link's alpha and beta) and the first ranks.

The formulas are checked on numbers drawn anew each time; what communicates is checked on real ranks, by its values and
by its ledger.
"""

import math
import random
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch

from minillm.comm import Group, HangError, launch
from minillm.labkit.exercises import CheckFailed, exercise
from minillm.labkit.receipts import Receipt, Row, format_value, receipt, row
from minillm.measure import Ledger, ledger
from minillm.predict import comms, roofline

LAB = "00_start_here"
PATIENCE_S = 6.0  # of a rank in one operation: longer than any exercise needs on a busy machine
VERDICTS = ("fine", "silent", "chatty", "wasteful")


# The course's own answers.


def matmul_cost(m: int, k: int, n: int, itemsize: int) -> tuple[int, int]:
    """(FLOPs, bytes of memory traffic at least) of [m, k] @ [k, n]."""
    return 2 * m * k * n, (m * k + k * n + m * n) * itemsize


def attainable(intensity: float, peak_flops: float, bandwidth: float) -> float:
    """FLOP/s at most for work that does `intensity` FLOP per byte it moves."""
    return min(peak_flops, intensity * bandwidth)


def average(group: Group, x: torch.Tensor) -> torch.Tensor:
    """x: [n], another one on each rank -> [n]: their mean, on every rank. x is left alone."""
    mean = x.clone()
    group.all_reduce(mean)
    return mean / group.world_size


def read_receipt(led: Ledger, num_bytes: int, world_size: int) -> str:
    """What a program that should all-reduce one tensor of `num_bytes` really did, from one rank's ledger."""
    predicted = 2 * num_bytes * (world_size - 1) / world_size
    if not led.calls:
        return "silent"
    if led.bytes() > predicted:
        return "wasteful"
    return "chatty" if led.calls.total() > 1 else "fine"


def fit_link(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(latency in s, bandwidth in bytes/s) of the line through messages of `sizes` bytes that took `seconds`."""
    n, mean_size, mean_time = len(sizes), sum(sizes) / len(sizes), sum(seconds) / len(seconds)
    slope = sum(x * t for x, t in zip(sizes, seconds, strict=True)) - n * mean_size * mean_time
    slope /= sum(x * x for x in sizes) - n * mean_size**2
    return mean_time - slope * mean_size, 1 / slope


# What they are held to.


@exercise(
    "matmul-cost",
    reference=matmul_cost,
    minutes=3,
    difficulty=1,
    lab=LAB,
    hints=(
        "Each of the m·n results is a dot product of length k. How many multiplications and how many additions is "
        "that? And which three matrices cross the wire between memory and cores?",
        "A dot product of length k takes k multiplications and k additions (the first one onto zero). Two matrices are "
        "read, one is written; an element takes itemsize bytes.",
        "return 2 * m * k * n, (m * k + k * n + m * n) * itemsize",
    ),
)
def check_matmul_cost(learner: Callable) -> list[Row]:
    rows = []
    for itemsize in (2, 4):
        m, k, n = random.sample(range(2, 500), 3)
        who = f"[{m}, {k}] @ [{k}, {n}], {itemsize} bytes per element"
        flops, moved = _two_numbers(learner(m, k, n, itemsize), "two numbers, FLOPs and bytes")
        right_flops, right_bytes = roofline.matmul_flops(m, k, n), roofline.matmul_bytes(m, k, n, itemsize)
        rows += [row(f"FLOPs of {who}", right_flops, flops), row(f"bytes of {who}", right_bytes, moved, "B")]
        _explain(who, rows[-2], {m * k * n: "you counted multiplications only: every one comes with an addition"})
        elements = {"A": m * k, "B": k * n, "the result": m * n}
        known = {
            (right_bytes - size * itemsize): f"{name} is missing from it: two matrices are read, one is written"
            for name, size in elements.items()
        }
        known[sum(elements.values())] = "that is the number of elements: an element takes itemsize bytes"
        known[right_flops * itemsize] = "that counts a load for every FLOP: a value read once is used many times"
        _explain(who, rows[-1], known)
    return rows


@exercise(
    "roofline",
    reference=attainable,
    minutes=3,
    difficulty=1,
    lab=LAB,
    hints=(
        "Two things can be the limit: the cores, and the memory that feeds them. Which of the two decides?",
        "Memory brings `bandwidth` bytes per second, and each byte is good for `intensity` FLOP. The slower of that "
        "and `peak_flops` is what you get.",
        "return min(peak_flops, intensity * bandwidth)",
    ),
)
def check_roofline(learner: Callable) -> list[Row]:
    peak, bandwidth = random.uniform(5e10, 5e14), random.uniform(5e9, 5e12)
    ridge, rows, found, asked = peak / bandwidth, [], [], []
    places = {"left of the ridge": 0.05, "just left of it": 0.9, "just right of it": 1.1, "right of the ridge": 20.0}
    for where, share in places.items():
        asked.append(ridge * share * random.uniform(0.95, 1.05))
        found.append(_number(learner(asked[-1], peak, bandwidth), "one number, FLOP/s"))
        right = roofline.attainable(asked[-1], peak, bandwidth)
        rows.append(row(f"{where}, {asked[-1]:.3g} FLOP/B", right, found[-1], "FLOP/s", tolerance=1e-9))
    if all(row.verdict == "ok" for row in rows):
        return rows
    for said, wrong in _ROOFLINE_MISTAKES.items():
        if all(math.isclose(f, wrong(i, peak, bandwidth), rel_tol=1e-6) for i, f in zip(asked, found, strict=True)):
            raise CheckFailed(said, rows)
    raise CheckFailed(
        f"peak {format_value(peak, 'FLOP/s')}, memory {format_value(bandwidth, 'B/s')}: see the rows", rows
    )


_ROOFLINE_MISTAKES = {
    "you took the larger of the two limits; no program is faster than the smaller one": (
        lambda intensity, peak, bandwidth: max(peak, intensity * bandwidth)
    ),
    "you found the peak everywhere; with few FLOP per byte, memory cannot feed the cores that fast": (
        lambda intensity, peak, bandwidth: peak
    ),
    "you found a slope without end; right of the ridge the cores are the limit, and the roof is flat": (
        lambda intensity, peak, bandwidth: intensity * bandwidth
    ),
    "you divided where it should be multiplied: bytes/s times FLOP/byte is FLOP/s": (
        lambda intensity, peak, bandwidth: min(peak, bandwidth / intensity)
    ),
    "you added the two times; memory and cores work at once, so only the slower one counts": (
        lambda intensity, peak, bandwidth: 1 / (1 / peak + 1 / (intensity * bandwidth))
    ),
}


@exercise(
    "first-rank-program",
    reference=average,
    minutes=5,
    difficulty=2,
    lab=LAB,
    hints=(
        "Every rank runs the same lines on its own x. One collective gives all of them the sum; what is left to do?",
        "group.all_reduce works in place, so give it a copy, x.clone(). Then divide by group.world_size.",
        "mean = x.clone(); group.all_reduce(mean); return mean / group.world_size",
    ),
)
def check_first_rank_program(learner: Callable) -> Receipt:
    world = 4
    inputs = [torch.randint(-50, 50, (8 * random.randint(2, 20),)).float() for _ in range(world)]
    size = min(x.numel() for x in inputs)
    inputs = [x[:size] for x in inputs]
    trials = _on_ranks(_try_average, world, learner, inputs)
    total = torch.stack(inputs).sum(0)
    for rank, (result, after, _) in enumerate(trials):
        _say_average(f"rank {rank} of {world}", result, inputs[rank], total, world)
        if not torch.equal(after, inputs[rank]):
            raise CheckFailed(f"rank {rank} changed its input x: all_reduce works in place, so give it x.clone()")
    cost = comms.ring_all_reduce(size, 4, world)
    ledgers = [led for _, _, led in trials]
    rows = [
        row("all-reduces per rank", (1,) * world, tuple(led.calls["all_reduce"] for led in ledgers)),
        row("bytes sent per rank", cost.sent_per_rank, tuple(led.bytes() for led in ledgers), "B"),
    ]
    if len(ledgers[0].calls) == 0:
        raise CheckFailed("right values, but the ledger saw nothing sent: each rank has only its own x", rows)
    if ledgers[0].calls != {"all_reduce": 1}:
        used = ", ".join(f"{count} × {name}" for name, count in ledgers[0].calls.items())
        raise CheckFailed(f"right values by {used}: one all_reduce of the whole tensor is enough", rows)
    return receipt(f"a mean over {world} ranks, {size * 4} bytes each", rows)


@exercise(
    "read-a-receipt",
    reference=read_receipt,
    minutes=5,
    difficulty=2,
    lab=LAB,
    hints=(
        "All four programs return right values. Look at how often each called (led.calls) and how many bytes it sent "
        "(led.bytes()), and compare with what one ring all-reduce takes.",
        "No call at all is silent. More than 2·P·(N−1)/N bytes is wasteful, however few the calls. As many bytes, but "
        "more than one call, is chatty. What is left is fine.",
        'if not led.calls: return "silent"; if led.bytes() > 2 * num_bytes * (world_size - 1) / world_size: '
        'return "wasteful"; return "chatty" if led.calls.total() > 1 else "fine"',
    ),
)
def check_read_receipt(learner: Callable) -> list[Row]:
    world, elements = 4, 96 * random.randint(2, 20)  # divides into 8 pieces for 3 or 4 ranks: all bytes are exact
    ledgers = _on_ranks(_run_suspects, world, elements)[0]
    rows = []
    for size, truth, led in random.sample(ledgers, len(ledgers)):
        found = learner(led, elements * 4, size)
        evidence = ", ".join(f"{count} × {name}" for name, count in led.calls.items()) or "no calls"
        rows.append(row(f"{size} ranks: {evidence}, {led.bytes():,} B", truth, found))
        if found == truth:
            continue
        if found not in VERDICTS:
            raise CheckFailed(f"you returned {found!r}; the answer is one of {', '.join(VERDICTS)}", rows)
        predicted = 2 * elements * 4 * (size - 1) // size
        raise CheckFailed(
            f"you call it {found!r}, but it is {truth!r}: {size} ranks, P = {elements * 4:,} B, the ledger has "
            f"{evidence} and {led.bytes():,} B sent in {led.messages} messages; one ring all-reduce is 1 call and "
            f"{predicted:,} B",
            rows,
        )
    return rows


@exercise(
    "alpha-beta",
    reference=fit_link,
    minutes=5,
    difficulty=2,
    lab=LAB,
    hints=(
        "t = latency + bytes / bandwidth is a straight line in bytes. Which of the two is its height at zero, and what "
        "is its slope?",
        "The slope is seconds per byte, so the bandwidth is one over it. The latency is what is left of a time after "
        "bytes × slope. The largest and the smallest message give both.",
        "i, j = sizes.index(min(sizes)), sizes.index(max(sizes)); slope = (seconds[j] - seconds[i]) / (sizes[j] - "
        "sizes[i]); return seconds[i] - slope * sizes[i], 1 / slope",
    ),
)
def check_alpha_beta(learner: Callable) -> list[Row]:
    rows = []
    for name, scale in (("a wire inside a node", 1.0), ("a slow network", 30.0)):
        latency, bandwidth = random.uniform(1e-5, 9e-5) * scale, random.uniform(1e9, 9e9) / scale
        sizes = [int(4**power * random.uniform(0.6, 1.4)) for power in range(5, 12)]
        seconds = [latency + size / bandwidth for size in sizes]
        found = _two_numbers(learner(list(sizes), list(seconds)), "two numbers, latency and bandwidth")
        rows += [
            row(f"latency of {name}", latency, found[0], "s", tolerance=1e-3),
            row(f"bandwidth of {name}", bandwidth, found[1], "B/s", tolerance=1e-3),
        ]
        largest, smallest = sizes.index(max(sizes)), sizes.index(min(sizes))
        through_zero = sum(s * s for s in sizes) / sum(s * t for s, t in zip(sizes, seconds, strict=True))
        bandwidths = {
            1 / bandwidth: "that is the slope, seconds per byte: the bandwidth is one over it",
            sizes[largest] / seconds[largest]: "bytes by seconds of one message: take the latency off its time first",
            through_zero: "that line runs through zero: a message of no bytes still takes the latency",
            latency: "that is the latency: asked for is (latency, bandwidth), in this order",
        }
        latencies = {seconds[smallest]: "that is the time of the smallest message: take its bytes × slope off"}
        _explain(name, rows[-1], bandwidths)
        _explain(name, rows[-2], latencies | {0.0: "without a latency, a thousand small messages would cost nothing"})
    return rows


# On the ranks.


def _try_average(group: Group, learner: Callable, inputs: Sequence[torch.Tensor]) -> tuple[Any, torch.Tensor, Ledger]:
    x = inputs[group.rank].clone()
    with ledger() as led:
        result = learner(group, x)
    return result, x, led


def _run_suspects(group: Group, elements: int) -> list[tuple[int, str, Ledger]]:
    """(ranks, what it is, ledger of this rank) of four programs that all leave the sum over the ranks in x."""
    found = []
    for size in (group.world_size, group.world_size - 1):
        part = group.subgroup(range(size), f"{size} ranks")
        for verdict, program in (("fine", _fine), ("silent", _silent), ("chatty", _chatty), ("wasteful", _wasteful)):
            if part.rank >= 0:
                with ledger() as led:
                    program(part, torch.full((elements,), float(part.rank)))
                found.append((size, verdict, led))
    return found


def _fine(group: Group, x: torch.Tensor) -> torch.Tensor:
    return group.all_reduce(x)


def _silent(group: Group, x: torch.Tensor) -> torch.Tensor:
    return x.fill_(sum(range(group.world_size)))  # it knew what the others had


def _chatty(group: Group, x: torch.Tensor) -> torch.Tensor:
    for piece in x.chunk(8):
        group.all_reduce(piece)
    return x


def _wasteful(group: Group, x: torch.Tensor) -> torch.Tensor:
    return group.all_gather(x).view(group.world_size, -1).sum(0)


def _on_ranks(program: Callable, world: int, *args: Any) -> list[Any]:
    """`launch`, with a hang told as a failed check."""
    try:
        return launch(program, world, *args, timeout=PATIENCE_S, device="cpu")
    except HangError as hang:
        raise CheckFailed(
            f"the ranks wait for each other for ever. Who waits for whom:\n{hang.table}\n"
            "Every rank of a group must enter every collective of it, in the same order."
        ) from None


# What is wrong, in words.


def _say_average(who: str, result: Any, own: torch.Tensor, total: torch.Tensor, world: int) -> None:
    if not isinstance(result, torch.Tensor):
        raise CheckFailed(f"{who} returned {type(result).__name__}, not a tensor: return the mean")
    if result.shape != total.shape:
        raise CheckFailed(f"{who} returned a tensor of shape {list(result.shape)}, but x has shape {list(total.shape)}")
    known = {
        "x as it was: nothing came from the other ranks": own,
        f"the sum, {world} times the mean: divide by group.world_size": total,
        f"the mean divided by {world} once more: divide only once": total / world**2,
        "its own x divided by the number of ranks: the other ranks' x are missing": own / world,
    }
    result = result.to(total.dtype)
    if torch.allclose(result, total / world, rtol=1e-5, atol=1e-5):
        return
    for said, wrong in known.items():
        if torch.allclose(result, wrong, rtol=1e-5, atol=1e-5):
            raise CheckFailed(f"{who} returned {said}")
    raise CheckFailed(f"{who} returned neither the mean nor the sum of the ranks' x")


def _explain(who: str, got: Row, known: dict[float, str]) -> None:
    """CheckFailed for a row that is off, with the mistake that gives exactly this number, if it is a known one."""
    if got.verdict != "off":
        return
    near = [said for wrong, said in known.items() if math.isclose(got.measured, wrong, rel_tol=1e-6, abs_tol=1e-15)]
    value, right = format_value(got.measured, got.unit), format_value(got.predicted, got.unit)
    if 0 < abs(got.measured) < 1e-3 and got.unit != "s":
        value = f"{got.measured:.3g}"
    raise CheckFailed(f"{who}: you found {value}, but it is {right}" + (f"; {near[0]}" if near else ""), [got])


def _number(value: Any, asked: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise CheckFailed(f"you returned {value!r}; asked for is {asked}")
    return value.item() if hasattr(value, "item") else value


def _two_numbers(value: Any, asked: str) -> tuple[float, float]:
    if not isinstance(value, Sequence) or len(value) != 2:
        raise CheckFailed(f"you returned {value!r}; asked for are {asked}")
    return _number(value[0], asked), _number(value[1], asked)
