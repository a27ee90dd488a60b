"""The whiteboard problems of the design labs: decisions by name, and the walkthrough that follows them.

A lab's modules compute (functions without arguments, each of which makes a `DesignCase`); its answers.toml says in
words what a strong candidate does with the numbers, under the name of the same function.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from course.kit.card import Card
from course.shared.decisions import Decision, Problem, decide


@dataclass(frozen=True)
class DesignCase:
    """decisions: in the order in which the notebook asks. numbers: what the walkthrough's {names} are filled with."""

    decisions: dict[str, Decision]
    numbers: dict[str, str]


class Cases:
    """All problems of a lab. texts: its answers.toml."""

    def __init__(self, texts: Path, *modules: ModuleType):
        self._texts = tomllib.loads(texts.read_text(encoding="utf-8"))
        self._modules = modules

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def decisions(self, problem: str) -> dict[str, Decision]:
        """Each with the reasons behind its bounds."""
        bounds = self._texts[problem]["bounds"]
        return {
            name: replace(decision, below=bounds[name][0], above=bounds[name][1])
            for name, decision in self._case(problem).decisions.items()
        }

    def decide(self, problem: str, name: str, guess: object) -> Card:
        """What is said about the reader's number."""
        return decide(self.decisions(problem)[name], guess)

    def answer(self, problem: str) -> Problem:
        """The walkthrough, with follow-ups and a weak answer."""
        words = {key: text for key, text in self._texts[problem].items() if key != "bounds"}
        return Problem(numbers=self._case(problem).numbers, **words)

    def _case(self, problem: str) -> DesignCase:
        return next(getattr(module, problem) for module in self._modules if hasattr(module, problem))()
