"""Can a schedule be run at all? The checker: complete, in a possible order, every message matched, no deadlock.

It has nothing to do with how long things take; `violations` looks at a chart or a measured run that claims times.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from minillm.parallel.pipeline_parallel.schedule.actions import (
    MAKES,
    Action,
    Edge,
    Place,
    Schedule,
    ScheduleError,
    Task,
)
from minillm.parallel.pipeline_parallel.schedule.memory import peak_in_flight
from minillm.parallel.pipeline_parallel.schedule.messages import batches, with_messages
from minillm.parallel.pipeline_parallel.schedule.simulate import Timeline, simulate


@dataclass(frozen=True)
class Report:
    """What a possible schedule costs: messages sent per step by all ranks; peak_in_flight per rank, in microbatches."""

    messages: int
    peak_in_flight: tuple[float, ...]


def check(schedule: Schedule, batched: bool = True) -> Report:
    """ScheduleError, naming the first broken dependency, unless the schedule can be run.

    Messages are checked as the orders have them, or as `with_messages` would add them. Sends are taken to wait for
    their receives. batched: neighbouring messages of a rank are posted at once; otherwise one after the other.
    """
    _routes(schedule)
    _complete(schedule)
    simulate(schedule)  # refuses an order in which ranks wait for each other for ever
    _deliverable(schedule if schedule.has_messages else with_messages(schedule), batched)
    return Report(len(schedule.messages), tuple(peak_in_flight(schedule)))


def violations(timeline: Timeline) -> list[Edge]:
    """The dependencies that a chart or a measured run breaks: the target starts before the source has ended."""
    times = {Task(rank, bar.action): bar for rank, bars in enumerate(timeline.bars) for bar in bars}
    edges = [edge for edges in timeline.schedule.edges.values() for edge in edges]
    return [edge for edge in edges if times[edge.target].start < times[edge.source].end]


def _routes(schedule: Schedule) -> None:
    """Every route leads through all parts of the model in order, every place holds one part, every rank has a place."""
    if not schedule.routes:
        raise ScheduleError(f"{schedule.name} has no microbatches: give at least one route")
    part_of: dict[Place, int] = {}
    for microbatch, route in enumerate(schedule.routes):
        if len(route) != schedule.num_parts:
            raise ScheduleError(
                f"the route of microbatch {microbatch} visits {len(route)} places, that of microbatch 0 visits "
                f"{schedule.num_parts}: every microbatch goes through all parts of the model"
            )
        for part, place in enumerate(route):
            if part_of.setdefault(place, part) != part:
                raise ScheduleError(
                    f"chunk {place.chunk} of rank {place.rank} is part {part_of[place]} and part {part} of the model: "
                    "give each part a chunk of its own"
                )
    for rank in range(schedule.ranks):
        chunks = sorted(place.chunk for place in part_of if place.rank == rank)
        if chunks != list(range(len(chunks))) or not chunks:
            raise ScheduleError(
                f"the routes visit chunks {chunks} of rank {rank}: number every rank's chunks from 0, and "
                "visit all of them"
            )
    for place in part_of:
        if place.rank not in range(schedule.ranks):
            raise ScheduleError(f"a route visits rank {place.rank}, but there are orders for {schedule.ranks} ranks")


def _complete(schedule: Schedule) -> None:
    """Every microbatch goes forward and back through every place of its route, once."""
    made: defaultdict[tuple[str, int, Place], list[Action]] = defaultdict(list)
    for rank, action in schedule.tasks:
        for product in MAKES[action.kind]:
            made[product, action.microbatch, Place(rank, action.chunk)].append(action)
    due = {(product, m, place) for m, route in enumerate(schedule.routes) for place in route for product in "FIW"}
    missing = due - set(made)
    for product, microbatch, place in sorted(missing):
        whole = {("I", microbatch, place), ("W", microbatch, place)} <= missing and product != "F"
        name = Action("B" if whole else product, microbatch, place.chunk)
        raise ScheduleError(f"{name} is missing from the order of rank {place.rank}")
    for (_, _, place), actions in made.items():
        if len(actions) > 1:
            raise ScheduleError(f"rank {place.rank} does {' and '.join(map(str, actions))}, but once is enough")


def _deliverable(schedule: Schedule, batched: bool) -> None:
    """Messages are where they belong, and nobody waits for ever when each send waits for its receive."""
    for rank, order in enumerate(schedule.orders):
        _well_placed(schedule, rank, order)
    _same_order(schedule)
    steps = [
        list(batches(order)) if batched else [[s] if isinstance(s, Edge) else s for s in order]
        for order in schedule.orders
    ]
    at, offered = [0] * schedule.ranks, [set() for _ in steps]
    moved = True
    while moved:
        moved = False
        for rank, todo in enumerate(steps):
            while at[rank] < len(todo):
                step = todo[at[rank]]
                if not isinstance(step, Action):
                    moved |= not offered[rank].issuperset(step)
                    offered[rank].update(step)
                    if _missing(step, rank, offered):
                        break
                at[rank] += 1
                moved = True
    stopped = {rank: _missing(todo[at[rank]], rank, offered) for rank, todo in enumerate(steps) if at[rank] < len(todo)}
    if stopped:
        raise _deadlock(stopped)


def _missing(batch: list[Edge], rank: int, offered: list[set[Edge]]) -> list[Edge]:
    """The messages of a rank's batch that the other side has not come to yet."""
    return [edge for edge in batch if edge not in offered[edge.partner(rank)]]


