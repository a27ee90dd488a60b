"""`check` and `hint`: what a learner calls in a notebook.

    reduce_scatter = check("ring-reduce-scatter", reduce_scatter)

runs the learner's function for real and shows the receipt. If it passes, the learner's function comes back; if not, the
message says what is wrong, the next hint opens, and the course's own version comes back, labelled, so that every later
cell still runs. With MINILLM_STRICT=1 a check that does not pass raises CheckFailed instead.
"""

import os
import sys
from dataclasses import dataclass
from html import escape
from typing import Any

from minillm.labkit import progress
from minillm.labkit.blame import learner_line, not_attempted, summary
from minillm.labkit.exercises import CheckFailed, Exercise, find
from minillm.labkit.receipts import Receipt, Row, format_value, receipt


@dataclass(frozen=True)
class Outcome:
    """How one candidate fared; `message` is empty when it passed."""

    status: progress.Status
    message: str = ""
    receipt: Receipt | None = None


def check(name: str, candidate: Any) -> Any:
    """Verify the learner's `candidate` for exercise `name`; returns it if it passed, else the course's own version."""
    exercise = find(name)
    outcome = verify(exercise, candidate)
    entry = progress.record(name, exercise.lab, outcome.status)
    if outcome.status == "passed":
        _show(_Card(f"{name}: passed", outcome.receipt))
        return candidate
    if os.environ.get("MINILLM_STRICT") == "1":
        raise CheckFailed(f"{name}: {outcome.message}", outcome.receipt.rows if outcome.receipt else ())
    if outcome.status == "failed":
        level = progress.record_hint(name, exercise.lab, min(entry.hints + 1, len(exercise.hints))).hints
        advice = [_hint_line(exercise, level), _whats_next(exercise, level)]
    else:
        advice = [f'About {exercise.minutes} minutes. Stuck? hint("{name}") opens a first hint.']
    note = "The course's own version is used from here on. Fix yours and run this cell again to use it instead."
    title = f"{name}: not passed yet" if outcome.status == "failed" else f"{name}: not attempted yet"
    _show(_Card(title, outcome.receipt, [outcome.message, *advice] if outcome.status == "failed" else advice, note))
    return exercise.reference


def hint(name: str, level: int | None = None) -> None:
    """Open the next hint of an exercise, or the hint of that level (1 is a nudge, 3 the plan)."""
    exercise = find(name)
    last = len(exercise.hints)
    if level is None:
        opened = progress.load().get(name, progress.Entry(exercise.lab)).hints
        level = min(opened + 1, last)
    if level not in range(1, last + 1):
        raise ValueError(f"level={level} of hint('{name}') must be from 1 to {last}")
    progress.record_hint(name, exercise.lab, level)
    _show(_Card(name, None, [_hint_line(exercise, level), _whats_next(exercise, level)]))


def verify(exercise: Exercise, candidate: Any) -> Outcome:
    """Run the verifier on a candidate and say how it went. Shows and records nothing."""
    if candidate is None or candidate is ...:
        return Outcome("not attempted", "not attempted yet")
    try:
        found = exercise.verify(candidate)
    except CheckFailed as failure:
        return Outcome("failed", str(failure), receipt("", failure.rows) if failure.rows else None)
    except Exception as error:
        if not_attempted(error):
            return Outcome("not attempted", "not attempted yet")
        return Outcome("failed", _explain(error))
    result = _as_receipt(exercise, found)
    return Outcome("passed", "", result) if result.ok else Outcome("failed", _say_off(result), result)


def _explain(error: Exception) -> str:
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
    return result


def _hint_line(exercise: Exercise, level: int) -> str:
    return f"Hint {level} of {len(exercise.hints)}: {exercise.hints[level - 1]}"


def _whats_next(exercise: Exercise, level: int) -> str:
    if level < len(exercise.hints):
        return f'hint("{exercise.name}") opens the next one.'
    return f"That was the last hint; solutions/{exercise.lab}.ipynb has a full answer."


@dataclass(frozen=True, repr=False)
class _Card:
    """A title, what to say about it, and the receipt."""

    title: str
    receipt: Receipt | None
    lines: tuple[str, ...] | list[str] = ()
    note: str = ""

    def __repr__(self) -> str:
        indented = ["  " + part for line in [*self.lines, self.note] if line for part in line.splitlines()]
        return "\n".join([self.title, *([str(self.receipt)] if self.receipt else []), *indented])

    def _repr_html_(self) -> str:
        passed = self.title.endswith(": passed")
        colour = "#009E73" if passed else "#E69F00"
        lines = "".join(map(_html_line, self.lines))
        note = f'<div style="margin-top:6px"><i>{escape(self.note)}</i></div>' if self.note else ""
        table = self.receipt._repr_html_() if self.receipt else ""
        return (
            f'<div style="border-left:4px solid {colour};padding:4px 12px;color:inherit">'
            f"<b>{'✓ ' if passed else ''}{escape(self.title)}</b>{table}{lines}{note}</div>"
        )


def _html_line(line: str) -> str:
    """A sentence, or a block of several lines (a table, a line of code) that keeps its columns."""
    if "\n" in line:
        return f'<pre style="margin:3px 0;color:inherit;background:none">{escape(line)}</pre>'
    return f'<div style="margin:3px 0">{escape(line)}</div>'


def _show(card: _Card) -> None:
    """Rich in a notebook, text anywhere else."""
    if "IPython" in sys.modules and getattr(sys.modules["IPython"].get_ipython(), "kernel", None) is not None:
        from IPython.display import display

        display(card)
    else:
        print(card)
