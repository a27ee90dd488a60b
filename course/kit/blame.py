"""Where the learner's own code went wrong: the innermost of their lines in a traceback.

Works on the text of the traceback, because the line may come from another process: `RankError` carries the failing
rank's traceback as text. Frames of minillm, of the standard library and of installed packages are never shown.
"""

import os
import re
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path

import minillm
from course.kit.answers import EDITED

_FRAME = re.compile(
    r'File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<function>[^\n]+)'
    r'(?:\n(?![^\n]*File ")[^\S\n]*(?P<source>[^\n]+))?'
)
_COURSE = Path(__file__).parents[1]
_PACKAGE = Path(minillm.__file__).parent
# Answers that stand in for learners'.
_MISTAKE = re.compile(rf"{re.escape(str(_COURSE))}/\w+/(mistakes\w*\.py|notebook\.py{re.escape(EDITED)})")
_NOT_THEIRS = (
    f"{_PACKAGE}{os.sep}",
    f"{_COURSE}{os.sep}",
    *(f"{sysconfig.get_path(key)}{os.sep}" for key in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen",
    "<__array_function__",
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
    frames = [frame for frame in _FRAME.finditer(text) if _is_theirs(frame["file"])]
    if not frames:
        return None
    last = frames[-1]
    return Line(int(last["line"]), last["function"].strip(), (last["source"] or "").strip())


def summary(error: BaseException) -> str:
    """The error in one line (or, for a table such as a hang's, as it is), without any traceback."""
    text = str(error).strip()
    heading, traceback_begins, _ = text.partition("Traceback (most recent call last)")
    if traceback_begins:  # another rank's error, under a heading such as "rank 1 of 4 raised ..."
        return heading.strip() or text.splitlines()[-1].strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def not_attempted(error: BaseException) -> bool:
    """Whether the error is the `raise NotImplementedError` that an unsolved body starts with, here or on a rank."""
    line = learner_line(error)
    if line is None or not line.source:  # no line to look at: only the name of the error is left
        return re.search(r"^NotImplementedError$", summary(error).rsplit(": ", 1)[-1]) is not None
    return line.source.startswith("raise NotImplementedError")


def _is_theirs(file: str) -> bool:
    return _MISTAKE.fullmatch(file) is not None or not file.startswith(_NOT_THEIRS)
