"""Who sends what to whom, and when: passes that put the messages of a schedule into its orders.

A message is an `Edge` between two ranks. It stands in two orders: the source's rank sends there, the target's receives.
A runtime posts neighbouring messages of an order at once (`batches`, one `Group.exchange`) and need not wait for them
before an action needs what they bring. NCCL, though, carries out one group's messages in the order in which they were
posted, and each only when its partner is there too: a *rendezvous*. There the order of messages alone can deadlock:

    rank 0   F1  send F1 to 1     recv B0 from 1    B0         rank 0 offers F1, but rank 1 would first give B0 away,
    rank 1   B0  send B0 to 0     recv F1 from 0    F1         which rank 0 does not take before F1 is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from minillm.parallel.pipeline_parallel.schedule.actions import Action, Edge, Schedule, Step, Task
from minillm.parallel.pipeline_parallel.schedule.simulate import Durations, simulate


def with_messages(schedule: Schedule, durations: Durations | None = None, early: bool = False) -> Schedule:
    """The schedule with its messages, in an order that no transport can deadlock.

    All actions and messages are laid on one line, by the time at which they would happen, and each rank's order is what
    concerns it. The earliest thing not yet done is then next on every rank it concerns: somebody can always go on.

    early: a rank asks for a message before the action during which it is made, not after it. Right for a runtime that
    does not wait (the message travels while the rank computes), bad for one that does.
    """
    timeline = simulate(schedule, durations)
    if any(bar.end <= bar.start and bar.action.kind in "FBI" for bars in timeline.bars for bar in bars):
        raise ValueError(f"messages are laid out in time: let F, B and B - W last longer than 0, not {durations}")
    end = {Task(rank, bar.action): bar.end for rank, bars in enumerate(timeline.bars) for bar in bars}
    orders = []
    for rank, bars in enumerate(timeline.bars):
        # At one moment: what ends, then the messages made by it, in one order for all ranks, then what starts.
        line: list[tuple[tuple[float, int], Step]]
        line = [((bar.end, 0) if early else (bar.start, 2), bar.action) for bar in bars]
        line += [((end[edge.source], 1), edge) for edge in schedule.messages if rank in edge.ranks]
        orders.append(tuple(step for _, step in sorted(line, key=lambda item: item[0])))
    return replace(schedule, orders=tuple(orders))


def messages_as_used(schedule: Schedule) -> Schedule:
    """The schedule with each send right after the action that makes it and each receive right before the one that needs
    it: what one would write first. `check` says for which schedules it deadlocks when sends wait."""
    to_send = {edge.source: edge for edge in schedule.messages}
    orders = []
    for rank in range(schedule.ranks):
        order: list[Step] = []
        for action in schedule.actions(rank):
            task = Task(rank, action)
            order += [edge for edge in schedule.edges[task] if edge.crosses]
            order.append(action)
            order += [to_send[task]] if task in to_send else []
        orders.append(tuple(order))
    return replace(schedule, orders=tuple(orders))


def batches(order: tuple[Step, ...]) -> Iterator[Action | list[Edge]]:
    """A rank's order with neighbouring messages gathered: each list is one exchange."""
    for is_message, steps in groupby(order, key=lambda step: isinstance(step, Edge)):
        if is_message:
            yield list(steps)
        else:
            yield from steps
