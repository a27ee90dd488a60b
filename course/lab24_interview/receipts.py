"""Lab 24's claims: the deck is whole, its numbers are computed, and a session fits its time."""

import random
from collections import Counter

from course.kit.card import Card
from course.kit.receipts import Receipt, receipt, row
from course.lab24_interview import deck, drills, spacing, tasks
from course.shared.decisions import decide


def the_deck() -> Receipt:
    """How many cards there are, by level, and that every number in them could be computed."""
    cards = deck.deck()
    levels = Counter(card.level for card in cards)
    computed = sum("{{" in card.template for card in cards)
    rendered = sum(bool(card.answer) for card in cards)
    rows = [
        row("cards", True, len(cards) >= 250),
        row("    rendered", len(cards), rendered),
        row("    with computed numbers", None, computed),
        *(row(f"    {level}", None, levels[level]) for level in deck.LEVELS),
        row("topics", None, len(deck.topics())),
        row("kinds of numeric drills", None, len(drills.DRILLS)),
        row("whiteboard tasks", True, len(tasks.of_topic("")) >= 20),
    ]
    return receipt("the deck", rows, open_rows=5)


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


def due() -> Receipt:
    """Cards seen and due by topic, from your progress file."""
    rows = [row(f"{topic}: due of {seen} seen", None, late) for topic, (seen, late, _) in spacing.due().items()]
    return receipt("what is due", rows, open_rows=8)


CLAIMS = (the_deck,)
