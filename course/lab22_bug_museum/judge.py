"""Whether a repair is one: the trace that gave the bug away is gone, in runs that the learner has not seen."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from course.kit import untouched
from course.kit.exercises import CheckFailed
from course.kit.receipts import Row, format_value
from course.lab22_bug_museum.exhibit import Exhibit
from course.shared.faults.patches import Edits, Patch


def verify(exhibit: Exhibit, code: Callable | Sequence[Callable | Edits | None]) -> list[Row]:
    """The rows of the repaired run, all of which hold. CheckFailed names the first that does not.

    code: what is to stand in the place of each fault; a single function where there is one fault.
    """
    given = (code,) if callable(code) else tuple(code)
    if len(given) != len(exhibit.faults):
        raise CheckFailed(f"{exhibit.title} has {len(exhibit.faults)} places to repair: give as many functions.")
    patches = exhibit.repaired([bare(each) for each in given])
    return judged(exhibit, patches, exhibit.run(patches, random.randrange(2**31)))


def judged(exhibit: Exhibit, patches: Sequence[Patch], record: Any) -> list[Row]:
    """`verify` for a run that has been made."""
    rows, details = exhibit.trace(record), list(getattr(record, "details", ()))
    _refuse_off(rows, rows, details)
    if exhibit.proof:
        more = exhibit.proof(patches)
        _refuse_off(more, [*rows, *more], details)
        rows = [*rows, *more]
    return rows


def bare(each: Any) -> Any:
    """A learner's function without the watch that the kit puts around it; decorators of their own stay."""
    is_watch = getattr(each, "__globals__", None) is vars(untouched)
    return each.__wrapped__ if is_watch else each


def _refuse_off(rows: Sequence[Row], shown: Sequence[Row], details: list[Any]) -> None:
    """details: numbers that tell repairs apart whose rows fail alike."""
    off = [row for row in rows if row.verdict == "off"]
    if off:
        said = "; ".join(map(_said, off))
        raise CheckFailed(
            f"The trace is still there: {said}.", shown, evidence=[*(row.measured for row in rows), *details]
        )


def _said(row: Row) -> str:
    measured, predicted = (format_value(value, row.unit) for value in (row.measured, row.predicted))
    return f"{row.name} is {measured} and should be {predicted}"
