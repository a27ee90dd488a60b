"""Lab 19: how many replicas there should be when a cold start is over, and what a page of metrics says."""

import math
import random
from collections.abc import Callable
from itertools import accumulate

import numpy as np

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab19_serving_fleet import pages
from course.lab19_serving_fleet.incidents import HEALTHY, NAMES
from course.shared.diagnose import expect, expect_number


@exercise(
    "replicas-wanted",
    minutes=20,
    difficulty=2,
    hints=(
        "The line is wanted at one time only: now + cold_start_s. What is its value at the mean of the times, whatever "
        "its slope? And what if all samples have one time?",
        "slope = Σ(t - mean t)(r - mean r) / Σ(t - mean t)². Rate then = mean r + slope · (now + cold_start - mean t), "
        "at least the latest; plus waiting / drain_s; divided by capacity · utilization; rounded up; at least 1.",
    ),
)
def check_wanted(learner: Callable) -> Receipt:
    rows = []
    small = {"capacity": 0.05}  # a replica is a small step: two rates that differ a little need other numbers
    cases = [
        ("rising", _rates(2.0, 0.02), 0, {}),
        ("falling", _rates(9.0, -0.02), 0, {}),
        ("steady, 120 wait", _rates(4.0, 0.0), 120, {}),
        ("one sample", [(50.0, 3.0)], 0, {}),
        ("no load", [(0.0, 0.0), (15.0, 0.0)], 0, {}),
        *(
            (
                f"drawn {n}",
                _rates(random.uniform(5, 20), random.uniform(-0.05, 0.05), 2.0),
                random.randint(0, 300),
                small,
            )
            for n in range(12)
        ),
        ("two samples", [(0.0, 2.0), (60.0, 4.0)], 0, small),
        ("gaps of 5 and 290 s", [(0.0, 2.0), (5.0, 2.1), (10.0, 2.2), (300.0, 8.0)], 0, small),
        ("the last below a line that falls", [(0.0, 9.0), (15.0, 9.0), (30.0, 9.0), (45.0, 5.0)], 0, small),
        ("the last above the line", [(0.0, 2.0), (20.0, 2.0), (25.0, 2.0), (60.0, 6.0)], 0, small),
    ]
    for name, rates, waiting, fixed in cases:
        settings = {
            "capacity": random.choice((0.5, 1.0, 8.0)),
            "utilization": random.choice((0.6, 0.7, 1.0)),
            "cold_start_s": random.choice((45.0, 240.0) if fixed else (0.0, 45.0, 240.0)),
            "drain_s": random.choice((30.0, 60.0)),
        } | fixed
        found = expect_number(learner(list(rates), waiting, **settings), "a number of replicas")
        exact, right = _wanted(rates, waiting, **settings)
        whole = round(exact)  # where it is one but for rounding, either neighbour may come out
        allowed = {right} if abs(exact - whole) > 1e-6 else {max(1, whole), max(1, whole + 1)}
        if found not in allowed:
            told = ", ".join(f"{key} {value:g}" for key, value in settings.items())
            said = (
                f"{name}: rates {rates[0][1]:.2f} to {rates[-1][1]:.2f} per second in {rates[-1][0] - rates[0][0]:g} s"
                f", {waiting} waiting, {told}: you want {found:g} replicas, and {right} are needed."
            )
            raise CheckFailed(said, evidence=(name, found))
        if not fixed and len(allowed) == 1:
            rows.append(row(f"{name}: replicas", right, found, kind="computed"))
    found = learner([(50.0, 4.0)], 0, capacity=0.5, utilization=0.5, cold_start_s=45.0, drain_s=30.0)
    if found != 16:
        raise CheckFailed(f"4 requests per second need 4 / (0.5 · 0.5) = 16 replicas, and you want {found}", rows)
    return receipt("replicas for when the cold start is over", rows)


def _rates(begin: float, slope: float, noise: float = 0.3) -> list[tuple[float, float]]:
    """Samples at uneven times."""
    start = random.uniform(0, 1000)
    times = accumulate(random.choices((5.0, 15.0, 60.0), k=random.randint(5, 20)), initial=start)
    return [(at, max(0.0, begin + slope * (at - start) + random.uniform(-noise, noise))) for at in times]


def _wanted(rates, waiting, capacity, utilization, cold_start_s, drain_s) -> tuple[float, int]:
    """By numpy's least squares. The number before it is rounded up, and after."""
    at, rate = np.array(rates, dtype=float).T
    coming = rate[-1]
    if len(rates) > 1:
        slope, height = np.polyfit(at - at[-1], rate, 1)
        coming = max(coming, height + slope * cold_start_s)
    exact = float((coming + waiting / drain_s) / (capacity * utilization))
    return exact, max(1, math.ceil(exact - 1e-9))


@exercise(
    "diagnose-a-fleet",
    minutes=25,
    difficulty=2,
    hints=(
        "Begin with what can have only one cause: replicas that start for too long; more attempts than requests; "
        "tokens computed twice.",
        "Two are left that look alike: waits are long and nothing is wasted. Do the longest tenth of the prompts hold "
        "most of the prompt tokens? Then it is they; else look at who waits and who sent most.",
    ),
)
def check_diagnose(learner: Callable) -> Receipt:
    rows, wrong = [], []
    for seed in (0, random.randint(1, 2)):
        for name in (*NAMES, HEALTHY):
            page = pages.page(name, seed)
            found = learner(page)
            expect(found in (*NAMES, HEALTHY), found, f"one of {', '.join((*NAMES, HEALTHY))}")
            rows.append(row(f"{name}, run {seed}", name, found))
            if found != name:
                wrong.append((name, found, page))
    others = [(HEALTHY, page) for page in pages.sound(HEALTHY)]
    others += [(HEALTHY, pages.with_p99(name, 0.95)) for name in NAMES]
    others += [(name, page) for name in NAMES for page in pages.variants(name)]
    for name, page in others:
        found = learner(page)
        if found != name:
            wrong.append((name, found, page))
    if wrong:
        name, found, page = wrong[0]
        said = f"{len(wrong)} diagnoses are wrong. The first: {name} was taken for {found}. Its page: {page.told}."
        raise CheckFailed(said, rows, evidence=tuple((name, found) for name, found, _ in wrong))
    return receipt("fleets, diagnosed from one page", rows)
