"""The game: order measurements, name the culprit, repair the code, and read how an experienced engineer did it.

    case = visit("slow-with-clipping")      # the symptom, what can be ordered, and the suspects
    case.order("gradient-norms")         # costs minutes
    case.accuse("c")                     # costs minutes if it is wrong, and says why it is
    case.code()                          # the suspects' functions as they run in this museum
    case.repair(function)                # or check("slow-with-clipping", function), where the lab has a cell for it
    case.debrief()

The same object is what the notebook shows and what `python -m minillm museum` plays.
"""

import random
from collections.abc import Callable, Sequence
from functools import cached_property
from html import escape
from string import ascii_lowercase
from typing import Any

from course.kit.blame import summary
from course.kit.card import Card
from course.kit.checks import Outcome
from course.kit.evidence import alike
from course.kit.exercises import CheckFailed
from course.kit.receipts import receipt
from course.lab22_bug_museum import judge, museum
from course.lab22_bug_museum.exhibit import Exhibit, Suspect, WrongFix

WRONG_ACCUSATION = 10  # minutes


class Case:
    """One visit of an exhibit. seed: of the run that is measured, otherwise drawn.

    spent: minutes so far; ordered: measurements; named: culprits found; repaired: whether the trace is gone.
    """

    def __init__(self, exhibit: Exhibit, seed: int | None = None):
        self.exhibit = exhibit
        self.seed = random.SystemRandom().randrange(1000) if seed is None else seed
        self.spent = 0
        self.ordered: list[str] = []
        self.named: list[Suspect] = []
        self.repaired = False
        self.gave_up = False
        suspects = list(exhibit.suspects)
        random.Random(exhibit.name).shuffle(suspects)  # the same letters for everybody
        self.suspects = dict(zip(ascii_lowercase, suspects, strict=False))

    @cached_property
    def record(self) -> Any:
        """The run with the fault in it, made when something is first measured."""
        return self.exhibit.run(self.exhibit.faults, self.seed)

    @property
    def left(self) -> int:
        return self.exhibit.budget - self.spent

    @property
    def solved(self) -> bool:
        return len(self.named) == len(self.exhibit.culprits)

    @property
    def score(self) -> int:
        """Of 100: what is left of them after the minutes beyond the model investigation; 0 for who gave up."""
        if self.gave_up or not self.solved:
            return 0
        beyond = max(0, self.spent - self.exhibit.par)
        return max(10, round(100 * (1 - beyond / self.exhibit.budget)))

    def order(self, *names: str) -> "Shown":
        """What the measurements show. ValueError for one that does not exist or that the minutes left do not pay."""
        shown = []
        for name in names:
            measurement = self.exhibit.measurement(name)
            if name not in self.ordered:
                if measurement.minutes > self.left:
                    raise ValueError(
                        f"{name} takes {measurement.minutes} minutes and {self.left} are left: accuse somebody, or "
                        "open the debrief"
                    )
                self.spent += measurement.minutes
                self.ordered.append(name)
            shown.append(measurement.show(self.record))
        return Shown(shown or ["Nothing ordered yet: name a measurement."], self.clock())

    def accuse(self, *letters: str) -> Card:
        """Names culprits by their letters. A wrong one costs minutes and is told why."""
        lines, good = [], bool(letters)
        for letter in letters:
            suspect = self.suspects.get(letter)
            if suspect is None:
                raise ValueError(f"there is no suspect {letter!r}: choose from {', '.join(self.suspects)}")
            if suspect.is_culprit:
                lines.append(f"{letter}: yes. {suspect}.")
                self.named += [suspect] if suspect not in self.named else []
            else:
                good = False
                self.spent += WRONG_ACCUSATION
                lines.append(f"{letter}: no ({WRONG_ACCUSATION} minutes). {suspect.innocent_because}")
        if not letters:
            lines.append("Nobody is accused yet: name a suspect by its letter.")
        elif good and not self.solved:
            lines.append(f"That is {len(self.named)} of {len(self.exhibit.culprits)} culprits.")
        if self.solved and not self.exhibit.innocent:
            lines.append("Now repair it: code() shows what runs.")
        return Card("Accusation", self.clock(), None, tuple(lines), good=good and self.solved)

    def code(self) -> "Source":
        """The functions in which the faults are, as they run in this exhibit. ValueError before they are named."""
        if not self.solved and not self.gave_up:
            raise ValueError("the code opens when the culprits are named, since it says where they are: accuse first")
        return Source([(fault.target, fault.source()) for fault in self.exhibit.faults])

    def repair(self, *code: Callable) -> Card:
        """Whether the functions, one for each fault, remove the trace."""
        return self._judged(code)

    def debrief(self, give_up: bool = False) -> Card:
        """The model investigation, once the culprits are named, or if the case is given up."""
        its = self.exhibit
        if not self.solved and not give_up:
            lines = ("It opens when the culprits are named. debrief(give_up=True) opens it now, for a score of 0.",)
            return Card("Debrief", self.clock(), None, lines)
        self.gave_up = self.gave_up or not self.solved
        lines = [f"The culprit: {suspect}." for suspect in its.culprits]
        lines += [
            f"{number}. {clue.measurement} ({its.measurement(clue.measurement).minutes} minutes). {clue.says}"
            for number, clue in enumerate(its.investigation, start=1)
        ]
        lines += [
            f"What misleads: {its.misleading.measurement}. {its.misleading.says}",
            f"To take away: {its.lesson}",
            f"It shipped: {', '.join(its.threads)}",
            f"Your score: {self.score} of 100, {self.spent} minutes against {its.par}.",
        ]
        return Card(f"Debrief: {its.title}", "", None, tuple(lines), good=self.solved)

    def clock(self) -> str:
        return f"{max(0, self.left)} of {self.exhibit.budget} minutes left"

    def _judged(self, code: Sequence[Callable]) -> Card:
        its = self.exhibit
        if its.innocent and not code:
            self.repaired = True
            return Card("Repair", "", None, ("Nothing to repair, and nothing touched. That is right.",), good=True)
        state = random.getstate()
        random.seed(self.seed)
        try:
            rows = judge.verify(its, code[0] if len(code) == 1 else code)
        except CheckFailed as failure:
            says = sentence(its, failure, self.seed)
            shown = receipt("", failure.rows) if failure.rows else None
            return Card("Repair: not yet", "", shown, tuple(filter(None, [str(failure), says])))
        except Exception as error:  # a learner's code may raise anything, here or on a rank
            return Card("Repair: not yet", "", None, (f"It stopped with {summary(error)}",))
        finally:
            random.setstate(state)
        self.repaired = True
        return Card("Repair: the trace is gone", "", receipt("", rows, open_rows=1), good=True)

    def __repr__(self) -> str:
        return repr(self._card())

    def _repr_html_(self) -> str:
        return self._card()._repr_html_()

    def _card(self) -> Card:
        its = self.exhibit
        width = max(len(measurement.name) for measurement in its.measurements)
        prices = [f"{m.minutes:>3} min   {m.name:<{width}}   {m.about}" for m in its.measurements]
        suspects = [f"{letter}   {suspect}" for letter, suspect in self.suspects.items()]
        lines = (its.symptom, "What you can order:", "\n".join(prices), "Suspects:", "\n".join(suspects))
        return Card(its.title, f"{its.name}, {its.kind}, {self.clock()}", None, lines)


