"""An exhibit: a bug that shipped somewhere, planted in minillm, and all that a player can do about it.

    faults        what is planted: one of course/shared/faults, or two that hide each other
    run           (patches, seed) -> a record of one run with them: losses, ledgers, gradients, engine steps
    looks         what is plausible about the record although the fault is in it: rows that all hold
    trace         what gives the fault away: rows of which one is off with the fault, and none without it
    measurements  what a player may order, each for some minutes
    innocents     places and mechanisms that are plausible and wrong, each with the reason; the culprits are the faults'
    wrong_fixes   repairs that people really try, each with the sentence that it draws
    investigation the measurements that an experienced engineer orders, and what each one decides

`run` with the fault must look right and leave the trace; with minillm's own code, or a learner's repair, the trace must
be gone. An exhibit is data: whatever judges or shows it (judge.py, game.py, plant.py) knows nothing about any one bug.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from course.kit.receipts import Row
from course.shared.faults.patches import Edits, Fault, Patch

Patches = Sequence[Patch]
Rows = Callable[[Any], list[Row]]
LEAST_SUSPECTS, LEAST_FIXES = 3, 2  # wrong ones


@dataclass(frozen=True)
class Measurement:
    """name: lower-case words with hyphens; minutes: what it costs; about: what one gets for them.

    show: (record) -> what is printed: a receipt, a table or text. It shows and does not conclude.
    """

    name: str
    minutes: int
    about: str
    show: Callable[[Any], Any]


@dataclass(frozen=True)
class Suspect:
    """A place and a mechanism. innocent_because: the sentence that refuses it; "" for a culprit."""

    place: str
    mechanism: str
    innocent_because: str = ""

    @property
    def is_culprit(self) -> bool:
        return not self.innocent_because

    def __str__(self) -> str:
        return f"{self.place}: {self.mechanism}"


@dataclass(frozen=True)
class WrongFix:
    """code: for each fault, edits of minillm's sound source, or None where the fault stays as it is."""

    label: str
    says: str
    code: tuple[Edits | None, ...]


@dataclass(frozen=True)
class Clue:
    """A step of the model investigation: a measurement, and what it decides."""

    measurement: str
    says: str


@dataclass(frozen=True)
class Exhibit:
    """See the module. symptom: what was reported, without a diagnosis.

    misleading: the measurement that costs time and decides nothing here, and why. lesson: what to take away.
    proof: (patches) -> rows of the oracle, or of the naive loop, which a repair has to pass besides the trace.
    verdict: where nothing is wrong and the right repair leaves the code as it is, why that is so.
    budget: minutes that a player may spend.
    """

    name: str
    title: str
    kind: Literal["training", "serving"]
    symptom: str
    faults: tuple[Fault, ...]
    run: Callable[[Patches, int], Any]
    looks: Rows
    trace: Rows
    measurements: tuple[Measurement, ...]
    innocents: tuple[Suspect, ...]
    wrong_fixes: tuple[WrongFix, ...]
    investigation: tuple[Clue, ...]
    misleading: Clue
    lesson: str
    proof: Callable[[Patches], list[Row]] | None = None
    verdict: str = ""
    budget: int = 60

    def __post_init__(self):
        names = [each.name for each in self.measurements]
        if len(set(names)) < len(names):
            raise ValueError(f"exhibit {self.name} has two measurements of one name: {', '.join(names)}")
        for clue in (*self.investigation, self.misleading):
            if clue.measurement not in names:
                raise ValueError(f"exhibit {self.name} has no measurement {clue.measurement}: {', '.join(names)}")
        for fix in self.wrong_fixes:
            if len(fix.code) != len(self.faults):
                raise ValueError(f"'{fix.label}' of {self.name} repairs {len(fix.code)} of {len(self.faults)} faults")

    @property
    def innocent(self) -> bool:
        return bool(self.verdict)

    @property
    def culprits(self) -> list[Suspect]:
        if self.innocent:
            return [Suspect("nothing", self.verdict)]
        return [Suspect(fault.place, fault.mechanism) for fault in self.faults]

    @property
    def suspects(self) -> list[Suspect]:
        return [*self.culprits, *self.innocents]

    @property
    def threads(self) -> list[str]:
        """Where it shipped, as links."""
        return list(dict.fromkeys(thread for fault in self.faults for thread in fault.threads))

    @property
    def par(self) -> int:
        """Minutes of the model investigation."""
        return sum(self.measurement(clue.measurement).minutes for clue in self.investigation)

    def runs(self, jobs: Sequence[tuple[Patches, int]]) -> list[Any]:
        """A record for each (patches, seed), faster than one after the other where `run` can do many at once."""
        many = getattr(self.run, "many", None)
        return many(jobs) if many else [self.run(*job) for job in jobs]

    def measurement(self, name: str) -> Measurement:
        """ValueError for a measurement that cannot be ordered here."""
        for each in self.measurements:
            if each.name == name:
                return each
        raise ValueError(f"{name!r} cannot be ordered: choose from {', '.join(m.name for m in self.measurements)}")

    def repaired(self, code: Sequence[Callable | Edits | None]) -> list[Patch]:
        """The faults with other code in their places; None leaves the fault."""
        if len(code) != len(self.faults):
            raise ValueError(f"{self.name} has {len(self.faults)} places to repair; {len(code)} were given")
        return [fault if new is None else fault.with_code(new) for fault, new in zip(self.faults, code, strict=True)]
