"""Lab 00, start here: the roofline, and a link's latency and bandwidth.

    checks.py         FLOPs and bytes of a matmul, the rate attainable with them; latency and bandwidth
    checks_ranks.py   the first ranks, and the ledger that says what a program really did

Formulas are checked on numbers drawn anew each time; what communicates is checked on real ranks, by its values and by
its ledger.
"""

import itertools
import random
from collections.abc import Callable
from typing import Any

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Row, format_value, row
from course.shared.diagnose import expect_number
from minillm.predict import roofline

TOLERANCE = 1e-4  # the smallest message takes at least 7e-4 longer than the latency, so its time is not taken for it


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
    rows = []
    for itemsize in (2, 4):
        m, k, n = random.sample(range(2, 500), 3)
        what = f"[{m}, {k}] @ [{k}, {n}], {itemsize} bytes per element"
        flops, moved = two_numbers(learner(m, k, n, itemsize), "FLOPs and bytes")
        rows += [
            row(f"FLOPs of {what}", roofline.matmul_flops(m, k, n), flops),
            row(f"bytes of {what}", roofline.matmul_bytes(m, k, n, itemsize), moved, "B"),
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
    machines = [(random.uniform(5e10, 5e14), random.uniform(4, 400)) for _ in range(2)]  # FLOP/s, FLOP/B
    places = {"left of the ridge": 0.05, "just left of it": 0.9, "just right of it": 1.1, "right of the ridge": 20.0}
    rows, told = [], []
    for (peak, ridge), (where, share) in itertools.product(machines, places.items()):
        intensity = ridge * share * random.uniform(0.95, 1.05)
        found = expect_number(learner(intensity, peak, peak / ridge), "one number, FLOP/s")
        right = roofline.attainable(intensity, peak, peak / ridge)
        rows.append(row(f"{where}, {intensity:.3g} FLOP/B", right, found, "FLOP/s", tolerance=1e-9))
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
    for name, scale in (("a wire inside a node", 1.0), ("a slow network", 30.0)):
        latency, bandwidth = random.uniform(1e-5, 9e-5) * scale, random.uniform(1e9, 9e9) / scale
        sizes = [int(4**power * random.uniform(0.6, 1.4)) for power in range(5, 12)]
        random.shuffle(sizes)
        seconds = [latency + size / bandwidth for size in sizes]
        found = two_numbers(learner(list(sizes), list(seconds)), "latency and bandwidth")
        rows += [
            row(f"latency of {name}", latency, found[0], "s", tolerance=TOLERANCE),
            row(f"bandwidth of {name}", bandwidth, found[1], "B/s", tolerance=TOLERANCE),
        ]
        if "off" in (rows[-2].verdict, rows[-1].verdict):
            raise CheckFailed(
                f"{name}: you found a latency of {found[0]:.4g} s and a bandwidth of {found[1]:.4g} B/s; the points "
                f"lie on the line of {latency:.4g} s and {bandwidth:.4g} B/s.",
                rows,
                evidence=found,
            )
    return rows


def two_numbers(value: Any, which: str) -> tuple[float, float]:
    """Both; CheckFailed if they are not two numbers."""
    asked = f"two numbers, {which}"
    numbers = tuple(value) if hasattr(value, "__len__") and not isinstance(value, (str, dict)) else ()
    if len(numbers) != 2:
        raise CheckFailed(f"you returned {value!r}; the exercise asks for {asked}")
    return expect_number(numbers[0], asked), expect_number(numbers[1], asked)
