"""Lab 14: two plans at a time. While the device computes a step, the host prepares the next one.

    host     plan 1 │ plan 2       │ read 1, plan 3 │ read 2, ...
    device          │ computes 1 ··│ computes 2 ····│ computes 3 ...

So plan 2 must not be written where step 1 is still being read, and a sequence that plan 2 preempts may be one whose
pass of step 1 is under way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from course.lab14_continuous_batching import figures_flight
from course.lab14_continuous_batching.experiments import draft, fly


@dataclass(frozen=True)
class Ahead:
    """What asynchronous scheduling did on the trace of the flight recorder, beside the plain engine.

    equal: all answers are the plain engine's. ahead: steps launched before the one before had been read, of `steps`.
    under_way: preempted sequences whose pass was under way, of `preempted`. used: blocks held at the end.
    """

    equal: bool
    ahead: int
    steps: int
    under_way: int
    preempted: int
    used: int


def asynchronous() -> Ahead:
    """The crowded trace of the flight recorder through both engines, with a model."""
    _, right = fly(figures_flight.trace(), draft(), **figures_flight.POOL)
    llm, found = fly(figures_flight.trace(), draft(), async_scheduling=True, **figures_flight.POOL)
    under_way = sum(
        name in {entry[0] for entry in before.batch}
        for before, record in pairwise(llm.records)
        if record.in_flight > 1
        for name in record.preempted
    )
    return Ahead(
        equal=[output.answers[0].ids for output in found] == [output.answers[0].ids for output in right],
        ahead=sum(record.in_flight > 1 for record in llm.records),
        steps=len(llm.records),
        under_way=under_way,
        preempted=sum(len(record.preempted) for record in llm.records),
        used=llm.pool.used,
    )


def overwritten(plans: Sequence[list[int]], buffers: int) -> int:
    """Steps whose batch the device finds changed: it reads a step's buffer after the host has written the next plan
    into a buffer of its own, or into the same one."""
    memory: list[list[int]] = [[] for _ in range(buffers)]
    wrong = 0
    for number, plan in enumerate(plans):
        memory[number % buffers] = plan
        if number > 0:
            wrong += memory[(number - 1) % buffers] != plans[number - 1]
    return wrong
