"""What the learner has done so far: one small JSON file in their data folder, written after every check.

    $MINILLM_PROGRESS, or $XDG_DATA_HOME/minillm/progress.json, or ~/.local/share/minillm/progress.json

It has a section per purpose: "exercises", read and written by `load` and `record`, and what others keep with `section`
and `keep`, such as the cards of the mock interview.

Nothing here may stop a lab: an unwritable folder costs one warning (progress then lasts as long as the process), a file
that is no longer JSON is put aside as progress.json.bak.
"""

import json
import os
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Literal

from minillm.files import write_whole

Status = Literal["passed", "failed", "not attempted"]


@dataclass(frozen=True)
class Entry:
    """One exercise's record: `last` is the outcome of the latest check, `passed` stays True once earned."""

    lab: str
    passed: bool = False
    last: Status | None = None
    attempts: int = 0
    hints: int = 0


_unsaved: dict[Path, dict[str, Any]] = {}


def path() -> Path:
    """Where progress is kept."""
    if explicit := os.environ.get("MINILLM_PROGRESS"):
        return Path(explicit).expanduser()
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data).expanduser() / "minillm" / "progress.json"


def load() -> dict[str, Entry]:
    """Entries by exercise name; empty where nothing has been recorded."""
    try:
        return {name: Entry(**entry) for name, entry in section("exercises").items()}
    except TypeError:
        _put_aside(path())
    return {}


def section(name: str) -> dict[str, Any]:
    """What was kept under a name; empty where nothing was."""
    found = _document().get(name, {})
    if isinstance(found, dict):
        return found
    _put_aside(path())
    return {}


def keep(name: str, value: dict[str, Any]) -> None:
    """Write one section; the others stay."""
    file, document = path(), {"version": 1} | _document() | {name: value}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(document, indent=1) + "\n")
        _unsaved.pop(file, None)
    except OSError as error:
        _unsaved[file] = document
        _warn_once(f"progress cannot be saved in {file} ({error.strerror}); set MINILLM_PROGRESS to a writable file")


def record(name: str, lab: str, status: Status) -> Entry:
    """Count an attempt; a failed one also unlocks the next hint."""
    entry = load().get(name, Entry(lab))
    tried = status != "not attempted"
    return _store(
        name, replace(entry, last=status, passed=entry.passed or status == "passed", attempts=entry.attempts + tried)
    )


def record_hint(name: str, lab: str, level: int) -> Entry:
    """Remember the deepest hint shown (levels count from 1)."""
    entry = load().get(name, Entry(lab))
    return _store(name, replace(entry, hints=max(entry.hints, level)))


def reset() -> Path | None:
    """Forget everything; returns the copy that stays beside the file, None where nothing had been kept."""
    file = path()
    _unsaved.pop(file, None)
    copies = (file.with_name(f"{file.stem}-{number}{file.suffix}") for number in count(1))
    copy = next(each for each in copies if not os.path.lexists(each))
    try:
        return file.rename(copy)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ValueError(f"progress in {file} cannot be moved ({error.strerror}); move the file by hand") from error


def table(rows: Iterable[dict]) -> str:
    """Text table of `summary` rows."""
    cells = [("lab", "passed", "attempts", "hints used", "minutes")]
    for row in rows:
        passed, minutes = f"{row['passed']} of {row['exercises']}", f"{row['minutes']} of {row['minutes_planned']}"
        cells.append((row["lab"], passed, str(row["attempts"]), str(row["hints"]), minutes))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "   ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in cells
    )


def summary(exercises: Iterable) -> list[dict]:
    """One row per lab; `minutes` are the planned minutes of the exercises passed."""
    entries, rows = load(), {}
    for exercise in exercises:
        entry = entries.get(exercise.name, Entry(exercise.lab))
        counts = ("exercises", "passed", "attempts", "hints", "minutes", "minutes_planned")
        row = rows.setdefault(exercise.lab, {"lab": exercise.lab, **dict.fromkeys(counts, 0)})
        row["exercises"] += 1
        row["passed"] += entry.passed
        row["attempts"] += entry.attempts
        row["hints"] += entry.hints
        row["minutes"] += exercise.minutes * entry.passed
        row["minutes_planned"] += exercise.minutes
    return list(rows.values())


def _store(name: str, entry: Entry) -> Entry:
    keep("exercises", {key: asdict(value) for key, value in (load() | {name: entry}).items()})
    return entry


def _document() -> dict[str, Any]:
    """The whole file; what could not be saved is remembered as long as the process lives."""
    file = path()
    if file in _unsaved:
        return dict(_unsaved[file])
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
        _put_aside(file)
    except FileNotFoundError:
        pass
    except OSError as error:
        _warn_once(f"progress cannot be read from {file} ({error.strerror}); set MINILLM_PROGRESS to another file")
    except ValueError:
        _put_aside(file)
    return {}


def _put_aside(file: Path) -> None:
    try:
        file.replace(file.with_name(file.name + ".bak"))
        _warn_once(f"{file} was not readable as progress; it is kept as {file.name}.bak and counting starts anew")
    except OSError:
        _warn_once(f"{file} is not readable as progress; set MINILLM_PROGRESS to another file")


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)
