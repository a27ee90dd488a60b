"""Debugging: the course's answer to an exercise with one known mistake in it, and the check that it fails.

The mistakes are those which the labs' checks recognise (`course/lab*/mistakes.py`) and which are edits of the right
answer. What was wrong is said by the mistake's own sentence, or in causes.toml where the check itself explains it.
"""

import ast
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from course.kit import exercises, masters
from course.kit.exercises import Answer, Edits
from course.lab24_interview import tasks, wording

MINUTES = 10
_FOUND = "# This program is wrong. Find the mistake and mend it; everything else may stay as it is."


@dataclass(frozen=True)
class Bug:
    """task: its stub is the wrong program. cause: what a strong candidate says."""

    task: tasks.Task
    cause: str


def of_exercise(exercise: str) -> list[str]:
    """EXERCISE/MISTAKE of the bugs of one program."""
    return [f"{exercise}/{answer.label}" for answer in exercises.answers(exercise) if _is_shown(answer)]


def explained(name: str) -> str:
    """The cause, and the places of the program that have it, beside the course's answer."""
    exercise, _, label = name.partition("/")
    answer = next(each for each in exercises.answers(exercise) if each.label == label)
    return wording.with_edits(f"The cause: {bug(name).cause}", answer.given.texts)


def bug(name: str) -> Bug:
    """ValueError for a name that no lab has any more."""
    exercise, _, label = name.partition("/")
    answer = next((each for each in exercises.answers(exercise) if each.label == label and _is_shown(each)), None)
    if answer is None:
        raise ValueError(f"no mistake of {exercise!r} is called {label!r}")
    whole = tasks.task(exercise)
    given, _, _ = whole.stub.partition(tasks.YOURS)
    notebook, _ = tasks.notebooks(exercises.find(exercise).lab)
    code = _wrong_cell(answer)
    body, _ = tasks.before_check(code, exercise)
    first = next(cell.source for cell in notebook.cells if cell.cell_type == "code")
    known = set(given.split("\n"))
    needed = [line for line in tasks.imports_of(first, [body], "") if line not in known]
    heading = wording.as_comment(f"{name.partition('/')[0]}: one mistake\n\n{whole.statement}")
    rest = given.removeprefix(wording.as_comment(f"{exercise}, {whole.minutes} minutes\n\n{whole.statement}")).strip()
    parts = [heading, *needed, rest, f"{_FOUND}\n{body}"]
    stub = "\n\n".join(filter(None, parts)) + "\n"
    return Bug(replace(whole, minutes=MINUTES, stub=stub), _causes().get(exercise, {}).get(label) or answer.says)


@cache
def _causes() -> dict[str, dict[str, str]]:
    """By exercise and mistake."""
    return tomllib.loads((Path(__file__).parent / "causes.toml").read_text(encoding="utf-8"))


def _is_shown(answer: Answer) -> bool:
    """Wrong, and a change of the solution as it is printed."""
    return answer.wrong and isinstance(answer.given, Edits) and bool(_wrong_cell(answer))


@cache
def _solved_cell(exercise: str) -> str:
    _, solved = tasks.notebooks(exercises.find(exercise).lab)
    return next(cell.source for cell in solved.cells if exercise in masters.checked(cell))


def _wrong_cell(answer: Answer) -> str:
    """The solution's cell with the edits; "" where a text of them does not stand there once, or it is no program."""
    code = _solved_cell(answer.exercise)
    for old, new in answer.given.texts.items():
        if code.count(old) != 1:
            return ""
        code = code.replace(old, new)
    try:
        ast.parse(code)
    except SyntaxError:
        return ""
    return code
