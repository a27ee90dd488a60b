"""How two programs are compared: right results first, then alternating, and the ratio pair by pair.

    warm-up   ours theirs            not counted
    pair 1    ours theirs  -> ratio
    pair 2    theirs ours  -> ratio  the order is swapped, so that neither always runs in the other's wake
    ...

A machine's speed drifts; two runs next to each other drift together. So the ratio of each pair is taken, and the median
of those is the result. Seconds are shown to give an idea; ratios are what a row claims.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from minillm.measure.provenance import summary

MIN_REPEATS = 5
Sample = Callable[[], float]  # does the work once and says what it measured: seconds, tokens per second, ...


@dataclass(frozen=True)
class Comparison:
    """What `side_by_side` measured: (ours, theirs) pair by pair. Nothing is timed if the results were wrong."""

    correct: bool
    pairs: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class BenchRow:
    """One line of a table. ours, theirs: medians, in `unit`; None if the results were wrong.

    ratio: median over the pairs of how many times better than the peer (above 1 = ahead), whatever the unit.
    spread: interquartile range of those ratios. runs: number of pairs.
    """

    name: str
    peer: str
    ours: float | None
    theirs: float | None
    unit: str
    ratio: float | None
    spread: float | None
    runs: int
    correct: bool

    @property
    def cells(self) -> tuple[str, ...]:
        numbers = [_number(value) for value in (self.ours, self.theirs)]
        ratio = [_number(value, "{:.2f}") for value in (self.ratio, self.spread)]
        return (self.name, self.peer, *numbers, self.unit, *ratio, str(self.runs), "yes" if self.correct else "NO")


@dataclass(frozen=True)
class BenchReport:
    """A table with its origin: `str` for a terminal, `markdown` for a page, `to_json` for a file. notes: sentences that
    stand under it."""

    title: str
    provenance: dict[str, Any]
    rows: tuple[BenchRow, ...]
    notes: tuple[str, ...] = ()

    HEAD = ("name", "peer", "ours", "theirs", "unit", "ratio", "spread", "runs", "correct")

    @property
    def ok(self) -> bool:
        """Whether every result was right. A row that loses is still a result."""
        return all(row.correct for row in self.rows)

    def __str__(self) -> str:
        table = [self.HEAD, *(row.cells for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(_align(i, cell, widths[i]) for i, cell in enumerate(cells)).rstrip() for cells in table]
        return "\n".join([self.title, summary(self.provenance), "", *lines, *self.notes])

    def markdown(self) -> str:
        marks = [":--" if i in _LEFT else "--:" for i in range(len(self.HEAD))]
        lines = ["| " + " | ".join(cells) + " |" for cells in [self.HEAD, marks, *(row.cells for row in self.rows)]]
        return "\n".join([*lines, "", *self.notes, f"({summary(self.provenance)})"])

    def to_json(self) -> dict[str, Any]:
        notes = {"notes": list(self.notes)} if self.notes else {}
        return {"provenance": self.provenance, "rows": [asdict(row) for row in self.rows], **notes}


def side_by_side(
    check: Callable[[], bool], ours: Sample, theirs: Sample, repeats: int = 7, warmup: int = 2
) -> Comparison:
    """Check that both give the same result, then measure them in turn, `repeats` pairs after `warmup`.

    Where several ranks run this, `check` has to come to the same answer on all of them.
    """
    check_repeats(repeats)
    if not check():
        return Comparison(False, ())
    for _ in range(warmup):
        ours(), theirs()
    pairs = []
    for i in range(repeats):
        if i % 2 == 0:
            mine = ours()
            pairs.append((mine, theirs()))
        else:
            other = theirs()
            pairs.append((ours(), other))
    return Comparison(True, tuple(pairs))


def check_repeats(repeats: int) -> None:
    if repeats < MIN_REPEATS:
        raise ValueError(f"repeats={repeats} is too few for a median on a noisy machine: use {MIN_REPEATS} or more")


def seconds_per_call(
    call: Callable[[], Any],
    calls: int = 1,
    before: Callable[[], Any] = lambda: None,
    after: Callable[[], Any] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Sample:
    """A sample that times `calls` calls in a row: more of them where one is too short for the clock.

    before: not timed, such as a barrier. after: timed, such as waiting for a GPU.
    """

    def sample() -> float:
        before()
        start = clock()
        for _ in range(calls):
            call()
        after()
        return (clock() - start) / calls

    return sample


def bench_row(
    name: str, peer: str, found: Comparison, unit: str, scale: float = 1.0, higher_is_better: bool = False
) -> BenchRow:
    """The row of one comparison. scale: from what was measured to `unit`, 1e3 for seconds in ms."""
    if not found.correct:
        return BenchRow(name, peer, None, None, unit, None, None, 0, False)
    ours, theirs = (scale * statistics.median(side) for side in zip(*found.pairs, strict=True))
    ratios = [mine / other if higher_is_better else other / mine for mine, other in found.pairs]
    return BenchRow(
        name, peer, ours, theirs, unit, statistics.median(ratios), interquartile_range(ratios), len(ratios), True
    )


def interquartile_range(values: Sequence[float]) -> float:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


_LEFT = (0, 1, 4, 8)  # columns of text


def _align(column: int, cell: str, width: int) -> str:
    return cell.ljust(width) if column in _LEFT else cell.rjust(width)


def _number(value: float | None, form: str = "{:.3g}") -> str:
    return "-" if value is None else form.format(value)
