"""Decisions of a design interview: the reader commits to a number, and is told how it relates to the computed one.

    decide(STATES, 700e9)

A number within the tolerance passes. One that is off by a factor with a known cause is told the cause: bits for bytes,
one GPU for all, one pass for three, thousands. Everything else is told which way it is off, the accepted range and the
reason for the bound that it crosses.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from course.kit.card import Card
from course.kit.receipts import Receipt, format_value, formula, receipt
from course.shared.units import in_unit

NEAR = 0.06  # a factor is recognised if the number is this close to it


@dataclass(frozen=True)
class Decision:
    """question: what is asked, with its unit. value: computed, never typed. because: how, with the numbers in it.

    also: other right answers to the question as it is printed, by another convention; each is named in `because`.
    A value that is an int counts whole things; one with almost no tolerance is a level, such as a ZeRO stage, or a
    rank, which may be 0.
    tolerance: relative. slips: factors (guess / value) that a known mistake gives, with the sentence that says so.
    gpus: how many share the quantity, if confusing one with all is possible. below, above: the likely reason for a
    guess that is too small, too large.
    """

    question: str
    value: float
    unit: str
    because: str
    tolerance: float = 0.15
    slips: Mapping[float, str] = field(default_factory=dict)
    gpus: int = 1
    below: str = ""
    above: str = ""
    also: tuple[float, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """kind: right, slip (a known mistake), far (no known cause) or no number."""

    kind: str
    sentence: str


def judge(decision: Decision, guess: object) -> Verdict:
    """What to say about the reader's number."""
    try:
        number = in_unit(guess, decision.unit)
    except ValueError as error:
        return Verdict("no number", str(error))
    may_be_0 = _is_level(decision) and isinstance(decision.value, int)
    if not math.isfinite(number) or number < 0 or (number == 0 and not may_be_0):
        return Verdict("no number", f"{number} cannot be the answer: it is a number above 0.")
    if may_be_0 and 0 in (number, decision.value):  # no ratio says how far off it is
        return Verdict("right", "Right.") if number == decision.value else _far(decision, number)
    ratio = number / decision.value
    closest = min((decision.value, *decision.also), key=lambda value: abs(number / value - 1))
    if abs(number / closest - 1) <= decision.tolerance:
        return Verdict("right", _right(decision, number, closest))
    for slips in (decision.slips, _usual_slips(decision)):
        factor = min(slips, key=lambda factor: abs(ratio / factor - 1), default=math.inf)
        if abs(ratio / factor - 1) <= NEAR:
            return Verdict("slip", slips[factor])
    return _far(decision, number)


def decide(decision: Decision, guess: object) -> Card:
    """The card under a decision: the reader's number, the computed one, what is wrong, how it is computed."""
    verdict = judge(decision, guess)
    shown = in_unit(guess, decision.unit) if verdict.kind != "no number" else None
    value = round(decision.value) if decision.unit == "B" else decision.value
    rows: Receipt = receipt("", [formula(decision.question, value, decision.unit, guess=shown)])
    return Card("Your decision", "", rows, (verdict.sentence, decision.because), good=verdict.kind == "right")


MOVES = {
    "clarify": "Clarify",
    "size": "Size",
    "choose": "Choose",
    "check": "Check",
    "risk": "Risk",
    "measure": "Measure first",
}


@dataclass(frozen=True, repr=False)
class Problem:
    """A whiteboard problem after the decisions: a strong answer in six moves, what is asked next, a weak answer.

    Texts may hold {names}, which are filled from `numbers`: every number of an answer is computed. follow: pairs of a
    question and its reply, two or three of them.
    """

    title: str
    clarify: str
    size: str
    choose: str
    check: str
    risk: str
    measure: str
    follow: list[list[str]]
    weak: str
    why: str
    numbers: Mapping[str, str]

    def text(self, part: str) -> str:
        """One of the texts (a move, weak, why) with its numbers."""
        return getattr(self, part).format(**self.numbers)

    @property
    def follow_ups(self) -> list[tuple[str, str]]:
        """What is asked next, each with its reply."""
        return [(question.format(**self.numbers), reply.format(**self.numbers)) for question, reply in self.follow]

    def _parts(self) -> list[tuple[str, list[tuple[str, str]]]]:
        moves = [(f"{name}.", getattr(self, move)) for move, name in MOVES.items()]
        parts = {
            "A strong answer": moves,
            "What is asked next": self.follow,
            "A weak answer, and why": [(f"“{self.weak}”", self.why)],
        }
        return [
            (head, [(name.format(**self.numbers), text.format(**self.numbers)) for name, text in rows])
            for head, rows in parts.items()
        ]

    def __repr__(self) -> str:
        lines = [self.title]
        for heading, rows in self._parts():
            lines += [f"  {heading}", *(f"    - {name} {text}" for name, text in rows)]
        return "\n".join(lines)

    def _repr_markdown_(self) -> str:
        parts = (
            f"**{heading}**\n\n" + "\n".join(f"- *{name}* {text}" for name, text in rows)
            for heading, rows in self._parts()
        )
        return f"<details open><summary>{self.title}</summary>\n\n" + "\n\n".join(parts) + "\n\n</details>"


