"""Lab 06, pipeline parallelism: who does what in which order, and which layers a stage holds.

    checks.py            GPipe's order, 1F1B's order, layers dealt out to stages
    checks_stages.py     a stage at work on real ranks; the tied embedding at both ends
    checks_messages.py   messages that cannot deadlock; a backward in two halves

An order is judged by what follows from it, never by comparing it with another order: the checker says whether it can
be run, the simulator how long it takes, and both are held to the closed forms in `predict/training/pipeline.py`.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, row
from minillm.parallel.pipeline_parallel.schedule.actions import straight
from minillm.parallel.pipeline_parallel.schedule.schedules import (
    Action,
    Durations,
    Schedule,
    ScheduleError,
    check,
    one_f_one_b,
    simulate,
)
from minillm.predict.training import pipeline as predict

F, B = 1, 2  # how long the checks let a forward and a backward take
NOT_THE_MAXIMUM = (  # the least variance, spread or largest minimum is not the least maximum
    ([2.0, 4.0, 2.0, 1.0, 2.0, 7.0, 3.0], 3),
    ([6.0, 2.0, 2.0, 5.0, 3.0, 4.0, 6.0, 5.0], 4),
)
CASES = ((4, 8), (4, 2), (3, 5), (1, 3))  # stages, microbatches; a drawn one comes on top


# What they are held to.


@exercise(
    "gpipe-order",
    minutes=5,
    difficulty=1,
    hints=(
        "Every stage does the same in GPipe. Waiting is not written down: a stage waits by itself when what it needs "
        "is not there yet.",
        "All forwards in order, then all backwards.",
    ),
)
def check_gpipe(learner: Callable) -> Receipt:
    rows = []
    for stages, microbatches in _cases():
        schedule, where = read(learner, stages, microbatches)
        _in_time(schedule, where)
        for stage, peak in enumerate(check(schedule).peak_in_flight):
            if peak < microbatches:
                raise CheckFailed(
                    f"{where}: stage {stage} never holds more than {peak:g} microbatches: a backward comes before the "
                    "last forward. A fine schedule, but GPipe does all forwards first"
                )
        rows += _rows(schedule, where, [predict.in_flight_gpipe(microbatches)] * stages)
    return Receipt(f"GPipe on a clock, F = {F}, B = {B}", tuple(rows))


@exercise(
    "one-f-one-b-order",
    minutes=15,
    difficulty=3,
    hints=(
        "The last stage can turn every microbatch round at once: F0 B0 F1 B1 ... How many forwards can the stage "
        "before it do until B0 comes back?",
        "Stage s first does stages - 1 - s forwards (never more than there are), then one forward and one backward in "
        "turn while forwards are left, then the backwards that remain.",
    ),
)
def check_one_f_one_b(learner: Callable) -> Receipt:
    rows = []
    for stages, microbatches in _cases():
        schedule, where = read(learner, stages, microbatches)
        due = [predict.in_flight_1f1b(stages, stage, microbatches) for stage in range(stages)]
        peaks = check(schedule).peak_in_flight
        for stage, (peak, most) in enumerate(zip(peaks, due, strict=True)):
            if peak == microbatches > most and all(p == microbatches for p in peaks):
                raise CheckFailed(f"{where}: every stage holds all {microbatches} microbatches; that is GPipe")
            if peak > most:
                raise CheckFailed(
                    f"{where}: stage {stage} holds {peak:g} microbatches at once where {most} keep the pipeline full: "
                    f"do a backward before {_first_above(schedule.actions(stage), most)}"
                )
        _in_time(schedule, where)
        rows += _rows(schedule, where, due)
    return Receipt(f"1F1B on a clock, F = {F}, B = {B}", tuple(rows))


def _first_above(order: Sequence[Action], most: int) -> Action:
    """The first forward that takes more than `most` microbatches in."""
    held = itertools.accumulate(1 if action.kind == "F" else -1 for action in order)
    return next(action for action, now in zip(order, held, strict=True) if now > most)


def _cases() -> list[tuple[int, int]]:
    return [*CASES, (random.randint(5, 9), random.randint(10, 30))]


def read(learner: Callable, stages: int, microbatches: int) -> tuple[Schedule, str]:
    """(the learner's orders as a schedule, how to name the case); CheckFailed unless it can be run."""
    where = f"{stages} stage{'s' * (stages > 1)}, {microbatches} microbatches"
    orders = tuple(
        tuple(as_action(step, stage) for step in _listed(learner(stage, stages, microbatches), stage))
        for stage in range(stages)
    )
    strange = [(stage, a) for stage, order in enumerate(orders) for a in order if a.microbatch >= microbatches]
    if strange:
        stage, action = strange[0]
        raise CheckFailed(
            f"{where}: stage {stage}'s order contains {action}, but microbatches are numbered 0 to {microbatches - 1}"
        )
    schedule = Schedule("yours", orders, (straight(stages),) * microbatches)
    try:
        check(schedule)
    except ScheduleError as error:
        raise CheckFailed(f"{where}: {error}") from None
    if any(action.kind not in "FB" for _, action in schedule.tasks):
        raise CheckFailed(f"{where}: forwards and whole backwards only (F and B)")
    return schedule, where


def _in_time(schedule: Schedule, where: str) -> None:
    took = simulate(schedule, Durations(F=F, B=B)).makespan
    least = predict.makespan(schedule.ranks, schedule.microbatches, F, B)
    if took > least:
        *others, made = (
            [action.microbatch for action in schedule.actions(rank) if action.kind == "B"]
            for rank in range(schedule.ranks)
        )
        for stage, backwards in enumerate(others):
            if backwards != made:
                raise CheckFailed(
                    f"{where}: it can be run, but takes {took:g} where {least:g} are enough (F = {F}, B = {B}). Stage "
                    f"{stage} does its backwards in the order {backwards}, but the last stage makes gradients in the "
                    f"order {made}: take them as they come"
                )
        first = [[action.kind for action in schedule.actions(rank)].index("B") for rank in range(schedule.ranks)]
        raise CheckFailed(
            f"{where}: it can be run, but takes {took:g} where {least:g} are enough (F = {F}, B = {B}). Before its "
            f"first backward each stage does {first} forwards: who waits for whom meanwhile?"
        )


def _listed(order: Any, stage: int) -> list:
    if not isinstance(order, list | tuple):
        raise CheckFailed(
            f'stage {stage}: you returned {order!r:.40}; the exercise asks for a list such as ["F0", "B0"]'
        )
    return list(order)


def as_action(step: Any, stage: int) -> Action:
    """What the learner means by "F3"; CheckFailed if it means nothing."""
    try:
        return step if isinstance(step, Action) else Action.parse(str(step))
    except ValueError as error:
        raise CheckFailed(f"stage {stage}: {error}") from None


def _rows(schedule: Schedule, where: str, in_flight: Sequence[int]) -> list:
    stages, microbatches = schedule.ranks, schedule.microbatches
    line = simulate(schedule, Durations(F=F, B=B))
    return [
        row(f"{where}: time of a step", predict.makespan(stages, microbatches, F, B), line.makespan),
        row("    share of it that stages idle", predict.idle_share(stages, microbatches), line.idle_share, "", 1e-9),
        row("    in flight at most, by stage", tuple(in_flight), tuple(int(peak) for peak in line.peak_in_flight)),
    ]


@exercise(
    "balance-stages",
    minutes=15,
    difficulty=3,
    hints=(
        "The slowest stage sets the pace. Try where the last stage could begin: what remains is the same problem with "
        "one stage less.",
        "Dynamic programming: best[p][e] = the least slowest stage when the first e layers go to p stages = the "
        "minimum over d < e of max(best[p - 1][d], cost of layers d to e). Remember each d. Every stage needs a layer.",
        "Or: try all places to cut. for cuts in itertools.combinations(range(1, len(costs)), parts - 1): the stages "
        "are the ranges between (0, *cuts, len(costs)); take the one with the smallest maximum.",
    ),
)
def check_balance(learner: Callable) -> Receipt:
    rows = []
    for costs, parts in [
        _draw_costs(random.randint(10, 17), random.choice((4, 5))),
        _draw_costs(random.randint(8, 17), 3),
        *NOT_THE_MAXIMUM,
        _draw_costs(5, 5),
        ([3.0, 1.0, 2.0], 1),
    ]:
        found = _read_ranges(learner(list(costs), parts), costs, parts)
        best_cut = _best_cut(costs, parts)
        best, took = _slowest(costs, best_cut), _slowest(costs, found)
        where = f"{len(costs)} layers on {parts} stage{'s' * (parts > 1)}"
        if took > best:
            raise CheckFailed(
                f"{where}, costs {[f'{cost:g}' for cost in costs]}: your slowest stage takes {took:g}, "
                f"but {best:g} is possible: {_ranges(best_cut)}".replace("'", "")
            )
        rows.append(row(f"{where}: the slowest stage", best, took))
        if parts > 1:
            times = [sum(costs[layer] for layer in stage) for stage in found]
            step = simulate(one_f_one_b(parts, 8), Durations(F=times, B=[2 * time for time in times])).makespan
            rows.append(row("    1F1B with 8 microbatches takes", None, step))
            rows.append(row("    with as many layers on every stage", None, _even(costs, parts)))
    return Receipt("layers on stages", tuple(rows))


def _draw_costs(layers: int, parts: int) -> tuple[list[float], int]:
    """Blocks that differ, an embedding that costs little, a head that costs several; cuts without a plan are slower."""
    while True:
        blocks = (random.choice((2.0, 2.0, 3.0, 5.0)) for _ in range(layers - 2))
        costs = [1.0, *blocks, random.choice((6.0, 7.0))]
        best = _slowest(costs, _best_cut(costs, parts))
        head_alone = [*_best_cut(costs[:-1], parts - 1), range(layers - 1, layers)]
        planless = (_as_many_each(layers, parts), _up_to_the_mean(costs, parts), head_alone)
        if layers == parts or all(_slowest(costs, ranges) > best for ranges in planless):
            return costs, parts


def _read_ranges(found: Any, costs: Sequence[float], parts: int) -> list[range]:
    where = f"{len(costs)} layers on {parts} stages"
    try:
        ranges = [range(stage.start, stage.stop, stage.step or 1) for stage in found]
    except (AttributeError, TypeError):
        raise CheckFailed(
            f"{where}: you returned {found!r:.60}; the exercise asks for a list of ranges, one per stage"
        ) from None
    if len(ranges) != parts:
        raise CheckFailed(f"{where}: {len(ranges)} ranges for {parts} stages")
    if not all(ranges):
        raise CheckFailed(
            f"{where}: stage {[len(stage) for stage in ranges].index(0)} gets no layer: {_ranges(ranges)}"
        )
    if [layer for stage in ranges for layer in stage] != list(range(len(costs))):
        raise CheckFailed(
            f"{where}: {_ranges(ranges)} is not every layer once, in order: stages hold neighbouring layers"
        )
    return ranges


def _best_cut(costs: Sequence[float], parts: int) -> list[range]:
    """The cut with the smallest maximum, found by trying all of them: 12 layers on 4 stages have 165."""
    edges = ((0, *cuts, len(costs)) for cuts in itertools.combinations(range(1, len(costs)), parts - 1))
    cuts = ([range(*pair) for pair in itertools.pairwise(each)] for each in edges)
    return min(cuts, key=lambda cut: _slowest(costs, cut))


def _slowest(costs: Sequence[float], ranges: Sequence[range]) -> float:
    return max(sum(costs[layer] for layer in stage) for stage in ranges)


def _ranges(ranges: Sequence[range]) -> str:
    steps = (f" in steps of {stage.step}" * (stage.step != 1) for stage in ranges)
    ends = (f"{stage[0]} to {stage.stop - 1}" if stage else "nothing" for stage in ranges)
    return ", ".join(end + step for end, step in zip(ends, steps, strict=True))


def _even(costs: Sequence[float], parts: int) -> float:
    times = [sum(costs[layer] for layer in stage) for stage in _as_many_each(len(costs), parts)]
    return simulate(one_f_one_b(parts, 8), Durations(F=times, B=[2 * time for time in times])).makespan


def _as_many_each(layers: int, parts: int) -> list[range]:
    return [range(*pair) for pair in itertools.pairwise(round(part * layers / parts) for part in range(parts + 1))]


def _up_to_the_mean(costs: Sequence[float], parts: int) -> list[range]:
    """A new stage begins with the layer that would take the last one over the mean."""
    edges, held = [0], 0.0
    for layer, cost in enumerate(costs):
        if held + cost > sum(costs) / parts and len(edges) < parts:
            edges.append(layer)
            held = 0.0
        held += cost
    return [range(*pair) for pair in itertools.pairwise([*edges, len(costs)])]
