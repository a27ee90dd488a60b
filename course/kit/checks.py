"""`check`, `hint` and `finish`: what a learner calls in a notebook.

    reduce_scatter = check("ring-reduce-scatter", reduce_scatter)

runs the learner's function for real and shows the receipt. If it passes, the learner's function comes back; if not, the
message says what is wrong, and the course's own version comes back, labelled, so that every later cell still runs.
Hints are opened by `hint` or by the card's button, never by a failure. With MINILLM_STRICT=1 a check that does not pass
raises CheckFailed instead.
"""

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from course.kit import course, progress
from course.kit.answers import checked_by
from course.kit.blame import learner_line, not_attempted, summary
from course.kit.card import Card, show_card
from course.kit.evidence import alike
from course.kit.exercises import CheckFailed, Exercise, all_exercises, answers, find
from course.kit.receipts import OPEN_ROWS, Receipt, Row, format_value, receipt
from course.kit.untouched import watched

PASSED_ROWS = 1  # of a passed exercise's receipt that are not folded, unless its verifier says `open_rows`


@dataclass(frozen=True)
class Outcome:
    """How one candidate fared; `message` is empty when it passed. evidence: see CheckFailed."""

    status: progress.Status
    message: str = ""
    receipt: Receipt | None = None
    evidence: Any = None


def check(name: str, candidate: Any) -> Any:
    """Verify the learner's `candidate` for exercise `name`; returns it if it passed, else the course's own version."""
    exercise = find(name)
    seed = random.SystemRandom().randrange(2**32)
    outcome = verify(exercise, candidate, seed) if not is_ours(exercise, candidate) else Outcome("not attempted", OURS)
    progress.record(name, exercise.lab, outcome.status)
    if outcome.status == "passed":
        show_card(Card(f"{name}: passed", _place(exercise), outcome.receipt, good=True))
        return candidate
    lines = [outcome.message]
    if outcome.status == "failed":
        lines += filter(None, [diagnose(exercise, outcome, seed)])
    if os.environ.get("MINILLM_STRICT") == "1":
        raise CheckFailed(f"{name}: {' '.join(lines)}", outcome.receipt.rows if outcome.receipt else ())
    if outcome.status == "not attempted":
        lines = [*([OURS] if outcome.message == OURS else []), f"About {exercise.minutes} minutes."]
    title = f"{name}: not passed yet" if outcome.status == "failed" else f"{name}: not attempted yet"
    lines.append(f'Stuck? hint("{name}") opens a hint.')
    show_card(Card(title, _place(exercise), outcome.receipt, tuple(lines), NOTE, hint_of=name), on_hint=hint)
    return exercise.reference


OURS = (
    "This is the course's own version, which an earlier check put in place of yours: run the cell that defines yours."
)
NOTE = "Until yours passes, the cells below use the course's own version."


def hint(name: str, level: int | None = None) -> None:
    """Open the next hint of an exercise, or the hint of that level (1 is a nudge, 3 the plan)."""
    exercise, last = find(name), 3
    if level is None:
        opened = progress.load().get(name, progress.Entry(exercise.lab)).hints
        level = min(opened + 1, last)
    if level not in range(1, last + 1):
        raise ValueError(f"level={level} of hint('{name}') must be from 1 to {last}")
    progress.record_hint(name, exercise.lab, level)
    what_next = f'hint("{name}") opens the next one.'
    if level == last:
        what_next = f"That was the last hint; solutions/{exercise.lab}.ipynb has a full answer."
    show_card(Card(name, "", None, (f"Hint {level} of {last}: {exercise.hint(level)}", what_next)))


def finish(lab: str) -> None:
    """The last cell of a lab (NN_topic): which exercises are passed, tried or open, and what to do next."""
    exercises = _in_order(lab)
    if not exercises:
        raise ValueError(f"lab '{lab}' has no exercise; name it as its folder does, such as 01_collectives")
    entries = progress.load()
    groups: dict[str, list[str]] = {"passed": [], "tried, not passed yet": [], "open": []}
    for exercise in exercises:
        entry = entries.get(exercise.name, progress.Entry(lab))
        state = "passed" if entry.passed else "tried, not passed yet" if entry.attempts else "open"
        groups[state].append(exercise.name)
    lines = [f"{state}: {', '.join(names)}" for state, names in groups.items() if names]
    left = [exercise for exercise in exercises if exercise.name not in groups["passed"]]
    lines.append(_what_next(lab, left))
    title = f"Lab {lab[:2]}: {len(groups['passed'])} of {len(exercises)} exercises passed"
    show_card(Card(title, "", None, tuple(lines), good=not left))


