"""Lab 00, start here: the roofline, which bounds every program on one machine.

    checks.py         FLOPs and bytes of a matmul, the rate attainable with them
    checks_ranks.py   the first ranks, and the ledger that says what a program really did
    checks_wire.py    a link's latency and bandwidth

The formulas are checked on numbers drawn anew each time; what communicates is checked on real ranks, by its values and
by its ledger.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from course.shared.diagnose import expect_number
from minillm.labkit.exercises import CheckFailed, exercise
from minillm.labkit.receipts import Row, format_value, row
from minillm.predict import roofline

# What they are held to.


@exercise(
    "matmul-cost",
    minutes=3,
    difficulty=1,
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
        flops, moved = two_numbers(learner(m, k, n, itemsize), "two numbers, FLOPs and bytes")
        right_flops, right_bytes = roofline.matmul_flops(m, k, n), roofline.matmul_bytes(m, k, n, itemsize)
        rows += [row(f"FLOPs of {who}", right_flops, flops), row(f"bytes of {who}", right_bytes, moved, "B")]
        explain(who, rows[-2], {m * k * n: "you counted multiplications only: every one comes with an addition"})
        elements = {"A": m * k, "B": k * n, "the result": m * n}
        known = {
            (right_bytes - size * itemsize): f"{name} is missing from it: two matrices are read, one is written"
            for name, size in elements.items()
        }
        known[sum(elements.values())] = "that is the number of elements: an element takes itemsize bytes"
        known[right_flops * itemsize] = "that counts a load for every FLOP: a value read once is used many times"
        explain(who, rows[-1], known)
    return rows


@exercise(
    "roofline",
    minutes=3,
    difficulty=1,
    hints=(
        "Two things can be the limit: the cores, and the memory that feeds them. Which of the two decides?",
        "Memory brings `bandwidth` bytes per second, and each byte is good for `intensity` FLOP. The slower of that "
        "and `peak_flops` is what you get.",
        "return min(peak_flops, intensity * bandwidth)",
    ),
)
def check_roofline(learner: Callable) -> list[Row]:
    peak, ridge = random.uniform(5e10, 5e14), random.uniform(4, 400)  # FLOP/s and FLOP/B of machines there are
    bandwidth, rows, found, asked = peak / ridge, [], [], []
    places = {"left of the ridge": 0.05, "just left of it": 0.9, "just right of it": 1.1, "right of the ridge": 20.0}
    for where, share in places.items():
        asked.append(ridge * share * random.uniform(0.95, 1.05))
        found.append(expect_number(learner(asked[-1], peak, bandwidth), "one number, FLOP/s"))
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


# What is wrong, in words.


def explain(who: str, got: Row, known: dict[float, str]) -> None:
    """CheckFailed for a row that is off, with the mistake that gives exactly this number, if it is a known one."""
    if got.verdict != "off":
        return
    near = [said for wrong, said in known.items() if math.isclose(got.measured, wrong, rel_tol=1e-6, abs_tol=1e-15)]
    value, right = format_value(got.measured, got.unit), format_value(got.predicted, got.unit)
    if 0 < abs(got.measured) < 1e-3 and got.unit != "s":
        value = f"{got.measured:.3g}"
    raise CheckFailed(f"{who}: you found {value}, but it is {right}" + (f"; {near[0]}" if near else ""), [got])


def two_numbers(value: Any, asked: str) -> tuple[float, float]:
    """Both; CheckFailed if they are not two numbers."""
    if not isinstance(value, Sequence) or len(value) != 2:
        raise CheckFailed(f"you returned {value!r}; asked for are {asked}")
    return expect_number(value[0], asked), expect_number(value[1], asked)
