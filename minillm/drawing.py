"""Figures in one style: dark text on a white card (so that dark pages can show them too), units on every axis.

`subplots` makes figures without pyplot's registry: nothing is shown twice, nothing has to be closed. Predicted is
always a dashed line or a hollow, hatched bar; measured is a solid one. `headline` says what a figure shows in one
sentence and, under it, for which setting.

A page shows at most 850 pixels of a figure's width, 100 to the inch. So no figure is wider than 9 inches and no text
smaller than 9 points, which the page then shows at 8.5 or more.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, StrMethodFormatter

from minillm.palette import CARD, MUTED, TEXT, look

SHOWN_DPI, FILE_DPI = 100, 144  # pixels per inch on a page, and in the file: fine screens show more of them

_RC = {
    "figure.facecolor": CARD,
    "axes.facecolor": CARD,
    "savefig.facecolor": CARD,
    "figure.dpi": SHOWN_DPI,
    "savefig.dpi": FILE_DPI,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "figure.titlesize": 11,
    "figure.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "hatch.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.title_fontsize": 9,
    "lines.markersize": 5,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), TEXT),
    "axes.prop_cycle": cycler(color=[look(i).color for i in range(7)])
    + cycler(marker=[look(i).marker for i in range(7)]),
}


@contextmanager
def style() -> Iterator[None]:
    """The course's look for every figure drawn inside the block."""
    with matplotlib.rc_context(_RC):
        yield


def subplots(
    rows: int = 1, columns: int = 1, *, width: float = 7.0, height: float = 3.2, **options
) -> tuple[Figure, Any]:
    """Like `plt.subplots` in the course's style; width and height of the whole figure in inches."""
    with style():
        figure = Figure(figsize=(width, height))
        return figure, figure.subplots(rows, columns, **options)


def headline(on: Axes | Figure, message: str, setting: str = "") -> None:
    """The message in bold above an axes with the setting under it, or above a figure of panels with it at the foot."""
    with style():
        if isinstance(on, Figure):
            on.suptitle(message, x=0.01, ha="left")
            for axes in on.axes:
                axes.set_title(axes.get_title(loc="left"), fontsize=10, fontweight="normal")
            if setting:
                on.supxlabel(setting, x=0.01, ha="left", fontsize=9, color=MUTED)
            return
        on.set_title(message, pad=20 if setting else None)
        on.annotate(setting, (0, 1), (0, 6), xycoords="axes fraction", textcoords="offset points", fontsize=9,
                    color=MUTED)  # fmt: skip


def log_ticks(axis: Axis) -> None:
    """Ticks of a logarithmic axis as plain numbers: each power of ten, and some between where these are few."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(
        LogLocator(subs=(1,) if high > 150 * low else (1, 2, 5) if high > 12 * low else (1, 2, 3, 5))
    )
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(NullFormatter())


def small(image: bytes) -> bytes:
    """A PNG with at most 128 colours where that is smaller; figures of flat colour lose nothing visible."""
    from PIL import Image

    picture = Image.open(io.BytesIO(image))
    if picture.mode == "RGBA" and picture.getextrema()[3] != (255, 255):
        return image
    buffer = io.BytesIO()
    picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return min(buffer.getvalue(), image, key=len)


def bars(
    labels: Sequence[str],
    predicted: Sequence[float] | None,
    measured: Sequence[float],
    *,
    quantity: str,
    unit: str,
    title: str = "",
    ax: Axes | None = None,
) -> Figure:
    """Predicted beside measured, one pair per label; `quantity` and `unit` (B, s, B/s, FLOP/s, ...) name the axis."""
    if len(labels) != len(measured) or (predicted is not None and len(predicted) != len(labels)):
        raise ValueError(f"bars needs one value per label: {len(labels)} labels, {len(measured)} measured values")
    with style():
        ax = subplots()[1] if ax is None else ax
        places, width = np.arange(len(labels)), 0.38 if predicted is not None else 0.6
        shift = width / 2 if predicted is not None else 0.0
        if predicted is not None:
            ax.bar(places - shift, predicted, width, fill=False, hatch="//", edgecolor=look(1).color, label="predicted")
        ax.bar(places + shift, measured, width, color=look(0).color, label="measured")
        ax.set_xticks(places, labels)
        ax.grid(False, axis="x")
        _finish(ax, title, y=(quantity, unit))
        ax.legend()
    return ax.figure


def lines(
    x: Sequence[float],
    measured: Mapping[str, Sequence[float]],
    predicted: Mapping[str, Sequence[float]] | None = None,
    *,
    x_axis: tuple[str, str],
    y_axis: tuple[str, str],
    title: str = "",
    log: str = "",
    ax: Axes | None = None,
) -> Figure:
    """Measured points joined by solid lines, predictions of the same name dashed in the same colour.

    x_axis, y_axis: (quantity, unit), such as ("message", "B"); log: "", "x", "y" or "xy".
    """
    predicted = predicted or {}
    if unknown := set(predicted) - set(measured):
        raise ValueError(f"predicted has {sorted(unknown)}, which measured has not; use the same names in both")
    with style():
        ax = subplots()[1] if ax is None else ax
        for index, (name, values) in enumerate(measured.items()):
            drawn = look(index)
            ax.plot(x, values, color=drawn.color, marker=drawn.marker, label=name)
            if name in predicted:
                ax.plot(x, predicted[name], color=drawn.color, marker="", linestyle="--", label=f"{name}, predicted")
        if "x" in log:
            ax.set_xscale("log", base=10 if x_axis[1] else 2)  # counts, such as ranks, double
        if "y" in log:
            ax.set_yscale("log")
        _finish(ax, title, y=y_axis, x=x_axis)
        ax.legend()
    return ax.figure


def _finish(ax: Axes, title: str, *, y: tuple[str, str], x: tuple[str, str] | None = None) -> None:
    for axis, (quantity, unit) in [(ax.yaxis, y)] + ([(ax.xaxis, x)] if x else []):
        at_ticks = unit in ("B", "s", "B/s", "FLOP/s", "FLOP")  # each with its own prefix: 30 ms, 2 MB
        axis.set_label_text(f"{quantity} ({unit})" if unit and not at_ticks else quantity)
        if at_ticks:
            axis.set_major_formatter(EngFormatter(unit=unit, sep=" "))
        elif axis.get_scale() == "log":
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.set_title(title)
