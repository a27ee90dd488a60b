"""When a card comes back: the FSRS scheduler's record of every card, and which cards a session asks.

The scheduler (Ye et al. 2022, https://doi.org/10.1145/3534678.3539081) comes from the `fsrs` library. It has no
learning steps here: those are minutes inside one sitting, and a session asks each card once, so every grade sets the
card back by a day or more. `NEW` of a session's cards are new, whatever is due, until the whole deck has been seen.
"""

import random
from collections.abc import Mapping
from datetime import UTC, datetime

from fsrs import Card as Memory
from fsrs import Rating, Scheduler

from course.kit import progress
from course.lab24_interview import deck

SECTION = "interview"
NEW = 0.65  # share of new cards while there are any: the deck in a month, with room for a bad week
GRADES = {"1": Rating.Again, "2": Rating.Hard, "3": Rating.Good, "4": Rating.Easy}
GRADE_HELP = "1 did not know, 2 with gaps, 3 well, 4 at once"
SCHEDULER = Scheduler(learning_steps=(), relearning_steps=(), enable_fuzzing=False)


def in_order(cards: list[deck.Card], draw: random.Random, now: datetime | None = None) -> list[deck.Card]:
    """All of them, those to ask first: due and new ones mixed, then the rest by when they are due.

    A card is due from the beginning of its day on: whoever graded it in the evening meets it in the morning.
    """
    now, kept = now or datetime.now(UTC), memories()
    new = [card for card in cards if card.key not in kept]
    draw.shuffle(new)
    old = sorted((card for card in cards if card.key in kept), key=lambda card: kept[card.key].due)
    due = [card for card in old if is_due(kept[card.key], now)]
    return _mixed(new, due) + [card for card in old if card not in due]


def is_due(memory: Memory, now: datetime) -> bool:
    """Whether its day has come."""
    return memory.due.astimezone().date() <= now.astimezone().date()


def memories() -> dict[str, Memory]:
    """The scheduler's record of each card that was graded; a damaged record counts as none."""
    known = {}
    for key, record in (progress.section(SECTION).get("cards") or {}).items():
        try:
            known[key] = Memory.from_dict(record)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
    return known


def grade(key: str, rating: Rating, now: datetime | None = None) -> datetime:
    """Record how well a card went; returns when it comes back."""
    memory, _ = SCHEDULER.review_card(memories().get(key, Memory()), rating, now)
    section = progress.section(SECTION)
    progress.keep(SECTION, section | {"cards": (section.get("cards") or {}) | {key: memory.to_dict()}})
    return memory.due


def due(now: datetime | None = None) -> dict[str, tuple[int, int, float]]:
    """By topic: cards seen, cards due, and the mean difficulty (1 to 10) that the scheduler gives them."""
    now, kept, topics = now or datetime.now(UTC), memories(), {}
    for topic in deck.topics():
        seen = [kept[card.key] for card in deck.of_topic(topic) if card.topic == topic and card.key in kept]
        hard = [memory.difficulty or 0.0 for memory in seen]
        late = sum(is_due(memory, now) for memory in seen)
        topics[topic] = (len(seen), late, sum(hard) / len(hard) if hard else 0.0)
    return topics


ENOUGH = 4  # answers on a topic before it can be called weak


def weakest(
    topics: dict[str, tuple[int, int, float]], answered: Mapping[str, tuple[int, int]] | None = None
) -> list[str]:
    """The three topics that go worst: cards by the scheduler's difficulty, all else by the share that went wrong.

    topics: what `due` says. answered: by topic (answered well, asked) of everything that is no card.
    """
    badness: dict[str, float] = {}
    for topic, (seen, _, difficulty) in topics.items():
        well, asked = (answered or {}).get(topic, (0, 0))
        parts = [difficulty / 10] if seen >= min(ENOUGH, len(deck.of_topic(topic))) else []
        parts += [1 - well / asked] if asked >= ENOUGH else []
        if parts:
            badness[topic] = sum(parts) / len(parts)
    return sorted(badness, key=lambda topic: -badness[topic])[:3]


def _mixed(new: list[deck.Card], due: list[deck.Card]) -> list[deck.Card]:
    """`NEW` of every stretch from the new ones, as long as there are both."""
    mixed: list[deck.Card] = []
    fresh = 0
    while fresh < len(new) and len(mixed) - fresh < len(due):
        if fresh <= NEW * len(mixed):
            mixed.append(new[fresh])
            fresh += 1
        else:
            mixed.append(due[len(mixed) - fresh])
    return mixed + new[fresh:] + due[len(mixed) - fresh :]
