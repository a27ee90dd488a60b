"""What every rank did, and when: one picture for people, one JSON file for Perfetto.

    rank 0  compute  [ forward ][ backward      ][ optimizer ]
            comm                  [all_reduce//////]             /// somebody waited for this part
    rank 1  ...

Both read ledgers: a ledger's `spans` (what the program said it was doing) lie on the compute lane, its `events` (what
it communicated) on the comm lane. Times are `time.monotonic()`, which all ranks of one machine share; they are drawn
from the earliest one on. What overlaps within a lane is stacked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LANES = ("compute", "comm")
# Okabe and Ito's colours, told apart by every kind of colour vision; the hatches tell them apart without any.
STYLES = {  # kind: colour, hatch, lane, words of the legend
    "compute": ("#56B4E9", "", "compute", "compute"),
    "optimizer": ("#009E73", "//", "compute", "optimizer"),
    "input": ("#F0E442", "..", "compute", "input"),
    "idle": ("#E6E6E6", "", "compute", "idle"),
    "comm": ("#E69F00", "", "comm", "communication"),
    "wait": ("#D55E00", r"\\", "comm", "communication waited for"),
}
EDGE = {"edgecolor": "#444444", "linewidth": 0.5}


@dataclass(frozen=True)
class _Bar:
    """One bar of the picture or one slice of the trace; seconds from the earliest of all."""

    name: str
    kind: str
    start: float
    end: float
    waited: float = 0.0
    emulated: bool = False
    args: dict = field(default_factory=dict)


def timeline(ledgers: Sequence) -> Figure:
    """A matplotlib figure with one row per ledger (rank 0 on top), compute above communication, time in milliseconds.

    ledgers: objects with `.events` and `.spans`, one per rank, as the ranks return them from `launch`.
    The hatched end of a communication is the time somebody was blocked in it; the rest was hidden behind other work.
    Raises ValueError if nothing was recorded.
    """
    import matplotlib.pyplot as plt

    ranks = _bars(ledgers)
    span_ms = 1e3 * max(bar.end for bars in ranks for bar in bars)
    figure = plt.figure(figsize=(9, 1.1 + 0.8 * len(ranks)), layout="constrained", facecolor="white")
    plt.close(figure)  # returned, not shown a second time by the notebook
    axes = figure.add_subplot(facecolor="white")
    for rank, bars in enumerate(ranks):
        axes.axhspan(rank - 0.46, rank + 0.46, color="#F4F4F4", zorder=0, linewidth=0)
        for lane, middle in zip(LANES, (rank - 0.22, rank + 0.22), strict=True):
            rows = _stack(bar for bar in bars if STYLES[bar.kind][2] == lane)
            height = 0.4 / max(len(rows), 1)
            for number, row in enumerate(rows):
                for bar in row:
                    _draw(axes, bar, middle - 0.2 + number * height, height, span_ms)
    axes.set(xlim=(0, 1.01 * span_ms or 1), ylim=(len(ranks) - 0.45, -0.55), xlabel="time, ms")
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))], fontweight="bold")
    axes.tick_params(axis="y", length=0, pad=58)
    middles = [rank + offset for rank in range(len(ranks)) for offset in (-0.22, 0.22)]
    axes.set_yticks(middles, LANES * len(ranks), minor=True, fontsize=9, color="#555555")
    axes.tick_params(axis="y", which="minor", length=0, pad=4)
    axes.grid(axis="x", color="white", linewidth=1)
    axes.set_axisbelow(True)
    axes.spines[["top", "left", "right"]].set_visible(False)
    _legend(figure, ranks)
    return figure


def trace(ledgers: Sequence) -> dict:
    """The same as a Chrome trace (load it at ui.perfetto.dev): a process per rank, threads per lane, microseconds."""
    events = []
    for rank, bars in enumerate(_bars(ledgers)):
        events.append(_metadata("process_name", rank, 0, name=f"rank {rank}"))
        events.append(_metadata("process_sort_index", rank, 0, sort_index=rank))
        rows = [(lane, row) for lane in LANES for row in _stack(bar for bar in bars if STYLES[bar.kind][2] == lane)]
        for thread, (lane, row) in enumerate(rows):
            events.append(_metadata("thread_name", rank, thread, name=lane))
            events += [
                {
                    "ph": "X",
                    "name": bar.name,
                    "cat": bar.kind,
                    "pid": rank,
                    "tid": thread,
                    "ts": bar.start * 1e6,
                    "dur": (bar.end - bar.start) * 1e6,
                    "args": bar.args,
                }
                for bar in row
            ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_trace(ledgers: Sequence, path: str | Path) -> Path:
    """Writes `trace(ledgers)` to `path` and returns it. Raises ValueError if its folder does not exist."""
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: folder {path.parent} does not exist; create it first")
    path.write_text(json.dumps(trace(ledgers)))
    return path


# From ledgers to bars.


def _bars(ledgers: Sequence) -> list[list[_Bar]]:
    """Spans and events of every rank, shifted so that the earliest starts at zero."""
    starts = [item.start for ledger in ledgers for item in (*ledger.events, *ledger.spans)]
    if not starts:
        raise ValueError(f"nothing to draw: {len(ledgers)} ledgers hold no event and no span; record inside `ledger()`")
    zero = min(starts)
    return [
        [_span_bar(span, zero) for span in ledger.spans] + [_event_bar(event, zero) for event in ledger.events]
        for ledger in ledgers
    ]


def _span_bar(span, zero: float) -> _Bar:
    if span.kind not in STYLES:
        raise ValueError(f"span {span.name!r} is of kind {span.kind!r}; kinds are {', '.join(STYLES)}")
    return _Bar(span.name, span.kind, span.start - zero, span.end - zero)


def _event_bar(event, zero: float) -> _Bar:
    waited = min(max(float(event.waited), 0.0), event.end - event.start)
    args = {
        "group": str(event.group),
        "bytes": event.bytes,
        "messages": event.messages,
        "shape": list(event.shape),
        "dtype": str(event.dtype),
        "waited_ms": waited * 1e3,
        "emulated": bool(event.emulated),
        "counted": bool(getattr(event, "counted", True)),
    }
    return _Bar(event.op, "comm", event.start - zero, event.end - zero, waited, bool(event.emulated), args)


def _stack(bars: Iterable[_Bar]) -> list[list[_Bar]]:
    """Spreads bars that overlap over as few rows as it takes; the longer of two that start together goes on top."""
    rows: list[list[_Bar]] = []
    for bar in sorted(bars, key=lambda bar: (bar.start, -bar.end)):
        free = next((row for row in rows if row[-1].end <= bar.start), None)
        if free is None:
            rows.append(free := [])
        free.append(bar)
    return rows


def _metadata(what: str, process: int, thread: int, **args: object) -> dict:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


# From bars to ink.


def _draw(axes: Axes, bar: _Bar, top: float, height: float, span_ms: float) -> None:
    from matplotlib.patheffects import withStroke

    for kind, start, end in _parts(bar):
        colour, hatch, _, _ = STYLES[kind]
        box = [(start * 1e3, (end - start) * 1e3)]
        axes.broken_barh(box, (top, height), facecolor=colour, hatch=hatch, **EDGE, zorder=2)
    room = (bar.end - bar.start) * 1e3 / span_ms * 104 if span_ms else 0  # about 104 letters fit across
    label = next((text for text in _labels(bar) if len(text) + 1 <= room), None)
    if label and height > 0.12:
        halo = [withStroke(linewidth=3, foreground="white", alpha=0.85)] if hatch else None  # letters over hatches
        at = ((bar.start + bar.end) / 2 * 1e3, top + height / 2)
        axes.text(*at, label, ha="center", va="center", fontsize=9, zorder=3, path_effects=halo, clip_on=True)


def _parts(bar: _Bar) -> Iterator[tuple[str, float, float]]:
    """A communication falls into what was hidden and what somebody waited for, at its end."""
    turn = bar.end - bar.waited
    if turn > bar.start or not bar.waited:
        yield bar.kind, bar.start, turn
    if bar.waited:
        yield "wait", turn, bar.end


def _labels(bar: _Bar) -> Iterator[str]:
    if "bytes" in bar.args:
        yield f"{bar.name}  {_size(bar.args['bytes'])}"
    yield bar.name


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def _legend(figure: Figure, ranks: list[list[_Bar]]) -> None:
    from matplotlib.patches import Patch

    bars = [bar for row in ranks for bar in row]
    kinds = {kind for bar in bars for kind, *_ in _parts(bar)}
    patches = [
        Patch(facecolor=colour, hatch=hatch, **EDGE, label=label)
        for kind, (colour, hatch, _, label) in STYLES.items()
        if kind in kinds
    ]
    title = "communication times are emulated" if any(bar.emulated for bar in bars) else None
    figure.legend(
        handles=patches, loc="outside upper right", ncols=len(patches), frameon=False, fontsize=9, title=title
    )
