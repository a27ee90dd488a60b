"""Lab 10, failures: where the hours of a job go, which rank is slow, and a branch that one rank takes alone."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.shared.diagnose import expect, whole_numbers
from course.shared.trials import run
from minillm.comm import Group
from minillm.predict import faults

SPENT = ("useful", "saving", "lost", "restarting")


@exercise(
    "goodput",
    minutes=20,
    difficulty=3,
    hints=(
        "Go from save to save. Either the next failure comes after the interval and its save, and both count, or "
        "before, and then what was begun since the last save is gone.",
        "Keep the time now, the seconds of work in the last save, the next failure. A failure in the work or in the "
        "save loses the work since the last save; the part of a save that was made still counts as saving. A failure "
        "during a restart begins the restart anew.",
    ),
)
def check_goodput(learner: Callable) -> Receipt:
    cases = [
        ((100.0, 40.0, 5.0, 10.0, ()), (100.0, 15.0, 0.0, 0.0), "no failure"),
        ((100.0, 40.0, 5.0, 10.0, (60.0,)), (100.0, 15.0, 15.0, 10.0), "a failure 15 s after the first save"),
        ((100.0, 40.0, 5.0, 10.0, (43.0,)), (100.0, 18.0, 40.0, 10.0), "a failure 3 s into the first save"),
        ((80.0, 40.0, 5.0, 10.0, (50.0, 54.0)), (80.0, 10.0, 5.0, 14.0), "a failure 4 s into a restart"),
    ]
    for arguments, right, what in cases:
        _judge_spent(learner(*arguments), right, what, exact=True)
    rows = []
    for mtbf in (2000.0, 300.0):
        work, interval, save, restart = 20000.0, *(random.uniform(*each) for each in ((60, 150), (2, 10), (5, 40)))
        seed = random.randrange(2**32)
        done = faults.simulate_failures(work, interval, save, restart, mtbf, seed=seed)
        right = (done.useful_s, done.saving_s, done.lost_s, done.restarting_s)
        found = learner(work, interval, save, restart, tuple(_failures(mtbf, seed, 4 * done.failures + 10)))
        what = f"{done.failures} failures, {mtbf:.0f} s apart on average"
        _judge_spent(found, right, what, exact=False)
        rows.append(row(f"goodput, {what}", done.goodput, found["useful"] / sum(found.values()), tolerance=1e-6))
    return receipt("a job of 20,000 s of work, beside minillm's simulation", rows)


def _failures(mtbf_s: float, seed: int, count: int) -> list[float]:
    """The instants of `simulate` with this seed, and many more."""
    draw = random.Random(seed)
    return list(itertools.accumulate(draw.expovariate(1 / mtbf_s) for _ in range(count)))


def _judge_spent(found: Any, right: Sequence[float], what: str, exact: bool) -> None:
    expect(isinstance(found, dict) and set(found) == set(SPENT), found, f"a dict of {', '.join(SPENT)}")
    mine = [float(found[name]) for name in SPENT]
    wrong = [f"{name} {m:,.1f} s instead of {r:,.1f} s" for name, m, r in zip(SPENT, mine, right, strict=True)
             if not math.isclose(m, r, rel_tol=1e-6, abs_tol=1e-6)]  # fmt: skip
    if wrong:
        raise CheckFailed(f"{what}: {'; '.join(wrong)}", evidence=[exact, mine])


# Slow ranks.


@exercise(
    "straggler",
    minutes=10,
    difficulty=2,
    hints=(
        "Everybody's step takes as long as the slowest rank's, since all meet in the all-reduce. What of a step is the "
        "rank's own doing?",
        "Own work = seconds of the step - seconds waited. One step says little, so take each rank's median over the "
        "steps, and compare it with what is usual for the *other* ranks.",
    ),
)
def check_straggler(learner: Callable) -> Receipt:
    rows = []
    for what, own, slow, factor in _groups():
        steps = _steps(own)
        found = learner(steps, factor)
        expect(isinstance(found, list | tuple | set), found, "a list of ranks")
        if sorted(found) != slow:
            raise CheckFailed(
                f"{what}: you name {sorted(found) or 'nobody'}, and slow is {slow or 'nobody'}",
                evidence=[what, sorted(found)],
            )
        rows.append(row(f"{what}: slow ranks", len(slow), len(found)))
    return receipt("who is slow?", rows)


def _groups() -> list[tuple[str, list[list[float]], list[int], float]]:
    """By case: seconds of own work, [steps][ranks], the slow ranks, and the factor from which they are."""

    def work(n: int, factors: dict[int, float], count: int = 10, usual_s: float = 1.0) -> list[list[float]]:
        usual = [usual_s * factors.get(rank, 1.0) for rank in range(n)]
        return [[random.uniform(0.9, 1.1) * seconds for seconds in usual] for _ in range(count)]

    one, other = random.sample(range(8), 2)
    held_up = work(4, {})
    for step, rank in ((0, one), (1, one), (2, one), (7, one + 1), (9, one + 1)):
        held_up[step][rank % 4] *= 60
    once_fast = work(4, {one % 4: 3.0})
    once_fast[random.randrange(10)][one % 4] /= 9
    return [
        ("8 ranks, one of them slow", work(8, {one: 3.0}), [one], 2.0),
        ("4 ranks, alike", work(4, {}), [], 2.0),
        ("8 ranks, two of them slow", work(8, {one: 3.0, other: 9.0}), sorted((one, other)), 2.0),
        ("2 ranks, one of them slow", work(2, {one % 2: 3.0}), [one % 2], 2.0),
        ("4 ranks, one of them faster than the others", work(4, {one % 4: 0.3}), [], 2.0),
        ("4 ranks, two of them held up in a few steps", held_up, [], 2.0),
        ("4 ranks, one of them slow but for one step", once_fast, [one % 4], 2.0),
        ("4 ranks, one of them takes 3 times as long, and factor is 4", work(4, {one % 4: 3.0}), [], 4.0),
        ("3 ranks, steps of milliseconds, one of them slow", work(3, {one % 3: 3.0}, usual_s=0.004), [one % 3], 2.0),
        ("5 ranks, alike, steps of a minute", work(5, {}, usual_s=60.0), [], 2.0),
        ("4 ranks, a single step, one of them slow", work(4, {other % 4: 5.0}, count=1), [other % 4], 2.0),
        ("4 ranks, one of them takes 1.7 times as long, and factor is 1.3", work(4, {one % 4: 1.7}), [one % 4], 1.3),
    ]


def _steps(own: Sequence[Sequence[float]]) -> list[list[tuple[float, float]]]:
    """(seconds of the step, seconds waited) by step and rank: all end together."""
    found = []
    for step in own:
        total = max(step) * random.uniform(1.1, 1.3)
        found.append([(total, total - mine) for mine in step])
    return found


# One branch for all.


@dataclass(frozen=True)
class Batch:
    """By rank: the loss, and its gradient."""

    what: str
    losses: tuple[float, ...]
    gradients: tuple[Tensor, ...]

    @property
    def right(self) -> Tensor | None:
        return torch.stack(self.gradients).mean(0) if all(map(math.isfinite, self.losses)) else None


@exercise(
    "same-branch",
    changes=("gradient",),
    minutes=10,
    difficulty=2,
    hints=(
        "A rank whose loss is fine waits for a rank that has gone another way. Which of the two can know that?",
        "Whether to skip has to be decided by all ranks together, before the collective that only some would call.",
    ),
)
def check_same_branch(learner: Callable) -> Receipt:
    size = random.randint(2, 60)
    cases = [
        _batch("all losses are finite", (), size),
        _batch("no loss is finite", range(3), size),
        _batch("all finite again", (), size),
    ]
    cases += [
        _batch(f"the loss of rank {bad} alone is {value}", (bad,), size, value)
        for bad, value in ((1, math.nan), (2, math.inf), (1, -math.inf))
    ]
    ranks = run(_try_batches, 3, learner, cases, advice="Which rank did not call the all-reduce that others wait in?")
    for index, case in enumerate(cases):
        found = [rank[index] for rank in ranks]
        for rank, mine in enumerate(found):
            _judge_step(case, rank, mine, found)
    more = _batch("4 ranks, all losses are finite", (), size, ranks=4)
    for rank, (mine,) in enumerate(run(_try_batches, 4, learner, [more])):
        _judge_step(more, rank, mine, [mine])
    skipped = sum(mine is None for rank in ranks for mine in rank)
    return receipt(
        "6 batches on 3 ranks",
        [
            row("steps skipped, on all ranks", 3 * sum(case.right is None for case in cases), skipped),
            row(
                "steps made, on all ranks", 3 * sum(case.right is not None for case in cases), 3 * len(cases) - skipped
            ),
        ],
    )


def _batch(what: str, bad: Sequence[int], size: int, value: float = math.nan, ranks: int = 3) -> Batch:
    """The gradients of a bad loss are finite here: some are not, and that is no thing to rely on."""
    draw = torch.Generator().manual_seed(random.randrange(2**32))
    losses = tuple(value if rank in bad else random.uniform(1, 5) for rank in range(ranks))
    return Batch(what, losses, tuple(whole_numbers(draw, size) for _ in range(ranks)))


def _try_batches(group: Group, learner: Callable, cases: Sequence[Batch]) -> list[Any]:
    found = []
    for case in cases:
        loss = torch.tensor(case.losses[group.rank])
        found.append(learner(loss, case.gradients[group.rank].clone(), group))
        if not torch.equal(loss.nan_to_num(), torch.tensor(case.losses[group.rank]).nan_to_num()):
            raise CheckFailed(f"{case.what}: your function wrote into the loss: reduce a tensor of your own")
    return found


def _judge_step(case: Batch, rank: int, mine: Any, found: Sequence[Any]) -> None:
    if case.right is None and mine is not None:
        told = sum(each is None for each in found)
        raise CheckFailed(
            f"{case.what}: rank {rank} makes the step, {told} of 3 ranks skip it. All ranks must skip it",
            evidence=[case.what, list(found)],
        )
    if case.right is not None and mine is None:
        raise CheckFailed(f"{case.what}: rank {rank} skips the step, which all can make")
    if case.right is not None and (not isinstance(mine, Tensor) or mine.shape != case.right.shape):
        got = f"a tensor {list(mine.shape)}" if isinstance(mine, Tensor) else f"{mine!r:.60}"
        raise CheckFailed(
            f"{case.what}: rank {rank} returns {got}; the exercise asks for the mean gradient, {list(case.right.shape)}"
        )
    if case.right is not None and not torch.allclose(mine, case.right):
        raise CheckFailed(
            f"{case.what}: rank {rank} has another gradient than the mean over the ranks", evidence=[case.what, mine]
        )
