"""How long a lab takes: the exercises that it checks, and the heading over each, which says its minutes.

A heading reads `## 2 Build it: rings (12 minutes)`, with `skip on a first reading` in the parentheses, or in the
heading of the section, for an exercise that is not on the core path.
"""

import re
from dataclasses import dataclass

from nbformat import NotebookNode

from course.kit import exercises, masters

SKIP = "skip on a first reading"
_SECTION = re.compile(r"^## .*", re.MULTILINE)
_HEADING = re.compile(r"^#+ .*\(([^()]*?)(\d+) minutes([^()]*)\)$", re.MULTILINE)


@dataclass(frozen=True)
class TimedExercise:
    """minutes: of the exercise's check. heading_minutes: of the heading over it; None for a check without its own.
    on_core_path: whether neither that heading nor its section's says to skip it on a first reading."""

    name: str
    minutes: int
    heading_minutes: int | None
    on_core_path: bool


def timed_exercises(lab: NotebookNode) -> list[TimedExercise]:
    """Every exercise of a lab in order of its checks. A heading belongs to the first check below it."""
    timed, heading, section = [], None, ""
    for cell in lab.cells:
        if cell.cell_type == "markdown":
            heading = (_HEADING.findall(cell.source) or [heading])[-1]
            section = (_SECTION.findall(cell.source) or [section])[-1]
        for name in masters.checked(cell):
            before, said, after = heading or ("", None, "")
            on_core_path = SKIP not in section + before + after
            minutes = exercises.find(name).minutes
            timed.append(TimedExercise(name, minutes, None if said is None else int(said), on_core_path))
            heading = None
    return timed


def core_minutes(lab: NotebookNode) -> tuple[int, int]:
    """(minutes of the exercises on the core path, minutes of those to skip on a first reading)."""
    timed = timed_exercises(lab)
    return (
        sum(each.minutes for each in timed if each.on_core_path),
        sum(each.minutes for each in timed if not each.on_core_path),
    )


def lab_title(lab: NotebookNode) -> str:
    """The title of a lab, which is the first line of its first cell."""
    return lab.cells[0].source.splitlines()[0].removeprefix("# ")
