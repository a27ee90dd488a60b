"""Lab 19, a serving fleet: percentiles that leave nothing out, limits, routing, fairness, scaling, diagnosis.

checks.py          percentiles of a stall; a token bucket; two choices
checks_sharing.py  a fair queue; a ring with bounded loads
checks_scaling.py  replicas for when a cold start is over; a page of metrics, diagnosed
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.shared.diagnose import expect, expect_number

ANSWERS = answers_of("19_serving_fleet")


@dataclass(frozen=True)
class DueCall:
    due: float
    sent: float
    ended: float | None


@exercise(
    "latency-percentile",
    minutes=15,
    difficulty=1,
    hints=(
        "A call that was due at 20.1 s, sent at 30 s because the generator waited, and answered at 30.01 s: how long "
        "did its user wait? And a call that never ended?",
        "Sort ended - due, with math.inf for what failed. At least share · n of the sorted values are at or before "
        "place ceil(share · n) - 1.",
    ),
)
def check_percentile(learner: Callable) -> Receipt:
    rows = []
    for name, calls in _cases():
        for share in (0.5, 0.9, 0.99, 1.0, random.uniform(0.01, 0.99), 1 / len(calls)):
            found = learner(list(calls), share)
            where = f"{name}, p{100 * share:.4g}"
            expect(isinstance(found, int | float) and not math.isnan(found), found, f"seconds ({where})")
            right = _percentile(calls, share)
            if not math.isclose(found, right, rel_tol=1e-9, abs_tol=1e-12):
                said = f"{where}: you found {found:.6g} s, and the right value is {right:.6g} s."
                raise CheckFailed(said, evidence=(where, found))
        rows.append(
            row(f"{name}: p99", _percentile(calls, 0.99), learner(list(calls), 0.99), "s", 1e-9, kind="computed")
        )
    return receipt("percentiles from when each call was due", rows)


def _cases() -> list[tuple[str, list[DueCall]]]:
    start, length = random.uniform(5, 20), random.uniform(3, 9)
    stalled = []
    for n in range(400):
        due = 0.1 * n
        sent = max(due, start + length) if start <= due < start + length else due
        stalled.append(DueCall(due, sent, sent + random.uniform(0.005, 0.02)))
    failing = [
        DueCall(at, at, None if random.random() < 0.05 else at + random.expovariate(5))
        for at in (random.uniform(0, 100) for _ in range(random.randint(150, 250)))
    ]
    failing += [DueCall(1.0, 1.0, None)] * 8
    random.shuffle(failing)
    few = [DueCall(10.0 * n, 10.0 * n, 10.0 * n + random.uniform(1, 9)) for n in range(random.choice((3, 7, 11)))]
    one = [DueCall(2.0, 2.5, 2.75)]
    return [("a stall", stalled), ("calls that failed", failing), (f"{len(few)} calls", few), ("one call", one)]


def _percentile(calls: list[DueCall], share: float) -> float:
    """The smallest value that at least `share` of the calls do not exceed, by counting."""
    seconds = [math.inf if call.ended is None else call.ended - call.due for call in calls]
    return min(value for value in seconds if sum(other <= value for other in seconds) >= share * len(seconds) - 1e-9)


@exercise(
    "bucket-per-tenant",
    minutes=20,
    difficulty=2,
    hints=(
        "The bucket needs no timer. How many tokens has it gained since it was last looked at, and what may it never "
        "hold?",
        "tokens = min(burst, tokens + (now - at) · rate), at = now. Enough: subtract the cost, 0.0. Else nothing is "
        "taken, and the rest comes after (cost - tokens) / rate.",
    ),
)
def check_bucket(learner: Callable) -> Receipt:
    one, another = learner(10, 10), learner(10, 10)
    if one.take(0.0, 10) == 0 and another.take(0.0, 10) != 0:
        raise CheckFailed("a full bucket refuses what another one has spent: each bucket keeps tokens of its own")
    rows = []
    for name, rate, burst, gap in (
        ("a client that keeps to its rate", 4, 8, 0.5),
        ("a client that sends twice its rate", 10, 25, 0.05),
        ("bursts after pauses", 2, 12, 3.0),
        ("one token in two seconds, and parts of tokens", 0.5, 4, 2.0),
        ("drawn", random.randint(1, 20), random.randint(5, 40), random.uniform(0.05, 1.0)),
    ):
        bucket, admitted, now = learner(rate, burst), [], Fraction(0)
        first = True
        for _ in range(150):
            if not first:
                now += Fraction(random.choice((0, 1, 1, 2, 40)) * max(1, round(64 * gap)), 128)
            first = False
            cost = random.randint(1, burst) if random.random() < 0.3 else random.randint(1, min(4, burst))
            cost = cost - random.choice((0, 0.25, 0.5)) if rate < 1 else cost
            found = expect_number(bucket.take(float(now), cost), "0.0, or the seconds to wait")
            right = _must_wait(admitted, now, cost, rate, burst)
            if not math.isclose(found, right, rel_tol=1e-6, abs_tol=1e-6):
                spent = sum(each for _, each in admitted)
                said = (
                    f"{name} (rate {rate}, burst {burst}): at {float(now):.3f} s, after {spent} tokens were taken, "
                    f"take({cost}) gave {found:.4g}; right is {right:.4g}."
                )
                raise CheckFailed(said, evidence=(name, float(now), cost, found))
            if right == 0:
                admitted.append((now, cost))
        most = max((sum(c for t, c in admitted if t >= start) - rate * float(now - start) for start, _ in admitted))
        rows.append(row(f"{name}: tokens beyond the rate, at most the burst", True, most <= burst + 1e-6))
    return receipt("a token bucket, call by call", rows)


def _must_wait(admitted: list[tuple[Fraction, float]], now: Fraction, cost: float, rate: float, burst: int) -> float:
    """Least seconds after which no span since any earlier time would have more than burst + rate · span."""
    waits, since = [Fraction(0)], Fraction(cost)
    for at, taken in reversed(admitted):
        since += taken
        waits.append((since - burst) / Fraction(rate) - (now - at))
    return float(max(waits))


@exercise(
    "two-choices",
    minutes=15,
    difficulty=1,
    hints=(
        "Two *different* replicas, each pair equally likely. Which index do you return: of the pair, or of the list?",
        "rng.sample(range(n), 2) gives two different indices; compare outstanding at them. With one replica there is "
        "nothing to draw.",
    ),
)
def check_two_choices(learner: Callable) -> Receipt:
    rng = random.Random(random.random())
    if learner([3], rng) != 0:
        raise CheckFailed("with one replica the answer is 0")
    rows, many = [], random.randint(6, 9)
    tied = [0, 0, *random.choices((1, 2, 2, 3), k=many - 2)]
    for loads in (*(random.sample(range(40), n) for n in (2, 5, many)), [0] * many, random.sample(tied, many)):
        replicas = len(loads)
        counts, draws = [0] * replicas, 4000
        for _ in range(draws):
            asked = Counted(loads)
            asks = f"an index from 0 to {replicas - 1}"
            found = expect_number(learner(asked, rng), asks)
            expect(found in range(replicas), found, asks)
            if list.__ne__(asked, loads):
                raise CheckFailed("`outstanding` is changed: its numbers are the router's, who counts the requests")
            if len(asked.seen) > 2:
                raise CheckFailed(f"{len(asked.seen)} of {replicas} replicas were asked, and two may be")
            counts[int(found)] += 1
        for place, index in enumerate(sorted(range(replicas), key=loads.__getitem__)):
            pairs = replicas * (replicas - 1) / 2
            least = sum(loads[index] < load for load in loads) / pairs
            most = (sum(loads[index] <= load for load in loads) - 1) / pairs  # either of two equals may be chosen
            share = min(max(counts[index] / draws, least), most)
            noise = 6 * math.sqrt(draws * share * (1 - share)) + 1e-9
            if abs(counts[index] - draws * share) > noise:
                what = "the least loaded" if place == 0 else "the most loaded" if place == replicas - 1 else "another"
                said = (
                    f"{what} of {replicas} replicas was chosen in {counts[index] / draws:.1%} of the draws; of two "
                    f"different ones at random the less loaded would be it in {share:.1%}."
                )
                raise CheckFailed(said, evidence=(replicas, place, counts[index] > draws * share))
        if len(set(loads)) < replicas:
            continue
        best = counts[min(range(replicas), key=loads.__getitem__)] / draws
        rows.append(row(f"{replicas} replicas: the least loaded is chosen", 2 / replicas, best, "", 0.25))
    loads = random.sample(range(40), 7)
    first, again, other = (_chosen(learner, loads, seed) for seed in (7, 7, 8))
    if first != again:
        raise CheckFailed("with `rng` seeded alike, other replicas are chosen: what decides besides `rng`?")
    if first == other:
        raise CheckFailed("`rng` decides nothing: with two seeds the same 50 replicas are chosen")
    return receipt("power of two choices, 4,000 draws", rows)


def _chosen(learner: Callable, loads: list[int], seed: int) -> list[int]:
    rng = random.Random(seed)
    return [int(learner(list(loads), rng)) for _ in range(50)]


class Counted(list):
    """A list that notes which of its values were read."""

    def __init__(self, values):
        super().__init__(values)
        self.seen: set[int] = set()

    def __getitem__(self, index):
        if isinstance(index, slice):
            self.seen.update(range(len(self))[index])
        else:
            self.seen.add(range(len(self))[index])
        return super().__getitem__(index)

    def __iter__(self):
        for index in range(len(self)):
            yield self[index]

    def __reversed__(self):
        return iter(self[::-1])

    def _all(self) -> None:
        self.seen.update(range(len(self)))

    def index(self, *arguments):
        self._all()
        return super().index(*arguments)

    def count(self, value):
        self._all()
        return super().count(value)

    def copy(self):
        self._all()
        return super().copy()
