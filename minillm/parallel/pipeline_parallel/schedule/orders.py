"""Pipeline schedules: pure functions (stages, microbatches, ...) -> what every rank does, in order.

    stage 0  F0 F1 F2 F3 .. .. .. B0 F4 B1 ...     1F1B, 4 stages: once the first gradient is back, each rank does
    stage 1  .. F0 F1 F2 .. .. B0 F3 B1 F4 ...     one forward, one backward, so that a microbatch is let in only
    stage 2  .. .. F0 F1 .. B0 F2 B1 F3 B2 ...     when another has left.
    stage 3  .. .. .. F0 B0 F1 B1 F2 B2 F3 ...

A function here says only the order. When things happen (`simulate`), whether they can (`check`) and who sends what to
whom (`with_messages`) follows from it. Most schedules are a few *phases* that a rank repeats some number of times,
which is how they are written: ("F B", 3) is three times one forward and one backward. Phases that only fit together
from some number of microbatches on are written for that many, `enough`; those too many are then left out.

`stages` is the number of ranks; rank = stage. Where a rank holds several chunks of the model, an action names one.
"""

from __future__ import annotations

from collections import Counter, deque

from minillm.parallel.pipeline_parallel.schedule.actions import (
    Action,
    Place,
    Schedule,
    straight,
    there_and_back,
)


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., "GPipe", 2019). In flight: every microbatch, on every stage."""
    _at_least_one(stages=stages, microbatches=microbatches)
    order = _phases(microbatches, ("F", microbatches), ("B", microbatches))
    return Schedule("gpipe", (order,) * stages, (straight(stages),) * microbatches)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Some forwards to fill the pipeline, then one forward, one backward, in turn (Narayanan et al. 2021, section 2.2).

    With equal stages and free messages it idles as long as GPipe, but stage s holds only min(stages - s, microbatches)
    microbatches: a stage lets no more in than it takes for the first gradient to come back from the last stage.
    """
    _at_least_one(stages=stages, microbatches=microbatches)
    orders, enough = [], max(microbatches, stages)
    for stage in range(stages):
        to_fill = stages - 1 - stage
        orders.append(_phases(microbatches, ("F", to_fill), ("F B", enough - to_fill), ("B", to_fill)))
    return Schedule("1f1b", tuple(orders), (straight(stages),) * microbatches)


