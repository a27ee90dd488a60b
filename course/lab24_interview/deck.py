"""The cards: questions as they are asked, short answers whose numbers are computed, and what is asked next.

cards/TOPIC.toml holds them in one readable format. An answer is a template: what stands in {{ ... }} is computed from
`numbers.py` when the card is shown, so that no card can drift from the course's formulas.
"""

import difflib
import hashlib
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from course.lab24_interview.numbers import NUMBERS

FOLDER = Path(__file__).parent / "cards"
LEVELS = ("junior", "senior", "staff")


@dataclass(frozen=True)
class Card:
    """follow_ups: (question, template of its reply), asked after the answer. proof: the lab or formula behind it."""

    topic: str
    level: str
    question: str
    template: str
    follow_ups: tuple[tuple[str, str], ...]
    proof: str

    @property
    def key(self) -> str:
        """Stays the same while the question does."""
        return hashlib.sha256(self.question.encode()).hexdigest()[:12]

    @property
    def answer(self) -> str:
        """With its numbers computed."""
        return _rendered(self.template)

    @property
    def next_asked(self) -> list[tuple[str, str]]:
        """What is asked after the answer, each with its reply."""
        return [(question, _rendered(template)) for question, template in self.follow_ups]

    def __str__(self) -> str:
        follow = "\n".join(f"    asked next: {question}\n        {reply}" for question, reply in self.next_asked)
        return f"{self.answer}\n{follow}\n    proven by: {self.proof}"


@cache
def deck() -> tuple[Card, ...]:
    """All cards, topic by topic. ValueError for a card that is not whole."""
    cards = []
    for path in sorted(FOLDER.glob("*.toml")):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        cards += [_card(path.name, content["topic"], entry) for entry in content["card"]]
    return tuple(cards)


def card(key: str) -> Card:
    return next(each for each in deck() if each.key == key)


def topics() -> list[str]:
    return list(dict.fromkeys(card.topic for card in deck()))


def of_topic(topic: str) -> list[Card]:
    """Cards of a topic, named whole or in part; all of them for "". ValueError names what there is."""
    wanted = topics_of(topic_named(topic))
    return list(deck()) if wanted == [""] else [card for card in deck() if card.topic in wanted]


JOINT = " + "


def topic_named(part: str) -> str:
    """The whole name of a topic, "" for "". A part that several names have stands for all, joined by " + "."""
    if not part or set(part.split(JOINT)) <= set(topics()):
        return part
    known, asked = topics(), part.lower()
    matching = [name for name in known if asked == name.lower()] or [name for name in known if asked in name.lower()]
    if not matching:
        near = difflib.get_close_matches(asked, known, n=1, cutoff=0.6)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"no topic {part!r}{hint}: use one of {', '.join(known)}.")
    return JOINT.join(matching)


def topics_of(name: str) -> list[str]:
    """The topics that a whole name stands for; [""] for all."""
    return name.split(JOINT)


def _card(file: str, topic: str, entry: dict) -> Card:
    missing = {"q", "a", "level", "follow", "replies", "proof"} - set(entry)
    if missing or entry["level"] not in LEVELS:
        raise ValueError(f"a card of {file} lacks {', '.join(sorted(missing)) or 'a level that exists'}: {entry}")
    if len(entry["follow"]) != len(entry["replies"]):
        raise ValueError(f"a card of {file} needs a reply for each question that is asked next: {entry}")
    follow_ups = tuple(zip(entry["follow"], entry["replies"], strict=True))
    return Card(topic, entry["level"], entry["q"], entry["a"], follow_ups, entry["proof"])


def _rendered(template: str) -> str:
    return _environment().from_string(template).render()


@cache
def _environment() -> SandboxedEnvironment:
    environment = SandboxedEnvironment(undefined=StrictUndefined)
    environment.globals.update(NUMBERS)
    return environment
