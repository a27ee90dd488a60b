"""Lab 24's claims: the deck is whole, its numbers are computed, and a session fits its time."""

import random
from collections import Counter
from collections.abc import Iterator

from course.kit.card import Card
from course.kit.receipts import Row, row, titled
from course.lab24_interview import deck, drills, spacing, tasks
from course.shared.decisions import decide


@titled("the deck", open_rows=8)
def the_deck() -> Iterator[Row]:
    """How many cards there are, by level, and that every number in them could be computed."""
    cards = deck.deck()
    levels = Counter(card.level for card in cards)
    computed = sum("{{" in card.template for card in cards)
    rendered = sum(bool(card.answer) for card in cards)
    yield row("cards, each with an answer", len(cards), rendered)
    yield row("    with computed numbers", None, computed)
    for level in deck.LEVELS:
        yield row(f"    {level}", None, levels[level])
    yield row("topics", None, len(deck.topics()))
    yield row("kinds of numeric drills", None, len(drills.DRILLS))
    yield row("whiteboard tasks", None, len(tasks.of_topic("")))


def question(seed: int = 1, topic: str = "") -> str:
    """One card's question, drawn."""
    card = random.Random(seed).choice(deck.of_topic(topic))
    return f"({card.topic}, {card.level}) {card.question}"


def reply(seed: int = 1, topic: str = "") -> str:
    """The same card's answer."""
    return str(random.Random(seed).choice(deck.of_topic(topic)))


def drill(kind: str, seed: int) -> str:
    """A drill's question."""
    return drills.DRILLS[kind](random.Random(seed)).question


def answer(kind: str, seed: int, guess: object) -> Card:
    """What is said about your number."""
    return decide(drills.DRILLS[kind](random.Random(seed)), guess)


@titled("what is due", open_rows=8)
def due() -> Iterator[Row]:
    """Cards seen and due by topic, from your progress file."""
    topics = {topic: (seen, late) for topic, (seen, late, _) in spacing.due().items() if seen}
    yield row("cards seen", None, sum(seen for seen, _ in topics.values()))
    for topic, (seen, late) in topics.items():
        yield row(f"{topic}: due of {seen} seen", None, late)


CLAIMS = (the_deck,)
