"""When everything in a schedule happens: the simulator, its chart, and charts read back.

    print(simulate(one_f_one_b(4, 8), Durations(F=1, B=1, W=0)))

    rank 0: F0 F1 F2 F3 .. .. .. B0 F4 B1 F5 B2 F6 B3 F7 B4 .. B5 .. B6 .. B7
    rank 1: .. F0 F1 F2 .. .. B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 .. B6 .. B7 ..

The model: a rank does one action at a time, in its order, and each as soon as what it needs is there. A message takes
its time on the wire without keeping either rank from computing, which is what asynchronous sends are for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from typing import NamedTuple

from minillm.measure.ledger import Ledger
from minillm.parallel.pipeline_parallel.schedule.actions import NAME, Action, Place, Schedule, Task, straight, stuck
from minillm.parallel.pipeline_parallel.schedule.memory import peak_bytes, peak_in_flight

Duration = float | Sequence[float]  # of every part of the model, or of each
MAX_COLUMNS = 200


@dataclass(frozen=True)
class Durations:
    """Seconds (or any unit) that actions take: one number for all parts of the model, or one for each.

    F: forward. B: whole backward, twice the forward where matrix products dominate. W: the part of B that computes
    weight gradients; the input gradient takes I = B - W. message: from one rank to another. U: update of the weights.
    """

    F: Duration = 1
    B: Duration = 2
    W: Duration = 1
    message: float = 0
    U: Duration = 0

    def of(self, kind: str, part: int) -> float:
        """How long an action of this kind takes on this part of the model."""
        return self._of("B", part) - self._of("W", part) if kind == "I" else self._of(kind, part)

    def _of(self, kind: str, part: int) -> float:
        value = getattr(self, kind)
        return value[part] if isinstance(value, Sequence) else value

    def checked(self, parts: int) -> Durations:
        """Returns itself. Raises ValueError if a list has not one duration per part, or if a duration is negative."""
        for kind in ("F", "B", "W", "U", "message"):
            value = getattr(self, kind)
            if isinstance(value, Sequence) and (kind == "message" or len(value) != parts):
                what = "one number" if kind == "message" else f"one number, or one for each of the {parts} parts"
                raise ValueError(f"{kind}={list(value)}: give {what}")
            if min(value if isinstance(value, Sequence) else [value]) < 0:
                raise ValueError(f"{kind}={value}: a duration cannot be negative")
        if any(self.of("I", part) < 0 for part in range(parts)):
            raise ValueError(f"W={self.W} is longer than B={self.B}: W is a part of the whole backward B")
        if not any(self.of(kind, part) for kind in "FB" for part in range(parts)):
            raise ValueError(f"F={self.F} and B={self.B}: let something take time")
        return self


class Bar(NamedTuple):
    """An action and when it ran."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """bars[rank]: what the rank did and when, in order."""

    schedule: Schedule
    bars: tuple[tuple[Bar, ...], ...]

    @property
    def start(self) -> float:
        return min(bar.start for bars in self.bars for bar in bars)

    @property
    def makespan(self) -> float:
        """From the first action's start to the last one's end, over all ranks."""
        return max(bar.end for bars in self.bars for bar in bars) - self.start

    @property
    def idle(self) -> list[float]:
        """Per rank: the time of the makespan in which it computed nothing, also known as its bubble."""
        return [self.makespan - sum(bar.end - bar.start for bar in bars) for bars in self.bars]

    @property
    def idle_share(self) -> float:
        """Idle time of all ranks over the time they all could have computed: between 0 and 1."""
        return sum(self.idle) / (len(self.bars) * self.makespan)

    @property
    def peak_in_flight(self) -> list[float]:
        """Per rank, in microbatches: see `memory.peak_in_flight`."""
        return peak_in_flight(self.schedule)

    def peak_bytes(self, activation: float | Sequence[float]) -> list[float]:
        """Per rank: see `memory.peak_bytes`."""
        return peak_bytes(self.schedule, activation)

    def __str__(self) -> str:
        return self.chart()

    def chart(self, slot: float | None = None) -> str:
        """One line per rank, one column per `slot`: "F3" starts there, "--" goes on, ".." is idle.

        slot: by default the longest one that every action starts and ends with, if that takes no more than 200 columns.
        """
        start, makespan = self.start, self.makespan
        slot = slot or self._slot()
        width = max(len(str(bar.action)) for bars in self.bars for bar in bars)
        lines = []
        for rank, bars in enumerate(self.bars):
            cells = ["." * width] * round(makespan / slot)
            for bar in bars:
                first, last = (round((time - start) / slot) for time in (bar.start, bar.end))
                cells[first:last] = [str(bar.action).ljust(width), *["-" * width] * (last - first - 1)][: last - first]
            lines.append(f"rank {rank}: " + " ".join(cells))
        return "\n".join(lines)

    def _slot(self) -> float:
        times = [time - self.start for bars in self.bars for bar in bars for time in (bar.start, bar.end)]
        exact = [Fraction(time).limit_denominator(1000) for time in times]
        unit = lcm(*(time.denominator for time in exact))
        slot = gcd(*(int(time * unit) for time in exact)) / unit
        return slot if slot and self.makespan / slot <= MAX_COLUMNS else self.makespan / MAX_COLUMNS


def simulate(schedule: Schedule, durations: Durations | None = None) -> Timeline:
    """Runs the schedule on a clock; by default F = 1, B = 2. ScheduleError if ranks wait for each other for ever."""
    durations = (durations or Durations()).checked(schedule.num_parts)
    orders = [schedule.actions(rank) for rank in range(schedule.ranks)]
    bars: list[list[Bar]] = [[] for _ in orders]
    end: dict[Task, float] = {}
    waits_for, moved = {}, True
    while moved:
        waits_for, moved = {}, False
        for rank, (order, done) in enumerate(zip(orders, bars, strict=True)):
            while len(done) < len(order) and rank not in waits_for:
                task = Task(rank, order[len(done)])
                edges = schedule.edges[task]
                if unmet := [edge for edge in edges if edge.source not in end]:
                    waits_for[rank] = unmet[0]
                    continue
                arrivals = [end[edge.source] + durations.message * edge.crosses for edge in edges]
                start = max(arrivals + [bar.end for bar in done[-1:]], default=0)
                part = schedule.part_of[Place(rank, task.action.chunk)]
                end[task] = start + durations.of(task.action.kind, part)
                done.append(Bar(task.action, start, end[task]))
                moved = True
    if waits_for:
        raise stuck(waits_for)
    return Timeline(schedule, tuple(map(tuple, bars)))


def observed(schedule: Schedule, ledgers: Sequence[Ledger]) -> Timeline:
    """What ranks measured, from their ledgers: the spans that are named like actions ("F3", "B3.1"), in seconds."""
    bars = []
    for ledger in ledgers:
        spans = sorted((span for span in ledger.spans if NAME.fullmatch(span.name)), key=lambda span: span.start)
        bars.append(tuple(Bar(Action.parse(span.name), span.start, span.end) for span in spans))
    found = [Task(rank, bar.action) for rank, rank_bars in enumerate(bars) for bar in rank_bars]
    if len(found) != len(schedule.tasks) or set(found) != set(schedule.tasks):
        lengths, due = (
            [len(order) for order in orders] for orders in (bars, map(schedule.actions, range(schedule.ranks)))
        )
        raise ValueError(f"the ledgers hold {lengths} actions, a step of {schedule.name} has {due}: record one step")
    return Timeline(schedule, tuple(bars))


def parse_chart(text: str, chunks: int = 1) -> Timeline:
    """A chart such as `Timeline.chart` prints, or a book: lines "Stage 0: F0 F1 .. B0", one time unit per column.

    Other lines are passed over. Nothing is checked: see `violations`.
    """
    lines = [match[1] for match in re.finditer(r"^ *(?:rank|stage) \d+: (.*)$", text, re.MULTILINE | re.IGNORECASE)]
    names = NAME.findall(" ".join(lines))
    if not names:
        raise ValueError("the chart has no actions: write lines such as 'rank 0: F0 F1 .. B0 B1'")
    width = 1 + max(len(word) for line in lines for word in line.split() if NAME.fullmatch(word))
    bars: list[list[Bar]] = []
    for line in lines:
        bars.append([])
        for column, at in enumerate(range(0, len(line), width)):
            cell = line[at : at + width].strip()
            if NAME.fullmatch(cell):
                bars[-1].append(Bar(Action.parse(cell), column, column + 1))
            elif cell.startswith("-") and bars[-1]:
                bars[-1][-1] = bars[-1][-1]._replace(end=column + 1)
            elif cell.strip("."):
                raise ValueError(f"column {column} of the chart holds {cell!r}: put each action in {width} characters")
    orders = tuple(tuple(bar.action for bar in rank) for rank in bars)
    routes = (straight(len(lines), chunks),) * (1 + max(int(microbatch) for _, microbatch, _ in names))
    return Timeline(Schedule("chart", orders, routes), tuple(map(tuple, bars)))
