"""The whiteboard problems of the design labs: decisions by name, and what is said after them."""

from dataclasses import dataclass
from types import ModuleType

from course.shared.decisions import Decision, Problem, decide
from minillm.labkit.card import Card


@dataclass(frozen=True)
class Case:
    """decisions: in the order in which the notebook asks. problem: the answer that follows them."""

    decisions: dict[str, Decision]
    problem: Problem


class Cases:
    """All problems of a lab: its modules' functions without arguments, each of which makes a `Case`."""

    def __init__(self, *modules: ModuleType):
        self.modules = modules

    def __getitem__(self, name: str) -> Case:
        for module in self.modules:
            if hasattr(module, name):
                return getattr(module, name)()
        raise KeyError(name)

    def decide(self, problem: str, name: str, guess: object) -> Card:
        """What is said about the reader's number."""
        return decide(self[problem].decisions[name], guess)

    def answer(self, problem: str) -> Problem:
        """The worked answer, with follow-ups and a weak one."""
        return self[problem].problem