def _deadlock(stopped: dict[int, list[Edge]]) -> ScheduleError:
    at, circle = min(stopped), []
    while at not in circle:
        circle.append(at)
        at = stopped[at][0].partner(at)
    waits = []
    for rank in circle[circle.index(at) :]:
        edge = stopped[rank][0]
        verb = f"send {edge.source.action} to" if edge.source.rank == rank else f"receive {edge.source.action} from"
        waits.append(f"rank {rank} waits to {verb} rank {edge.partner(rank)}")
    return ScheduleError("deadlock, if sends wait for their receives: " + ", ".join(waits))


def _well_placed(schedule: Schedule, rank: int, order: tuple[Action | Edge, ...]) -> None:
    """A message leaves after it is made and arrives before it is needed; none is forgotten, none is made up."""
    place = {step: index for index, step in enumerate(order)}
    due = {edge: None for edge in schedule.messages if rank in edge.ranks}  # a set that keeps its order
    for edge in due:
        if edge not in place:
            raise ScheduleError(f"rank {rank} never {'sends' if edge.source.rank == rank else 'receives'} {edge}")
        if edge.source.rank == rank and place[edge] < place[edge.source.action]:
            raise ScheduleError(f"rank {rank} sends {edge} before it has made it")
        if edge.target.rank == rank and place[edge] > place[edge.target.action]:
            raise ScheduleError(f"rank {rank} receives {edge} after {edge.target.action}, which needs it")
    for edge, times in Counter(step for step in order if isinstance(step, Edge)).items():
        if edge not in due or times > 1:
            raise ScheduleError(f"rank {rank} has the message {edge} {times} times; {int(edge in due)} would be right")


def _same_order(schedule: Schedule) -> None:
    """Messages carry no names: the k-th that one rank sends another must be the k-th that it receives from it."""
    pairs = {edge.ranks for edge in schedule.messages}
    for sender, receiver in sorted(pairs):
        sent, received = (
            [s for s in schedule.orders[rank] if isinstance(s, Edge) and s.ranks == (sender, receiver)]
            for rank in (sender, receiver)
        )
        for number, (one, other) in enumerate(zip(sent, received, strict=True), start=1):
            if one != other:
                raise ScheduleError(
                    f"message {number} from rank {sender} to rank {receiver} is {one.source.action} "
                    f"where it is sent, but {other.source.action} where it is received"
                )
