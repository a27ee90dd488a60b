"""`python -m minillm scaling`: weak and strong scaling, measured on CPU ranks and emulated nodes, then extended.

python -m minillm scaling --figure scaling.png --json scaling.json
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from matplotlib.figure import Figure
from typer import Option

from minillm.drawing import style, subplots
from minillm.equivalence.scaling import EXTENDED, MEASURED, MODES, PER_NODE, Row, cliff, scaling
from minillm.measure.provenance import JsonFile, provenance, summary, writable, write_json
from minillm.palette import look


def command(
    ranks: Annotated[str, Option(help="Numbers of ranks that are run.")] = ",".join(map(str, MEASURED)),
    extend: Annotated[str, Option(help="Numbers of ranks that are only predicted.")] = ",".join(map(str, EXTENDED)),
    picture: Annotated[
        Path | None, Option("--figure", metavar="FILE", callback=writable, help="Where to draw the curves (png).")
    ] = None,
    json_file: JsonFile = None,
) -> int:
    """Measure how a step scales with data-parallel ranks, inside a node and beyond it, and say why."""
    run, only = _numbers("--ranks", ranks), _numbers("--extend", extend)
    origin = provenance()
    rows = scaling(run, only)
    print(summary(origin), "", *table(rows), sep="\n")
    if {PER_NODE, 2 * PER_NODE} <= {*run, *only}:
        print(f"\n{cliff(rows)}")
    if picture:
        figure(rows).savefig(picture)
    write_json(json_file, {"provenance": origin, "rows": [asdict(row) for row in rows]})
    return 0


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for a terminal."""
    lines = ["        ranks  nodes  predicted s  measured s  two levels s  MB per rank  MB leave a node  efficiency"]
    lines[0] += "  measured"
    for row in rows:
        seconds = "-" if row.measured_seconds is None else f"{row.measured_seconds:.3f}"
        share = "-" if row.measured_efficiency is None else f"{row.measured_efficiency:.0%}"
        times = f"{row.seconds:>11.3f}  {seconds:>10}  {row.two_level:>12.3f}"
        sizes = f"{row.bytes / 1e6:>11.2f}  {row.crossing / 1e6:>15.2f}"
        lines.append(
            f"{row.mode:<6}  {row.ranks:>5}  {row.nodes:>5}  {times}  {sizes}  {row.efficiency:>10.0%}  {share:>8}"
        )
    return lines


def figure(rows: Sequence[Row]) -> Figure:
    """Seconds of a step over ranks: measured, predicted with one ring, and predicted in two levels."""
    drawn, axes = subplots(1, 2)
    with style():
        for ax, mode in zip(axes, MODES, strict=True):
            some = [row for row in rows if row.mode == mode]
            ranks = [row.ranks for row in some]
            for index, (name, label) in enumerate({"seconds": "one ring", "two_level": "two levels"}.items()):
                drawing = {"color": look(index).color, "linestyle": look(index).linestyle, "marker": ""}
                ax.plot(ranks, [getattr(row, name) for row in some], label=f"predicted, {label}", **drawing)
            real = [(row.ranks, row.measured_seconds) for row in some if row.measured_seconds is not None]
            ax.plot(*zip(*real, strict=True), color=look(3).color, linestyle="", marker="D", label="measured, emulated")
            ax.axvline(PER_NODE, color="black", linewidth=1, linestyle=":", label="one node is full")
            ax.set(xscale="log", yscale="log", xlabel="ranks", ylabel="time of a step (s)", title=f"{mode} scaling")
            ax.set_xticks(ranks, [str(each) for each in ranks])
            ax.minorticks_off()
        axes[0].legend()
    return drawn


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",") if part.strip()}))
    except ValueError:
        raise ValueError(f"{option} {text} is not a list of whole numbers: write it like 1,2,4") from None
