"""The registry of exercises: what to verify, which hints to give, which known answers a check must tell apart.

    course/lab01_collectives/checks.py     @exercise(...) on each verifier of lab 01
    course/lab01_collectives/mistakes.py   KnownAnswers(...): mistakes and alternatives

A verifier takes the learner's object (nearly always a function), uses it for real and returns a Receipt or a list of
rows; it raises CheckFailed("what is wrong, in the learner's words") or returns a row that is off. What it draws, it
draws from Python's or torch's default generator: `checks.verify` seeds them, so that a mistake can be tried on the
very inputs on which a learner's answer failed. The right answer is the solution in the lab's master (answers.py).
Modules are imported when an exercise of theirs is first asked for.
"""

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

from course.kit import course
from course.kit.answers import answer_text, answer_to, changed_answer
from course.kit.receipts import Receipt, Row

Verifier = Callable[[Any], Receipt | Iterable[Row]]


class CheckFailed(Exception):
    """What is wrong with an answer, said to the learner.

    rows: what was compared so far, for the receipt. evidence: what the answer gave instead of the right thing (a
    number, a tensor, a list); a mistake that gives the same on the same inputs lends its sentence. Without it the
    message itself is the evidence.
    """

    def __init__(self, message: str, rows: Iterable[Row] = (), *, evidence: Any = None):
        super().__init__(message)
        self.rows = tuple(rows)
        self.evidence = evidence


@dataclass(frozen=True)
class Exercise:
    """One exercise; `difficulty` runs from 1 to 5."""

    name: str
    lab: str
    verify: Verifier
    own_reference: Any  # None: the solution in the master
    hints: tuple[str, ...]
    minutes: int
    difficulty: int
    changes: tuple[str, ...] = ()  # parameters of its functions that the answer changes in place; all others stay

    def __post_init__(self):
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.name):
            raise ValueError(f"exercise name '{self.name}' must be lower-case words joined by hyphens")
        if not re.fullmatch(r"\d\d_\w+", self.lab):
            raise ValueError(f"lab='{self.lab}' of exercise '{self.name}' must read NN_topic, such as 01_collectives")
        if len(self.hints) not in (2, 3):
            raise ValueError(
                f"exercise '{self.name}' has {len(self.hints)} hints; give two, a nudge and the idea, and a third only "
                "if it is to be another than the master's answer"
            )
        if self.minutes < 1 or not 1 <= self.difficulty <= 5:
            raise ValueError(f"exercise '{self.name}' needs minutes of 1 or more and a difficulty from 1 to 5")

    @property
    def reference(self) -> Any:
        """The course's own answer: the same object at every look."""
        return self.own_reference if self.own_reference is not None else answer_to(self.name, self.lab)

    def hint(self, level: int) -> str:
        """The hint of a level from 1 to 3; the third is the master's answer where none is written for it."""
        return self.hints[level - 1] if level <= len(self.hints) else answer_text(self.name, self.lab)


@dataclass(frozen=True)
class Edits:
    """The master's answer to an exercise but for some of its text, {old: new}."""

    exercise: str
    texts: dict[str, str]

    @cached_property
    def answer(self) -> Any:
        return changed_answer(self.exercise, find(self.exercise).lab, self.texts)


@dataclass(frozen=True)
class Answer:
    """A known answer: right (neither sentence nor pattern), or wrong.

    says: the sentence that the framework adds when a learner's answer fails exactly as this one. expect: a pattern that
    the check's own message must contain, where the check itself says what is wrong.
    """

    exercise: str
    label: str
    given: Any  # the answer, or Edits of the master's
    says: str = ""
    expect: str = ""

    @property
    def candidate(self) -> Any:
        """What is handed to the check: the same object at every look."""
        return self.given.answer if isinstance(self.given, Edits) else self.given

    @property
    def wrong(self) -> bool:
        return bool(self.says or self.expect)


_exercises: dict[str, Exercise] = {}
_answers: dict[tuple[str, str], Answer] = {}


