"""A schedule as a picture: the planned bars, and under them what the ranks measured."""

from collections.abc import Iterator
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import EngFormatter

from minillm.drawing import style, subplots
from minillm.palette import PALETTE, TEXT
from minillm.parallel.pipeline_parallel.schedule.schedules import Bar, Timeline

IDLE = "#E6E6E6"
KINDS = {  # kind of action: colour, hatch, words of the legend
    "F": (PALETTE["sky"], "", "F forward"),
    "B": (PALETTE["orange"], "", "B backward"),
    "I": (PALETTE["orange"], "//", "I input gradient"),
    "W": (PALETTE["green"], "..", "W weight gradient"),
    "U": (PALETTE["purple"], "xx", "U update"),
}
LETTERS = 100  # so many fit side by side


def draw(planned: Timeline, measured: Timeline | None = None, title: str = "", unit: str = "") -> Figure:
    """One row per rank, a bar per action with its microbatch; a chunk after a rank's first is paler.

    measured: what `observed` returns, drawn solid under the planned bars, which then are hollow. Both in the same unit:
    plan with the durations the ranks took. unit: "s", or "" if a forward takes 1.
    """
    rows, lanes = len(planned.bars), 1 if measured is None else 2
    if measured is not None and len(measured.bars) != rows:
        raise ValueError(f"planned for {rows} ranks, measured on {len(measured.bars)}: draw the same schedule")
    figure, axes = subplots(width=9, height=1.3 + 0.36 * lanes * rows)
    runs = [run for run in (planned, measured) if run is not None]
    width = max(run.makespan for run in runs)
    with style():
        axes.set_facecolor(IDLE)
        for lane, run in enumerate(runs):
            for rank, bars in enumerate(run.bars):
                for bar in bars:
                    box = (rank - 0.4 + lane * 0.8 / lanes, 0.8 / lanes - 0.04)
                    _draw(axes, bar, bar.start - run.start, box, width, hollow=run is not runs[-1])
        axes.set(xlim=(0, width), ylim=(rows - 0.5, -0.5), title=title or planned.schedule.name)
        axes.set_xlabel(f"time ({unit or 'one forward of one chunk = 1'})")
        if unit == "s":  # ticks say ms where that is what they are
            axes.set_xlabel("time")
            axes.xaxis.set_major_formatter(EngFormatter("s"))
        axes.set_yticks(range(rows), [f"rank {rank}" for rank in range(rows)])
        axes.grid(False)
        patches = list(_legend(planned, measured))
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    return figure


def _draw(axes: Axes, bar: Bar, left: float, box: tuple[float, float], span: float, hollow: bool) -> None:
    action, length = bar.action, bar.end - bar.start
    colour, hatch, _ = KINDS[action.kind]
    look: dict[str, Any] = {"facecolor": colour, "edgecolor": TEXT, "linewidth": 0.5, "hatch": hatch}
    if hollow:
        look |= {"facecolor": "white", "edgecolor": colour, "linewidth": 1.2, "hatch": None}
    axes.broken_barh([(left, length)], box, alpha=0.55 if action.chunk else 1, **look)
    room = LETTERS * length / span
    label = next((text for text in (str(action)[1:], str(action.microbatch)) if len(text) < room), None)
    if label:
        halo = [withStroke(linewidth=2.5, foreground="white", alpha=0.8)] if look["hatch"] else None
        middle = (left + length / 2, box[0] + box[1] / 2)
        axes.text(*middle, label, ha="center", va="center", fontsize=9, clip_on=True, path_effects=halo)


def _legend(planned: Timeline, measured: Timeline | None) -> Iterator[Patch]:
    found = {bar.action.kind for bars in planned.bars for bar in bars}
    for kind, (colour, hatch, words) in KINDS.items():
        if kind in found:
            yield Patch(facecolor=colour, hatch=hatch, edgecolor=TEXT, linewidth=0.5, label=words)
    idle = f"idle {planned.idle_share:.1%}"
    if measured is not None:
        idle = f"idle {planned.idle_share:.1%} planned (upper, hollow), {measured.idle_share:.1%} measured (lower)"
    yield Patch(facecolor=IDLE, edgecolor=TEXT, linewidth=0.5, label=idle)
