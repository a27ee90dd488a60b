"""The table (survivors.txt) of what passes although it is not the answer, and of right answers that may be refused.

One line each, four fields with tabs between them: exercise, verdict, edit, reason.

    equivalent    the mutant or cheat is right: no input tells it from the answer
    allowed       it differs where neither docstring nor text asks for anything
    forbidden     the variant is not what the docstring asks for, so the check may refuse it
"""

from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("survivors.txt")
VERDICTS = ("equivalent", "allowed", "forbidden")


@dataclass(frozen=True)
class Entry:
    """One line of the table."""

    exercise: str
    verdict: str
    edit: str
    reason: str

    @property
    def key(self) -> tuple[str, str]:
        return self.exercise, self.edit


def read(path: Path = TABLE) -> dict[tuple[str, str], Entry]:
    """The entries by (exercise, edit). ValueError for a line that is no entry, or the second of its kind."""
    entries: dict[tuple[str, str], Entry] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line or line.startswith("#"):
            continue
        fields = line.split("\t")
        if len(fields) != 4 or fields[1] not in VERDICTS or not fields[3].strip():
            raise ValueError(
                f"line {number} of {path.name} must be exercise, {'|'.join(VERDICTS)}, edit, reason: {line}"
            )
        entry = Entry(*fields)
        if entry.key in entries:
            raise ValueError(f"line {number} of {path.name} repeats '{entry.edit}' of '{entry.exercise}'")
        entries[entry.key] = entry
    return entries


def excused(entries: dict[tuple[str, str], Entry], kind: str, key: tuple[str, str]) -> bool:
    """Whether the table gives a reason for what the check does with this candidate."""
    entry = entries.get(key)
    return entry is not None and (entry.verdict == "forbidden") == (kind == "variant")
