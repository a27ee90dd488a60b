"""Lab 22's figures: a silent bug's curve beside its gradients, and which measurement sees which exhibit."""

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from course.lab22_bug_museum import museum
from course.lab22_bug_museum.receipts import recorded, trained
from course.lab22_bug_museum.training_runs import Record, Run
from minillm.drawing import headline, subplots
from minillm.palette import TEXT, look

TRAINED = tuple(name for name, its in museum.EXHIBITS.items() if isinstance(its.run, Run))
COLUMNS = ("last loss", "gradient norm", "worst gradient", "copies that differ")


def silent(exhibit: str = "slow-with-clipping") -> Figure:
    """The loss of a run with a bug beside that of one process, and the gradients of its first step beside one
    process's."""
    record: Record = recorded(exhibit)
    figure, (left, right) = subplots(1, 2, width=9, height=3.2)
    for place, (label, steps) in enumerate((("this run", record.steps), ("one process", record.alone.steps))):
        drawn = look(place)
        left.plot(
            [s.loss for s in steps], label=label, color=drawn.color, marker=drawn.marker, linestyle=drawn.linestyle
        )
    left.set(xlabel="step", ylabel="loss, nats")
    left.legend()
    names, wrong = list(record.alone.gradients), record.wrong_gradients()
    right.axhline(1, color="#555555", linestyle="--", linewidth=1)
    for place, (label, chosen) in enumerate(
        (("wrong", [n for n in names if n in wrong]), ("right", [n for n in names if n not in wrong]))
    ):
        drawn = look(place)
        right.plot(
            [names.index(n) for n in chosen],
            [record.ratio(n) for n in chosen],
            linestyle="",
            marker=drawn.marker,
            color=drawn.color,
            label=f"{label}: {len(chosen)}",
        )
    right.set(xlabel="parameter, in the model's order", ylabel="gradient / one process's")
    low, high = right.get_ylim()
    right.set_ylim(min(0, low), 1.25 * max(1.5, high))  # room for the legend
    right.legend(loc="upper left", ncols=2)
    headline(left, "What everybody looks at", exhibit)
    headline(right, "Beside one process, by name", "gradients of the first step")
    return figure


def deviations(record: Record) -> tuple[float, ...]:
    """How far each column of the table is from one process, relative; of copies the share that differ."""
    loss = abs(record.steps[-1].loss / record.alone.steps[-1].loss - 1)
    norm = abs(record.ranks[0].norm / record.alone.norm - 1)
    worst = max(record.wrong_gradients().values(), default=0.0)
    return loss, norm, worst, len(record.drifted()) / max(1, record.copies)


def what_sees_it() -> Figure:
    """Exhibits by measurements: how far each measurement is from that of one process."""
    found = {name: deviations(record) for name, record in trained().items()}
    names = list(found)
    values = np.array([found[name] for name in names])
    shades = np.log10(np.clip(values, 1e-3, 1.0))
    figure, axes = subplots(width=8, height=0.6 + 0.36 * len(names))
    axes.imshow(shades, cmap="Blues", vmin=-3, vmax=0.3, aspect="auto")
    axes.grid(False)
    axes.set_xticks(range(len(COLUMNS)), COLUMNS)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(length=0)
    for y, x in np.ndindex(*values.shape):
        color = "white" if shades[y, x] > -1 else TEXT
        axes.text(x, y, _percent(values[y, x]), ha="center", va="center", fontsize=9, color=color)
    subtitle = "deviation from one process, and the share of copies that differ; none: below 0.1 %"
    headline(axes, "No single measurement sees every bug", subtitle)
    return figure


def _percent(value: float) -> str:
    if value < 1e-3:
        return "none"
    return f"{value:.0%}" if value >= 0.1 or math.isinf(value) else f"{value:.1%}"


def _what_sees_it() -> tuple[Figure, dict[str, Any]]:
    found = {name: list(deviations(record)) for name, record in trained().items()}
    return what_sees_it(), {"columns": list(COLUMNS), "deviations": found}


FIGURES = {"what_sees_it": _what_sees_it}
