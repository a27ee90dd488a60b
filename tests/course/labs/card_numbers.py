"""Every number that a card says, and what may stand in a text without being a quantity."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from course.lab24_interview import deck

POWERS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "thousand": 1e3, "million": 1e6, "billion": 1e9}
POWERS["trillion"] = 1e12
NUMBER = re.compile(
    r"(?<![\w.,])(\d+(?:,\d{3})*(?:\.\d+)?)(e-?\d+)?(?: ?([kMGTP])(?=i?B|b/s|FLOP)| (thousand|million|billion|trillion)"
    r"| ?(%))?"
)

# What stands in a text for a name: the pattern, and why its digits are no quantity.
NAMES = {
    r"Llama [23](?: \d+B)?|Megatron \d+B|Mixtral 8x7B|DeepSeek-V3": "models, with the size that their name has",
    r"\b\d+B\b(?! of)": "a model called by its size; the parameters of its data sheet enter the formulas",
    r"\b[AH]100\b": "devices",
    r"\bZeRO-?[123]?(?:[, ]+\d and \d|[- ]\d(?: or \d)?| stage \d)?|FSDP[12]": "stages and versions of a scheme",
    r"[Ss]tages? \d(?: and \d)?|, 2 gradients|, 3 weights": "stages of ZeRO by their number",
    r"\b1F1B\b|8x7B|UTF-8|\blog2\b|NF4|int[48]|fp(?:16|32)|bf16|V3": "names of schedules, encodings, types",
    r"\bp99\b": "a quantile's name",
    r"[Rr]ank \d+": "a rank by its number",
    r"step n\+1|positions r, r\+N": "indices",
    r"et al\. \d{4}|(?:Young|Hockney|Team) \d{4}|table \d+|§[\d.]+": "years and places of papers",
}


@dataclass(frozen=True)
class Worked:
    """What a card computes. results: by a second way. chosen: the sizes of its example that no question gives."""

    results: tuple[float, ...]
    chosen: tuple[float, ...] = ()


@dataclass(frozen=True)
class Said:
    """text: as printed. value: with its prefix or per cent. step: half a unit of the last digit that is printed."""

    text: str
    value: float
    step: float


@dataclass(frozen=True)
class Part:
    """An answer, or the reply to a follow-up. given: numbers of what was asked, and of what was answered before."""

    question: str
    text: str
    given: tuple[float, ...]

    def numbers(self, formulas: dict) -> list[Said]:
        """Those that are no part of a name or a formula."""
        return numbers(without_names(self.text, formulas))


def numbers(text: str) -> list[Said]:
    found = []
    for match in NUMBER.finditer(text):
        digits, exponent, prefix, word, percent = match.groups()
        power = POWERS.get(prefix or word, 0.01 if percent else 1.0) * float(f"1{exponent or 'e0'}")
        plain = digits.replace(",", "")
        whole, _, decimals = plain.partition(".")
        step = 0.5 * 10.0 ** -len(decimals) if decimals else 0.5 * 10.0 ** (len(whole) - len(whole.rstrip("0")))
        found.append(Said(match.group().strip(), float(plain) * power, step * power))
    return found


@cache
def parts() -> dict[str, list[Part]]:
    """The texts of every card, by its question: the answer first, then the replies."""
    found = {}
    for card in deck.deck():
        asked = [said.value for said in numbers(card.question)]
        its = [Part(card.question, card.answer, tuple(asked))]
        for question, reply in card.next_asked:
            before = tuple(said.value for text in (card.question, card.answer, question) for said in numbers(text))
            its.append(Part(f"{card.question} / {question}", reply, before))
        found[card.question] = its
    return found


def near(said: Said, expected: float) -> bool:
    """Within the digits that are printed, 3 % at most, and what two data sheets may differ by."""
    rounding = min(1.02 * said.step, 0.03 * abs(expected))
    return abs(said.value - expected) <= rounding + 0.003 * abs(expected)


def equal(said: Said, given: float) -> bool:
    return math.isclose(said.value, given, rel_tol=1e-9)


def without_names(text: str, formulas: Iterable[str] = ()) -> str:
    for formula in sorted(formulas, key=len, reverse=True):
        text = text.replace(formula, "∎")
    for pattern in NAMES:
        text = re.sub(pattern, "∎", text)
    return text