def visit(name: str, seed: int | None = None) -> Case:
    """Begins a case. ValueError for a name that no exhibit has."""
    return Case(museum.exhibit(name), seed)


def sentence(exhibit: Exhibit, failure: CheckFailed, seed: int) -> str:
    """What is said about a repair that fails as a known one does on the same inputs; "" if none does."""
    for fix in exhibit.wrong_fixes:
        known = failure_of(exhibit, fix, seed)
        if known is not None and same_failure(known, failure):
            return fix.says
    return ""


def failure_of(exhibit: Exhibit, fix: WrongFix, seed: int) -> CheckFailed | None:
    """How a wrong repair fails for that seed; None if it passes."""
    state = random.getstate()
    random.seed(seed)
    try:
        judge.verify(exhibit, fix.code)
    except CheckFailed as failure:
        return failure
    finally:
        random.setstate(state)
    return None


def same_failure(one: CheckFailed, other: CheckFailed) -> bool:
    """Whether two repairs fail alike: the same rows are off, by the same numbers."""
    return alike(*(Outcome("failed", str(failure), evidence=failure.evidence) for failure in (one, other)))


class Shown:
    """Several things to look at, and the minutes that are left."""

    def __init__(self, things: Sequence[Any], clock: str):
        self.things, self.clock = list(things), clock

    def __repr__(self) -> str:
        return "\n\n".join([*map(str, self.things), self.clock])

    def _repr_html_(self) -> str:
        parts = [_html(thing) for thing in self.things]
        return "".join([*parts, f'<div style="opacity:0.7">{self.clock}</div>'])


class Source:
    """Functions to read, each with the place where it stands."""

    def __init__(self, functions: Sequence[tuple[str, str]]):
        self.functions = list(functions)

    def __repr__(self) -> str:
        return "\n\n".join(f"# {place}\n{source.rstrip()}" for place, source in self.functions)

    def _repr_markdown_(self) -> str:
        return "\n\n".join(f"`{place}`\n\n```python\n{source.rstrip()}\n```" for place, source in self.functions)


def _html(thing: Any) -> str:
    if hasattr(thing, "_repr_html_"):
        return thing._repr_html_()
    return f'<pre style="margin:3px 0;color:inherit;background:none;white-space:pre-wrap">{escape(str(thing))}</pre>'