def exercise(
    name: str,
    *,
    hints: Iterable[str],
    minutes: int,
    difficulty: int = 2,
    lab: str = "",
    reference: Any = None,
    changes: Iterable[str] = (),
) -> Callable[[Verifier], Verifier]:
    """Register the decorated verifier as exercise `name`.

    lab: default, the lab in whose folder the verifier stands. reference: only where the right answer is not the
    solution in the lab's master. changes: parameters that the answer changes in place; a change of any other is
    refused (untouched.py).
    """

    def register(verify: Verifier) -> Verifier:
        known = _exercises.get(name)
        if known and known.verify.__module__ != verify.__module__:
            raise ValueError(
                f"exercise '{name}' is already registered in {known.verify.__module__}; choose another name"
            )
        home = lab or course.lab_of(verify.__module__)
        _exercises[name] = Exercise(name, home, verify, reference, tuple(hints), minutes, difficulty, tuple(changes))
        return verify

    return register


@dataclass(frozen=True)
class KnownAnswers:
    """Registers answers to one exercise that its check must tell apart, wrong ones that people write and right ones.

    edits: {old: new}, where an answer is the master's but for these texts, each of which stands once in the cell that
    checks it. Otherwise decorate the answer, or call what is returned with it. here: False registers nothing (what the
    exercise runs on is not installed).
    """

    exercise: str
    here: bool = True

    def mistake(
        self, label: str, edits: dict[str, str] | None = None, *, says: str = "", expect: str = ""
    ) -> Callable[[Any], Any]:
        """A wrong answer learners really write; the check must reject it.

        says: the sentence that tells what is wrong with it; it is written here and nowhere else. expect: instead of it,
        where the check itself knows: a regular expression for its message, searched without regard to case.
        """
        if bool(says) == bool(expect):
            raise ValueError(
                f"mistake '{label}' of '{self.exercise}' needs says=, the sentence that it draws, or expect=, a "
                "pattern of the check's own message (one of them)"
            )
        return self._add(label, edits, says, expect)

    def alternative(self, label: str, edits: dict[str, str] | None = None) -> Callable[[Any], Any]:
        """Another correct answer; the check must accept it."""
        return self._add(label, edits)

    def _add(self, label: str, edits: dict[str, str] | None, says: str = "", expect: str = "") -> Callable[[Any], Any]:
        def register(candidate: Any) -> Any:
            known = _answers.get((self.exercise, label))
            if known and _origin(known.given) != _origin(candidate):
                raise ValueError(f"'{self.exercise}' has two answers labelled '{label}'; give each its own label")
            if self.here:
                _answers[self.exercise, label] = Answer(self.exercise, label, candidate, says, expect)
            return candidate

        if edits is not None:
            register(Edits(self.exercise, edits))
        return register


def find(name: str) -> Exercise:
    """The exercise called `name`, importing lab modules until it turns up (first those whose text names it)."""
    if name in _exercises:
        return _exercises[name]
    for module in sorted(_modules("checks"), key=lambda module: not _mentions(module, name)):
        import_module(module)
        if name in _exercises:
            break
    else:
        close = difflib.get_close_matches(name, _exercises, n=3, cutoff=0.4)
        raise ValueError(f"no exercise is called '{name}'; {_suggest(close or sorted(_exercises))}")
    return _exercises[name]


def all_exercises(lab: str = "") -> list[Exercise]:
    """Every exercise of the course or of one lab, by lab and in the order of its module."""
    for module in _modules("checks", lab):
        import_module(module)
    return sorted((e for e in _exercises.values() if lab in ("", e.lab)), key=lambda exercise: exercise.lab)


def answers(name: str = "") -> list[Answer]:
    """Mistakes and alternatives, of one exercise or of all."""
    for module in _modules("mistakes", find(name).lab if name else ""):
        import_module(module)
    return [answer for answer in _answers.values() if name in ("", answer.exercise)]


def _origin(given: Any) -> Any:
    return given if isinstance(given, Edits) else getattr(given, "__module__", None)


def _modules(kind: str, lab: str = "") -> list[str]:
    return course.modules(kind, lab)


def _mentions(module: str, name: str) -> bool:
    path = course.home().joinpath(*module.split(".")).with_suffix(".py")
    return path.exists() and re.search(rf"""["']{re.escape(name)}["']""", path.read_text(encoding="utf-8")) is not None


def _suggest(names: list[str]) -> str:
    return "did you mean " + " or ".join(f"'{name}'" for name in names[:3]) + "?" if names else "none is registered"
