"""The registry of exercises: what to verify, what to fall back on, which wrong answers must be caught.

    course/lab01_collectives/checks.py     @exercise(...) on each verifier of lab 01
    course/lab01_collectives/mistakes.py   @mutant(...) and @alternative(...): known answers

A verifier takes the learner's object (nearly always a function), uses it for real and returns a Receipt or a list of
rows; it raises CheckFailed("what is wrong, in the learner's words") or returns a row that is off. Modules are imported
when an exercise of theirs is first asked for.
"""

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from minillm.labkit import course
from minillm.labkit.receipts import Receipt, Row

Verifier = Callable[[Any], Receipt | Iterable[Row]]


class CheckFailed(Exception):
    """What is wrong with an answer, said to the learner; `rows` are the evidence gathered so far."""

    def __init__(self, message: str, rows: Iterable[Row] = ()):
        super().__init__(message)
        self.rows = tuple(rows)


@dataclass(frozen=True)
class Exercise:
    """One exercise; `reference` is the course's own answer, `difficulty` runs from 1 to 5."""

    name: str
    lab: str
    verify: Verifier
    reference: Any
    hints: tuple[str, ...]
    minutes: int
    difficulty: int

    def __post_init__(self):
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.name):
            raise ValueError(f"exercise name '{self.name}' must be lower-case words joined by hyphens")
        if not re.fullmatch(r"\d\d_\w+", self.lab):
            raise ValueError(f"lab='{self.lab}' of exercise '{self.name}' must read NN_topic, such as 01_collectives")
        if len(self.hints) != 3:
            raise ValueError(
                f"exercise '{self.name}' has {len(self.hints)} hints; give three, from a nudge to the plan"
            )
        if self.minutes < 1 or not 1 <= self.difficulty <= 5:
            raise ValueError(f"exercise '{self.name}' needs minutes of 1 or more and a difficulty from 1 to 5")


@dataclass(frozen=True)
class Answer:
    """A known answer: wrong (`expect`: a pattern the check's message must contain) or right (`expect` None)."""

    exercise: str
    label: str
    candidate: Any
    expect: str | None


_exercises: dict[str, Exercise] = {}
_answers: dict[tuple[str, str], Answer] = {}


def exercise(
    name: str, *, reference: Any, hints: Iterable[str], minutes: int, lab: str, difficulty: int = 2
) -> Callable[[Verifier], Verifier]:
    """Register the decorated verifier as exercise `name` of `lab`."""

    def register(verify: Verifier) -> Verifier:
        known = _exercises.get(name)
        if known and known.verify.__module__ != verify.__module__:
            raise ValueError(
                f"exercise '{name}' is already registered in {known.verify.__module__}; choose another name"
            )
        _exercises[name] = Exercise(name, lab, verify, reference, tuple(hints), minutes, difficulty)
        return verify

    return register


def mutant(exercise: str, label: str, *, expect: str) -> Callable[[Any], Any]:
    """Register a wrong answer learners really write; the check must reject it with a message matching `expect`.

    expect: a regular expression, searched without regard to case.
    """
    if not expect:
        raise ValueError(f"mutant '{label}' of '{exercise}' needs expect=, a pattern that the check's message contains")
    return _answer(exercise, label, expect)


def alternative(exercise: str, label: str) -> Callable[[Any], Any]:
    """Register another correct answer; the check must accept it."""
    return _answer(exercise, label, None)


def find(name: str) -> Exercise:
    """The exercise called `name`, importing lab modules until it turns up (first those whose text names it)."""
    for module in sorted(course.modules("checks"), key=lambda module: not _mentions(module, name)):
        if name in _exercises:
            break
        import_module(module)
    if name not in _exercises:
        close = difflib.get_close_matches(name, _exercises, n=3, cutoff=0.4)
        raise ValueError(f"no exercise is called '{name}'; {_suggest(close or sorted(_exercises))}")
    return _exercises[name]


def all_exercises() -> list[Exercise]:
    """Every exercise of the course, by lab and in the order of its module."""
    for module in course.modules("checks"):
        import_module(module)
    return sorted(_exercises.values(), key=lambda exercise: exercise.lab)


def answers(name: str | None = None) -> list[Answer]:
    """Mutants (`expect` set) and alternatives (`expect` None), of one exercise or of all."""
    for module in course.modules("mistakes"):
        import_module(module)
    return [answer for answer in _answers.values() if name in (None, answer.exercise)]


def _answer(exercise: str, label: str, expect: str | None) -> Callable[[Any], Any]:
    def register(candidate: Any) -> Any:
        known = _answers.get((exercise, label))
        if known and getattr(known.candidate, "__module__", None) != getattr(candidate, "__module__", None):
            raise ValueError(f"'{exercise}' has two answers labelled '{label}'; give each its own label")
        _answers[exercise, label] = Answer(exercise, label, candidate, expect)
        return candidate

    return register


def _mentions(module: str, name: str) -> bool:
    path = Path(__file__).parents[2].joinpath(*module.split(".")).with_suffix(".py")
    return path.exists() and re.search(rf"""["']{re.escape(name)}["']""", path.read_text(encoding="utf-8")) is not None


def _suggest(names: list[str]) -> str:
    return "did you mean " + " or ".join(f"'{name}'" for name in names[:3]) + "?" if names else "none is registered"
