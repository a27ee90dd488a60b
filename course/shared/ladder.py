"""The ladder of memories, from a GPU's registers to another node: labs 00 and 25 show it."""

from matplotlib.figure import Figure

from minillm.drawing import headline, log_ticks, subplots
from minillm.palette import look
from minillm.predict.kernels import LADDER


def draw_ladder(title: str) -> Figure:
    """Bytes per second of each memory of an H100, from its registers to the network, with its size: each rung is slower
    than the one above it."""
    figure, axes = subplots(width=8, height=3.2)
    for place, rung in enumerate(LADDER):
        axes.barh(place, rung.rate / 1e12, color=look(1 if rung.bytes is None else 0).color, height=0.65)
        size = "" if rung.bytes is None else f", {_size(rung.bytes)}"
        axes.annotate(f"{_rate(rung.rate)}{size}", (rung.rate / 1e12, place), xytext=(5, 0),
                      textcoords="offset points", va="center", fontsize=9)  # fmt: skip
    axes.set_yticks(range(len(LADDER)), [rung.name for rung in LADDER])
    axes.invert_yaxis()
    axes.grid(False)
    axes.set(xscale="log", xlabel="TB/s of one GPU", xlim=(0.02, 9000))
    log_ticks(axes.xaxis)
    sources = "One H100 by data sheet, top three by clock (L2: an A100's); blue: on the card"
    headline(axes, title, sources)
    return figure


def _size(value: float) -> str:
    return f"{value / 1e9:.0f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"


def _rate(value: float) -> str:
    return f"{value / 1e12:.3g} TB/s" if value >= 1e12 else f"{value / 1e9:.0f} GB/s"