def shown(value: float, unit: str = "") -> str:
    """A number as texts quote it: bytes with three digits and a decimal prefix, everything else as receipts do."""
    if unit != "B":
        return format_value(value, unit)
    power = min(4, int(math.log10(max(value, 1)) // 3))
    return f"{value / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def _far(decision: Decision, number: float) -> Verdict:
    """Which way it is off, how far unless only the value itself is right, and the reason for the bound it crosses."""
    large = number > decision.value
    ratio = 0.0 if _is_level(decision) else max(number / decision.value, decision.value / number)
    way = f"{float(f'{ratio:.3g}'):,.12g} times " if ratio else ""
    reason = decision.above if large else decision.below
    said = f"Your number is {way}too {'large' if large else 'small'}{_range(decision)}. {reason}"
    return Verdict("far", said.strip())


def _range(decision: Decision) -> str:
    """What is accepted, by any convention, unless only the value itself is."""
    if _is_level(decision):
        return ""
    ranges: list[tuple[float, float]] = []
    for value in sorted((decision.value, *decision.also)):
        low, high = (value * (1 + way * decision.tolerance) for way in (-1, 1))
        if isinstance(decision.value, int):
            low, high = math.ceil(low), math.floor(high)
        if ranges and low <= ranges[-1][1]:
            low, _ = ranges.pop()
        ranges.append((low, high))
    return "; accepted is " + " or ".join(
        f"{shown(low, decision.unit)} to {shown(high, decision.unit)}" for low, high in ranges
    )


def _is_level(decision: Decision) -> bool:
    """Whether only the value itself is right, so that no factor says how far another one is from it."""
    return decision.tolerance < 0.02


def _right(decision: Decision, number: float, value: float) -> str:
    """value: the right one that the reader's number is closest to."""
    ratio = number / value
    if decision.unit == "B" and abs(ratio * 1.0737 - 1) < 0.004:
        return "Right, in GiB (2^30 bytes); in GB (10^9) the number is 7 % larger."
    if value != decision.value:
        return f"Right within {max(abs(ratio - 1), 0.01):.0%} of {shown(value, decision.unit)}, which is right too."
    return "Right." if abs(ratio - 1) < 0.02 else f"Right within {abs(ratio - 1):.0%}, as good as a whiteboard needs."


def _usual_slips(decision: Decision) -> dict[float, str]:
    """Factors that any quantity of this unit invites."""
    slips = {}
    if decision.gpus > 1:
        slips[decision.gpus] = f"That is the number of all {decision.gpus:,} GPUs together; the question asks for one."
        slips[1 / decision.gpus] = (
            f"That is the number of one of the {decision.gpus:,} GPUs; the question asks for all."
        )
    if decision.unit in ("B", "B/s"):
        slips[8] = "That many bits; a byte has 8."
        slips[1 / 8] = "You divided by 8 once too often: the quantity is in bytes already."
        slips[2] = (
            "Twice too large: did you count 32-bit numbers where 16-bit ones travel, or both directions of a link?"
        )
        slips[0.5] = (
            "Half of it: did you count numbers instead of bytes (a 16-bit one has two), 16-bit ones where there are "
            "32-bit ones, or one direction of two?"
        )
    if decision.unit in ("FLOP", "FLOP/s"):
        slips[0.5] = "Half of it: a multiplication and an addition are two operations."
        slips[1 / 3] = "A third of it: backward takes twice what forward takes."
        slips[3] = "Three times too large: that includes a backward pass."
    if decision.unit == "" and not isinstance(decision.value, int) and decision.value <= 1:
        slips[100] = "That is in percent; the question asks for a share between 0 and 1."
    if decision.unit == "s":
        slips[1e3] = "That many milliseconds; the question asks for seconds."
        slips[1 / 60] = "That many minutes; the question asks for seconds."
        slips[1 / 3600] = "That many hours; the question asks for seconds."
    if decision.unit in ("GPU-hours", "GPU hours"):
        slips[3600] = "Those are GPU-seconds; the question asks for GPU-hours."
        slips[60] = "Those are GPU-minutes; the question asks for GPU-hours."
        slips[1 / 60] = "You divided by 60 once too often: an hour has 60 minutes of 60 seconds."
    if decision.unit == "days":
        slips[24] = "Those are hours; the question asks for days."
        slips[86400] = "Those are seconds; the question asks for days."
    for power, (times, off) in PREFIXES.items():
        slips.setdefault(10.0**power, f"{times} too large: {off}")
        slips.setdefault(10.0**-power, f"{times} too small: {off}")
    return slips


_PREFIX = "check the prefix (mega, giga, tera) and whether you left it out."
PREFIXES = {
    3: ("A thousand times", _PREFIX),
    6: ("A million times", _PREFIX),
    9: ("A thousand million times (giga)", _PREFIX),
    12: ("A million million times (tera)", _PREFIX),
}
