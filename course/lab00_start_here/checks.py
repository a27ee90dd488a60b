"""Lab 00, start here: the roofline, and a link's latency and bandwidth.

    checks.py         FLOPs and bytes of a matmul, the rate attainable with them; latency and bandwidth
    checks_ranks.py   the first ranks, and the ledger that says what a program really did

Formulas are checked on numbers drawn anew each time; what communicates is checked on real ranks, by its values and by
its ledger.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Row, format_value, row
from course.shared.diagnose import expect_number
from minillm.predict import roofline

ROUNDED = 1e-6  # relative error of a right answer that computes in float32
TOLERANCE = 1e-4  # the smallest message takes at least 7e-4 longer than the latency, so its time is not taken for it
JITTER = (0.02, -0.14, 0.06, -0.02)  # of the latency, in the times of the four smallest messages


@exercise(
    "matmul-cost",
    minutes=3,
    difficulty=1,
    hints=(
        "Each of the m·n results is a dot product of length k. How many multiplications and how many additions is "
        "that? And which three matrices cross the wire between memory and cores?",
        "A dot product of length k takes k multiplications and k additions (the first one onto zero). The inputs are "
        "read once, the result is written once; an element takes itemsize bytes.",
    ),
)
def check_matmul_cost(learner: Callable) -> list[Row]:
    shapes = [(*random.sample(range(2, 500), 3), itemsize) for itemsize in (2, 4)]
    rows = []
    for m, k, n, itemsize in [*shapes, (1, 4096, 4096, 2), (512, 4096, 4096, 1)]:  # the last: 2**34 FLOPs, and fp8
        what = f"[{m}, {k}] @ [{k}, {n}], {itemsize} bytes per element"
        flops, moved = two_numbers(learner(m, k, n, itemsize), "FLOPs and bytes")
        rows += [
            row(f"FLOPs of {what}", roofline.matmul_flops(m, k, n), flops, tolerance=ROUNDED),
            row(f"bytes of {what}", roofline.matmul_bytes(m, k, n, itemsize), moved, "B", ROUNDED),
        ]
        for found in rows[-2:]:
            if found.verdict == "off":
                got, right = (format_value(value, found.unit) for value in (found.measured, found.predicted))
                raise CheckFailed(f"{found.name}: you found {got}, and it is {right}.", rows, evidence=found.measured)
    return rows


@exercise(
    "roofline",
    minutes=3,
    difficulty=1,
    hints=(
        "Two things can be the limit: the cores, and the memory that feeds them. Which of the two decides?",
        "Memory brings `bandwidth` bytes per second, and every byte feeds `intensity` FLOP. The slower of that "
        "and `peak_flops` is what you get.",
    ),
)
def check_roofline(learner: Callable) -> list[Row]:
    ridges = (random.uniform(4, 400), random.randint(2, 8) + 0.5)  # FLOP/B; the second is far from a whole number
    machines = [(random.uniform(5e10, 5e14), ridge) for ridge in ridges]
    places = {"left of the ridge": 0.05, "just left of it": 0.96, "just right of it": 1.04, "right of the ridge": 20.0}
    rows, told = [], []
    for (peak, ridge), (where, share) in itertools.product(machines, places.items()):
        intensity = ridge * share * random.uniform(0.99, 1.01)
        found = expect_number(learner(intensity, peak, peak / ridge), "one number, FLOP/s")
        right = roofline.attainable(intensity, peak, peak / ridge)
        rows.append(row(f"{where}, {intensity:.3g} FLOP/B", right, found, "FLOP/s", ROUNDED))
        told.append(f"peak {format_value(peak, 'FLOP/s')}, memory {format_value(peak / ridge, 'B/s')}")
    off = [place for place, found in enumerate(rows) if found.verdict == "off"]
    if off:
        first = rows[off[0]]
        got, right = (format_value(value, "FLOP/s") for value in (first.measured, first.predicted))
        raise CheckFailed(
            f"{told[off[0]]}, {first.name}: you found {got}, and {right} are possible.",
            rows,
            evidence=[found.measured for found in rows],
        )
    return rows


@exercise(
    "alpha-beta",
    minutes=5,
    difficulty=2,
    hints=(
        "t = latency + bytes / bandwidth is a straight line in bytes. Which of the two is its height at zero, and what "
        "is its slope?",
        "The slope is seconds per byte, so its inverse is the bandwidth. The latency is what is left of a time after "
        "bytes × slope. The largest and the smallest message give both.",
        "i, j = sizes.index(min(sizes)), sizes.index(max(sizes)); slope = (seconds[j] - seconds[i]) / (sizes[j] - "
        "sizes[i]); return seconds[i] - slope * sizes[i], 1 / slope",
    ),
)
def check_alpha_beta(learner: Callable) -> list[Row]:
    rows = []
    for line in (_exact("a wire inside a node", 1.0), _exact("a slow network", 30.0), _measured()):
        sizes, seconds = map(list, zip(*line.points, strict=True))
        found = two_numbers(learner(sizes, seconds), "latency and bandwidth")
        rows += [
            row(f"latency of {line.name}", line.latency, found[0], "s", line.tolerance),
            row(f"bandwidth of {line.name}", line.bandwidth, found[1], "B/s", line.tolerance),
        ]
        if "off" in (rows[-2].verdict, rows[-1].verdict):
            raise CheckFailed(
                f"{line.name}: you found a latency of {found[0]:.4g} s and a bandwidth of {found[1]:.4g} B/s; the "
                f"points lie {line.where} of {line.latency:.4g} s and {line.bandwidth:.4g} B/s.{line.advice}",
                rows,
                evidence=found,
            )
    return rows


@dataclass(frozen=True)
class Line:
    """A line to find. points: (bytes, seconds); tolerance: of latency (s) and bandwidth (bytes/s)."""

    name: str
    latency: float
    bandwidth: float
    points: list[tuple[int, float]]
    tolerance: float = TOLERANCE
    where: str = "on the line"
    advice: str = ""


def _exact(name: str, scale: float) -> Line:
    latency, bandwidth = random.uniform(1e-5, 9e-5) * scale, random.uniform(1e9, 9e9) / scale
    sizes = [int(4**power * random.uniform(0.6, 1.4)) for power in range(5, 12)]
    random.shuffle(sizes)
    return Line(name, latency, bandwidth, [(size, latency + size / bandwidth) for size in sizes])


def _measured() -> Line:
    """Small messages jitter: right fits miss by 3 % at most, a line through two of them by more than half.

    Sizes and times that are sorted apart miss by 13 %. The first two points, the last two, and the first and the last
    are small messages.
    """
    latency, bandwidth = random.uniform(2e-4, 4e-4), random.uniform(5e9, 9e9)
    sizes = [int(4**power * random.uniform(0.9, 1.1)) for power in range(5, 13)]
    jitter = (*JITTER, *[0.0] * (len(sizes) - len(JITTER)))
    points = [(size, latency * (1 + share) + size / bandwidth) for size, share in zip(sizes, jitter, strict=True)]
    smallest, second, third, fourth, *large = points
    random.shuffle(large)
    points = [second, smallest, *large, fourth, third]
    advice = " Use all of them, or the smallest and the largest message."
    return Line("measured times", latency, bandwidth, points, 0.08, "beside the line", advice)


def two_numbers(value: Any, which: str) -> tuple[float, float]:
    """Both; CheckFailed if they are not two numbers."""
    asked = f"two numbers, {which}"
    numbers = tuple(value) if hasattr(value, "__len__") and not isinstance(value, (str, dict)) else ()
    if len(numbers) != 2:
        raise CheckFailed(f"you returned {value!r}; the exercise asks for {asked}")
    return expect_number(numbers[0], asked), expect_number(numbers[1], asked)
