"""`python -m minillm plot RUN`: the loss of a run, where its steps' time went, and its hours over all attempts."""

from pathlib import Path
from statistics import median
from typing import Annotated, Any

from matplotlib.figure import Figure
from typer import Argument, Option

from minillm.drawing import style, subplots
from minillm.palette import SPANS, look
from minillm.train.fault_tolerance.goodput import Goodput, read_goodput
from minillm.train.metrics import read_metrics

PARTS = {  # of a step, in the order they are stacked: a kind of the palette, and how strong its colour is
    "input": ("input", 1.0),
    "forward": ("compute", 0.55),
    "backward": ("compute", 1.0),
    "communication": ("comm", 1.0),
    "optimizer": ("optimizer", 1.0),
    "idle": ("idle", 1.0),
}

HOURS = {"useful": "compute", "saving": "input", "lost": "wait", "restarting": "comm", "other": "idle"}  # their colours


def command(
    run: Annotated[str, Argument(help="Name of a run, or its folder.")],
    runs: Annotated[Path, Option(metavar="FOLDER", help="Where runs are kept.")] = Path("runs"),
    out: Annotated[Path | None, Option(metavar="FOLDER", help="Where to write.", show_default="into the run")] = None,
) -> None:
    """Draw loss.png, step_time.png and goodput.png from what a run has noted."""
    folder = runs / run if (runs / run).is_dir() else Path(run)
    rows, out = read_metrics(folder), out or folder
    out.mkdir(parents=True, exist_ok=True)
    figures = {"loss": loss_figure(rows, folder.name), "step_time": step_time_figure(rows, folder.name)}
    if (spent := read_goodput(folder)) and spent.total:
        figures["goodput"] = goodput_figure(spent, folder.name)
    for name, figure in figures.items():
        path = out / f"{name}.png"
        figure.savefig(path)
        print(path)


def loss_figure(rows: list[dict[str, Any]], name: str) -> Figure:
    """Training loss of every step, its running mean, and the validations."""
    steps = _steps(rows)
    figure, ax = subplots()
    with style():
        kept = [(row["step"] + 1, row["loss"]) for row in steps if row["loss"] is not None]
        x, y = zip(*kept, strict=True)
        ax.plot(x, y, color=look(0).color, marker="", alpha=0.35, linewidth=1, label="training, each step")
        window = max(1, len(y) // 40)
        means = [sum(y[max(0, i - window + 1) : i + 1]) / min(window, i + 1) for i in range(len(y))]
        ax.plot(x, means, color=look(0).color, marker="", label=f"mean of {window} steps")
        validations = [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]
        if validations:
            ax.plot(
                *zip(*validations, strict=True), color=look(3).color, marker="D", linestyle="--", label="validation"
            )
        ax.set(xlabel="step", ylabel="loss (nats/token)", title=f"{name}: loss")
        ax.legend()
    return figure


def step_time_figure(rows: list[dict[str, Any]], name: str) -> Figure:
    """Milliseconds of every step by what they went to, stacked; the scale ends at three times the median step."""
    steps = _steps(rows)
    figure, ax = subplots()
    with style():
        x = [row["step"] + 1 for row in steps]
        known = [{"idle_s": row["seconds"]} | row for row in steps]  # a run may have measured whole steps only
        stacks = [[1e3 * max(0.0, row.get(f"{part}_s", 0.0)) for row in known] for part in PARTS]
        areas = ax.stackplot(x, stacks, labels=list(PARTS), linewidth=0)
        for area, (kind, strength) in zip(areas, PARTS.values(), strict=True):
            colour, hatch = SPANS[kind]
            area.set(facecolor=(colour, strength), hatch=hatch)
        totals = [1e3 * row["seconds"] for row in steps]
        ax.set(xlim=(x[0], max(x[-1], x[0] + 1)), ylim=(0, min(1.1 * max(totals), 3 * median(totals))))
        ax.set(xlabel="step", ylabel="time of a step (ms)", title=f"{name}: where the time goes")
        handles, labels = ax.get_legend_handles_labels()
        ax.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def goodput_figure(spent: Goodput, name: str) -> Figure:
    """Seconds of the run over all of its attempts, by what they went to."""
    figure, ax = subplots(height=2.2)
    with style():
        left = 0.0
        for part in HOURS:
            seconds = getattr(spent, part)
            colour, hatch = SPANS[HOURS[part]]
            label = f"{part} {seconds / spent.total:.1%}"
            ax.barh([0], [seconds], left=left, color=colour, hatch=hatch, edgecolor="white", label=label)
            left += seconds
        ax.set(yticks=[], xlabel="time (s)", title=f"{name}: goodput {spent.share:.1%} in {spent.counted}")
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _steps(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last record of each step: after a rollback a step is made again."""
    needed = {"loss", "seconds"}
    steps = {row["step"]: row for row in rows if needed <= row.keys()}
    if not any(row["loss"] is not None for row in steps.values()):
        raise ValueError("this run has not made a step yet: nothing to draw")
    return [steps[step] for step in sorted(steps)]
