"""One statement: what is claimed, what runs to decide it, and when the verdict flips."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from minillm.labkit.receipts import Row, row

VERDICTS = ("true", "false", "depends")
computed = partial(row, kind="computed")  # a row of arithmetic: nothing ran but a formula


@dataclass(frozen=True)
class Statement:
    """run: rows that decide it, computed or measured here. flips: the condition under which the verdict changes."""

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


STATEMENTS: dict[str, Statement] = {}


def claim(topic: str, text: str, verdict: str, because: str, flips: str, source: str):
    """Register the decorated function as what decides a statement; its name is the statement's key."""

    def register(run: Callable[[], list[Row]]) -> Callable[[], list[Row]]:
        key = run.__name__
        STATEMENTS[key] = Statement(key, topic, text, verdict, because, flips, source, run)
        return run

    return register
