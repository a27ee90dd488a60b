"""Lab 19: how many replicas there should be when a cold start is over, and what a page of metrics says."""

import math
import random
from collections.abc import Callable

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
    cases = [
        ("rising", _rates(2.0, 0.02), 0),
        ("falling", _rates(9.0, -0.02), 0),
        ("steady, 120 wait", _rates(4.0, 0.0), 120),
        ("one sample", [(50.0, 3.0)], 0),
        ("no load", [(0.0, 0.0), (15.0, 0.0)], 0),
        *(
            (f"drawn {n}", _rates(random.uniform(0, 20), random.uniform(-0.05, 0.05)), random.randint(0, 300))
            for n in range(12)
        ),
    ]
    for name, rates, waiting in cases:
        settings = {
            "capacity": random.choice((0.5, 1.0, 8.0)),
            "utilization": random.choice((0.6, 0.7, 1.0)),
            "cold_start_s": random.choice((0.0, 45.0, 240.0)),
            "drain_s": random.choice((30.0, 60.0)),
        }
        found = expect_number(learner(list(rates), waiting, **settings), "a number of replicas")
        exact, right = _wanted(rates, waiting, **settings)
        if found != right and abs(exact - round(exact)) > 1e-6:
            told = ", ".join(f"{key} {value:g}" for key, value in settings.items())
            said = (
                f"{name}: rates {rates[0][1]:.2f} to {rates[-1][1]:.2f} per second in {rates[-1][0] - rates[0][0]:g} s"
                f", {waiting} waiting, {told}: you want {found:g} replicas, and {right} are needed."
            )
            raise CheckFailed(said, evidence=(name, found))
        if not name.startswith("drawn"):
            rows.append(row(f"{name}: replicas", right, found, kind="computed"))
    return receipt("replicas for when the cold start is over", rows)


def _rates(begin: float, slope: float) -> list[tuple[float, float]]:
    start, count = random.uniform(0, 1000), random.randint(5, 20)
    return [(start + 15.0 * n, max(0.0, begin + slope * 15.0 * n + random.uniform(-0.3, 0.3))) for n in range(count)]


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
    others += [(name, pages.with_everyday_noise(name)) for name in NAMES]
    for name, page in others:
        found = learner(page)
        if found != name:
            wrong.append((name, found, page))
    if wrong:
        name, found, page = wrong[0]
        said = f"{len(wrong)} diagnoses are wrong. The first: {name} was taken for {found}. Its page: {page.told}."
        raise CheckFailed(said, rows, evidence=tuple((name, found) for name, found, _ in wrong))
    return receipt("fleets, diagnosed from one page", rows)
