"""Where the learner's own code went wrong: the innermost of their lines in a traceback.

Works on the text of the traceback, because the line may come from another process: `RankError` carries the failing
rank's traceback as text. Frames of minillm, of the standard library and of installed packages are never shown.
"""

import re
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path

_FRAME = re.compile(
    r"""File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<function>.+)
        (?:\n[^\S\n]*(?![^\n]*File\ ")(?P<source>[^\n]+))?""",
    re.VERBOSE,
)
_NOT_THEIRS = tuple(
    {
        str(Path(__file__).parents[1]),
        *(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")),
        "<frozen",
        "<__array_function__",
    }
)


@dataclass(frozen=True)
class Line:
    """A line of the learner's: `number` counts from 1 inside its cell or file."""

    number: int
    function: str
    source: str

    def __str__(self) -> str:
        where = "the cell" if self.function == "<module>" else self.function
        return f"line {self.number} of {where}" + (f": {self.source}" if self.source else "")


def learner_line(error: BaseException) -> Line | None:
    """The innermost line of the learner's in the error's traceback, or None if no line of theirs took part."""
    text = "".join(traceback.format_exception(error))
    frames = [frame for frame in _FRAME.finditer(text) if not frame["file"].startswith(_NOT_THEIRS)]
    if not frames:
        return None
    last = frames[-1]
    return Line(int(last["line"]), last["function"].strip(), (last["source"] or "").strip())


def summary(error: BaseException) -> str:
    """The error in one line (or, for a table such as a hang's, as it is), without any traceback."""
    text = str(error).strip()
    if "Traceback (most recent call last)" in text:  # the text of another rank's error: its heading and its last line
        first, last = text.splitlines()[0].strip(), text.splitlines()[-1].strip()
        heading = first.split("Traceback (most recent call last)")[0].strip()
        return f"{heading.rstrip(':')}: {last}" if heading else last
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def not_attempted(error: BaseException) -> bool:
    """Whether the error is the `raise NotImplementedError` that an unsolved body starts with, here or on a rank."""
    line = learner_line(error)
    if line is None or not line.source:  # no line to look at: only the name of the error is left
        return re.search(r"^NotImplementedError$", summary(error).rsplit(": ", 1)[-1]) is not None
    return line.source.startswith("raise NotImplementedError")
