"""One palette for every figure of the course: Okabe and Ito's eight colours (Color Universal Design, 2008).

They stay distinct for readers who do not see red and green apart; each also comes with a marker, a hatch and a line
style, so that a figure printed in grey still reads.
"""

from typing import NamedTuple

PALETTE = {
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "vermillion": "#D55E00",
    "sky": "#56B4E9",
    "purple": "#CC79A7",
    "yellow": "#F0E442",
    "black": "#000000",
}

# What a span of a timeline shows, and with which hatch.
SPANS = {
    "compute": (PALETTE["blue"], ""),
    "comm": (PALETTE["orange"], "//"),
    "wait": (PALETTE["vermillion"], "xx"),
    "idle": ("#D9D9D9", ""),
    "input": (PALETTE["purple"], ".."),
    "optimizer": (PALETTE["green"], "\\\\"),
}

TEXT = "#1A1A1A"
MUTED = "#555555"
CARD = "#FFFFFF"


class Look(NamedTuple):
    """How the i-th series of a figure is drawn."""

    color: str
    marker: str
    hatch: str
    linestyle: str


_COLOURS = [PALETTE[name] for name in ("blue", "orange", "green", "vermillion", "sky", "purple", "black")]
_MARKERS = "osD^vPX"
_HATCHES = ["", "//", "..", "xx", "\\\\", "++", "--"]
_LINES = ["-", "--", "-.", ":"]


def look(index: int) -> Look:
    """Colour, marker, hatch and line style of series number `index` (0, 1, 2, ...)."""
    return Look(_COLOURS[index % 7], _MARKERS[index % 7], _HATCHES[index % 7], _LINES[index % 4])