def verify(exercise: Exercise, candidate: Any, seed: int | None = None) -> Outcome:
    """Run the verifier on a candidate and say how it went. Shows and records nothing; the same seed draws the same."""
    if candidate is None or candidate is ...:
        return Outcome("not attempted", "not attempted yet")
    try:
        with _seeded(random.SystemRandom().randrange(2**32) if seed is None else seed):
            found = exercise.verify(watched(candidate, exercise.reference, exercise.changes, CheckFailed))
    except CheckFailed as failure:
        shown = receipt("", failure.rows) if failure.rows else None
        return Outcome("failed", str(failure), shown, failure.evidence)
    except Exception as error:
        if not_attempted(error):
            return Outcome("not attempted", "not attempted yet")
        return Outcome("failed", _explain(error), None, error)
    result = _as_receipt(exercise, found)
    return Outcome("passed", "", result) if result.ok else Outcome("failed", _say_off(result), result)


def diagnose(exercise: Exercise, outcome: Outcome, seed: int) -> str:
    """The sentence of the first known mistake that fails on the same inputs in the same way; "" if none does.

    An answer that raised an exception has its own line to look at and is not compared.
    """
    if isinstance(outcome.evidence, Exception):
        return ""
    for answer in answers(exercise.name):
        if answer.says:
            known = verify(exercise, answer.candidate, seed)
            if known.status == "failed" and alike(known, outcome):
                return answer.says
    return ""


def _in_order(lab: str) -> list[Exercise]:
    """The exercises of a lab in the order of its notebook."""
    order = checked_by(lab)
    return sorted(all_exercises(lab), key=lambda each: order.index(each.name) if each.name in order else len(order))


def _what_next(lab: str, left: list[Exercise]) -> str:
    """The first exercise of this lab that is not passed, else the next lab."""
    if left:
        minutes = sum(exercise.minutes for exercise in left)
        return f'Next: check("{left[0].name}", ...) in this notebook. About {minutes} minutes are left.'
    later = [name for name in course.masters(course.home()) if name > lab]
    return (
        f"Next: {later[0]}.ipynb, in the same folder." if later else "Next: python -m minillm progress, in a terminal."
    )


def is_ours(exercise: Exercise, candidate: Any) -> bool:
    """Whether the candidate is what a check returned in place of the learner's, and not something they wrote."""
    ours = exercise.reference
    if isinstance(ours, tuple) and isinstance(candidate, tuple) and len(ours) == len(candidate):
        return all(one is other for one, other in zip(ours, candidate, strict=True))
    return candidate is ours


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Python's and torch's default generators at `seed` inside the block; afterwards they go on where they were."""
    torch = sys.modules.get("torch")
    states = random.getstate(), torch.get_rng_state() if torch else None
    random.seed(seed)
    if torch:
        torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        if torch:
            torch.set_rng_state(states[1])


def _place(exercise: Exercise) -> str:
    """How far the lab is, as in "3 of 7"."""
    names = {other.name for other in all_exercises(exercise.lab)} | {exercise.name}
    passed = sum(entry.passed for name, entry in progress.load().items() if name in names)
    return f"{passed} of {len(names)} in lab {exercise.lab[:2]}"


def _explain(error: Exception) -> str:
    said = summary(error).partition("raised CheckFailed: ")[2]  # by the check itself, on another rank
    if said:
        return said
    line = learner_line(error)
    where = f"\nYour {line}" if line else "\n(raised where the check used what your code returned)"
    return f"it stopped with {summary(error)}{where}"


def _say_off(result: Receipt) -> str:
    return "; ".join(_say_row(row) for row in result.rows if row.verdict == "off")


def _say_row(row: Row) -> str:
    measured, predicted = format_value(row.measured, row.unit), format_value(row.predicted, row.unit)
    if measured == predicted:  # too close to tell apart when rounded
        measured, predicted = repr(row.measured), repr(row.predicted)
    return f"{row.name}: measured {measured}, predicted {predicted}"


def _as_receipt(exercise: Exercise, found: Any) -> Receipt:
    if isinstance(found, Receipt):
        result = found
    elif isinstance(found, (list, tuple)) and all(isinstance(row, Row) for row in found):
        result = receipt("", found)
    else:
        raise TypeError(f"the verifier of '{exercise.name}' must return a Receipt or a list of rows, not {found!r}")
    if all(row.verdict == "info" for row in result.rows):
        raise TypeError(f"the verifier of '{exercise.name}' compared nothing; a check that cannot fail is no check")
    chosen = PASSED_ROWS if result.open_rows == OPEN_ROWS else result.open_rows
    return replace(result, open_rows=chosen) if result.ok else result