def interleaved(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B with `chunks` pieces of the model per rank, every stages-th one (Narayanan et al. 2021, section 2.2).

    Filling takes 1/chunks of the time, since the first microbatch reaches the last rank after one small chunk each; the
    price is chunks times the messages and more in flight. A rank takes its chunks in turn, `stages` microbatches each:

        forwards   F0 F1 F2 F3  F0.1 F1.1 F2.1 F3.1  F4 F5 F6 F7  F4.1 ...     (4 stages, 2 chunks)
        backwards  B0.1 B1.1 B2.1 B3.1  B0 B1 B2 B3  B4.1 ...

    ValueError if microbatches is not a multiple of stages.
    """
    _at_least_one(stages=stages, microbatches=microbatches, chunks=chunks)
    if microbatches % stages:
        raise ValueError(
            f"interleaved needs a multiple of {stages} microbatches for {stages} stages, not {microbatches}"
        )
    rounds = range(0, microbatches, stages)
    turns = [(first + i, chunk) for first in rounds for chunk in range(chunks) for i in range(stages)]
    forwards = [Action("F", microbatch, chunk) for microbatch, chunk in turns]
    backwards = [Action("B", microbatch, chunks - 1 - chunk) for microbatch, chunk in turns]
    orders = []
    for stage in range(stages):
        to_fill = min((chunks - 1) * stages + 2 * (stages - 1 - stage), len(turns))
        order = forwards[:to_fill]
        for pair in zip(forwards[to_fill:], backwards, strict=False):
            order += pair
        orders.append((*order, *backwards[len(turns) - to_fill :]))
    return Schedule("interleaved", tuple(orders), (straight(stages, chunks),) * microbatches)


def zero_bubble(stages: int, microbatches: int) -> Schedule:
    """ZB-H1: 1F1B whose idle slots are filled with weight gradients (Qi et al., "Zero Bubble", 2023, section 2.1).

    Only the input gradient is urgent, so backward is split: I at once, W later. Stage s puts s weight gradients off to
    the end, where it would idle. A third of 1F1B's bubble if F = I = W; no stage holds more than 1F1B's first one.
    """
    _at_least_one(stages=stages, microbatches=microbatches)
    orders, enough = [], max(microbatches, stages)
    for stage in range(stages):
        to_fill, put_off = stages - 1 - stage, stage
        phases = (
            ("F", to_fill),
            ("F I", put_off),
            ("F I W", enough - to_fill - put_off),
            ("I W", to_fill),
            ("W", put_off),
        )
        orders.append(_phases(microbatches, *phases))
    return Schedule("zero_bubble", tuple(orders), (straight(stages),) * microbatches)


def zero_bubble_v(stages: int, microbatches: int) -> Schedule:
    """ZB-V: two chunks per rank on a route there and back, so no rank waits at all (Qi et al. 2023, section 6).

    The last rank turns the microbatch round without a message, and the first rank, which holds both ends of the model,
    starts the backward itself. If F = I = W, every rank works without a gap from its first action to its last; it holds
    as much as 1F1B's first stage.
    """
    _at_least_one(stages=stages, microbatches=microbatches)
    orders, enough = [], max(microbatches, 2 * stages - 1)
    for rank in range(stages):
        after = stages - 1 - rank
        phases = (
            ("F0", 2 * after + 1),
            ("F1 F0", rank),
            ("F1 I1 W", after + 1),
            ("F0 I0 W F1 I1 W", enough - stages - after),
            ("I0 W F1 I1 W", after),
            ("I0 I1", rank),
            ("I0 W", after + 1),
            ("W", 2 * rank),
        )
        orders.append(_phases(microbatches, *phases))
    return Schedule("zero_bubble_v", tuple(orders), (there_and_back(stages),) * microbatches)


def dualpipe(stages: int, microbatches: int) -> Schedule:
    """Microbatches from both ends at once: a forward of one direction beside a backward of the other (DeepSeek 2024).

    Every rank holds two parts of the model: its own (chunk 0) and its mirror image's (chunk 1), so all parameters exist
    twice. The first half of the microbatches enters at rank 0, the second at the last rank. What DualPipe is for: in
    the main phase the two directions' work is independent, so one's messages hide behind the other's computation. In
    the phases below, 0 is the direction that enters at the nearer end.
    """
    _at_least_one(stages=stages, microbatches=microbatches)
    if stages % 2:
        raise ValueError(f"dualpipe needs an even number of stages, since they work in mirrored pairs, not {stages}")
    if microbatches < 2:
        raise ValueError(f"dualpipe needs a microbatch for each of its two directions, not {microbatches}")
    down, up = (microbatches + 1) // 2, microbatches // 2
    orders, enough = [], max(down, stages)
    for rank in range(stages):
        outer = min(rank, stages - 1 - rank)  # ranks between this one and the nearer end
        inner = stages // 2 - 1 - outer  # and between it and the middle
        phases = (
            ("F0", 2 * inner),
            ("F0 F1", outer + 1),
            ("I1 W F1", inner),
            ("F0 B1 F1 B0", enough - stages + outer + 1),
            ("B1 F1 B0", inner),
            ("B1 B0", (outer + 1) // 2),
            ("B1 I0", 1 - outer % 2),
            ("I1 I0", (outer + 1) // 2),
            ("W I0", inner),
            ("W", outer + 1),
        )
        order = []
        for action in _phases(enough, *phases):
            chunk = action.chunk if rank < stages // 2 else 1 - action.chunk
            first, count = ((0, down), (down, up))[chunk]
            if action.microbatch < count:
                order.append(Action(action.kind, first + action.microbatch, chunk))
        orders.append(tuple(order))
    there = tuple(Place(rank, 0) for rank in range(stages))
    back = tuple(Place(rank, 1) for rank in reversed(range(stages)))
    return Schedule("dualpipe", tuple(orders), (there,) * down + (back,) * up)


def pipedream(stages: int, microbatches: int) -> Schedule:
    """Asynchronous 1F1B: the weights move after every backward, and nothing is flushed (Narayanan et al. 2019).

    `microbatches` are those of the whole training. A microbatch must meet the same weights on its way back, so stage s
    keeps stages - s versions of them, and its gradient is stages - 1 - s updates late. Every other schedule here
    updates once, after its last action: one version, nothing is late, but the pipeline empties.
    """
    _at_least_one(stages=stages, microbatches=microbatches)
    orders, enough = [], max(microbatches, stages)
    for stage in range(stages):
        to_fill = stages - 1 - stage
        orders.append(_phases(microbatches, ("F", to_fill), ("F B U", enough - to_fill), ("B U", to_fill)))
    return Schedule("pipedream", tuple(orders), (straight(stages),) * microbatches)


SCHEDULES = {  # what `--schedule` offers: those that give the gradients of one process
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
    "zero_bubble_v": zero_bubble_v,
    "dualpipe": dualpipe,
}


def _phases(microbatches: int, *phases: tuple[str, int]) -> tuple[Action, ...]:
    """Plays (pattern, times) after (pattern, times).

    "F1" is the forward of chunk 1 for the next microbatch that has not had it, "F" is "F0"; "W" is the weight gradient
    that has waited longest. Phases written for more microbatches than there are lose the surplus: leaving a microbatch
    out everywhere breaks no dependency.
    """
    upcoming: Counter[str] = Counter()
    waiting: deque[tuple[int, int]] = deque()
    order = []
    for pattern, times in phases:
        for token in pattern.split() * times:
            kind, chunk = token[0], int(token[1:] or 0)
            if kind == "W":
                microbatch, chunk = waiting.popleft()
            else:
                half = f"{'B' if kind == 'I' else kind}{chunk}"  # an I is the next backward too
                microbatch = upcoming[half]
                upcoming[half] += 1
            if kind == "I":
                waiting.append((microbatch, chunk))
            order.append(Action(kind, microbatch, chunk))
    return tuple(action for action in order if action.microbatch < microbatches)


def _at_least_one(**counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, int):
            raise ValueError(f"{name} is {count}: give a whole number")
        if count < 1:
            raise ValueError(f"{name} is {count}: a pipeline has at least one")
