"""One statement: what is claimed, what runs to decide it, and when the verdict flips."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from course.kit.receipts import Row, row

VERDICTS = ("true", "false", "depends")
computed = partial(row, kind="computed")  # a row of arithmetic: nothing ran but a formula


@dataclass(frozen=True)
class Statement:
    """run: rows that decide it, computed or measured here. flips: the condition under which a verdict of true or false
    changes, or under which a statement that depends holds."""

    key: str
    topic: str
    text: str
    verdict: str
    because: str
    flips: str
    source: str
    run: Callable[[], list[Row]]

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"the verdict {self.verdict!r} of {self.key} is none of {', '.join(VERDICTS)}.")

    @property
    def when(self) -> str:
        """What `flips` is the condition of."""
        return "When it holds" if self.verdict == "depends" else "When it flips"

    @property
    def decision(self) -> str:
        """The verdict as a clause."""
        return "it depends" if self.verdict == "depends" else f"it is {self.verdict}"


def at(source: str, place: str) -> str:
    """A source (name: link) with the section or table in it."""
    name, _, link = source.rpartition(": ")
    return f"{name}, {place}: {link}"


def claim(topic: str, text: str, verdict: str, because: str, flips: str, source: str):
    """Make a statement of the decorated function, which decides it; the function's name is the statement's key."""

    def stated(run: Callable[[], list[Row]]) -> Statement:
        return Statement(run.__name__, topic, text, verdict, because, flips, source, run)

    return stated
