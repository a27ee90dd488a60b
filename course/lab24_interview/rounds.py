"""What a round asks. Companies interview in rounds; a session is one of them, or a loop through all.

    mixed       one whiteboard task, then drills, cards and claims
    coding      whiteboard tasks: written into a file, run by the lab's hidden check
    debugging   programs with one mistake, to be found and mended; reports to read (a trace, a hang report, logs of
                NCCL); then cards
    design      a problem of lab 20 or 21: its numbers, six moves, follow-ups; then drills and cards
    concepts    cards, claims and drills
    loop        coding, debugging, design and concepts, one after the other

An item is (kind, name). Nothing comes that is off the topic, and no drill twice.
"""

from collections.abc import Collection, Iterator
from functools import cache
from random import Random

from course.kit import exercises
from course.lab24_interview import bugs, claims, deck, designs, drills, readings, spacing, tasks

ROUNDS = ("mixed", "coding", "debugging", "design", "concepts", "loop")
MINUTES = {
    "drill": 2,
    "card": 2,
    "claim": 2,
    "bug": bugs.MINUTES,
    "reading": readings.MINUTES,
    "design": designs.MINUTES,
}
SHORTEST = 3  # minutes of a task
NEEDED = {"mixed": 2, "coding": 10, "debugging": 10, "design": 25, "concepts": 2, "loop": 60}
USUAL = {"loop": 90}  # minutes, where 45 is too short
LEVELS = {  # levels of cards, difficulties of tasks
    "": (deck.LEVELS, (1, 5)),
    "junior": (("junior",), (1, 2)),
    "senior": (("junior", "senior"), (2, 4)),
    "staff": (("senior", "staff"), (3, 5)),
}
QUICK = ("drill", "card", "claim", "card", "card")  # what a long stretch of short questions repeats


def check(round: str, minutes: int, level: str, *, resumed: bool = False) -> None:
    """ValueError for a round or level that there is not, or too little time."""
    for flag, value, known in (("--round", round, ROUNDS), ("--level", level, tuple(LEVELS))):
        if value not in known:
            raise ValueError(f"{flag} {value}: there are {', '.join(filter(None, known))}.")
    least = MINUTES["card"] if resumed else NEEDED[round]
    if minutes < least:
        needs = "one card" if least == 2 else "its first task"
        raise ValueError(f"--minutes {minutes}: a {round} session needs at least {least}, which is {needs}.")


def items(
    round: str, topic: str, minutes: int, level: str, draw: Random, without: Collection[tuple[str, ...]] = ()
) -> list[list[str]]:
    """What a session of so many minutes asks, in this order; [] where a topic has nothing of the round.

    without: (kind, name) of what has been asked before.
    """
    own, quick = Random(draw.random()), Random(draw.random())
    chosen: list[list[str]] = []
    left = minutes
    for kind, most in _long(round, minutes):
        taken = 0
        for name in _names(kind, topic, level, own):
            if taken == most or left < SHORTEST:
                break
            if planned(kind, name) <= left and (kind, name) not in without:
                chosen.append([kind, name])
                left -= planned(kind, name)
                taken += 1
    if round in ("coding", "debugging", "design") and not chosen:
        return []
    return chosen + list(_quick(topic, level, left, quick, without, with_claims=round != "coding"))


def planned(kind: str, name: str) -> int:
    """Minutes for an item."""
    return _task(name)[0] if kind == "task" else MINUTES[kind]


def exists(kind: str, name: str) -> bool:
    """Whether a record's item can still be asked."""
    known = {
        "card": lambda: name in {card.key for card in deck.deck()},
        "drill": lambda: name.partition(":")[0] in drills.DRILLS,
        "claim": lambda: name in claims.statements(),
        "design": lambda: name in designs.TOPICS,
        "task": lambda: name in tasks.TASKS,
        "bug": lambda: name.partition("/")[0] in tasks.TASKS,
        "reading": lambda: name.partition(":")[0] in readings.READINGS,
    }
    return kind in known and known[kind]()


def _long(round: str, minutes: int) -> tuple[tuple[str, int], ...]:
    """The kinds that take long, in order, and how many of each at most."""
    return {
        "mixed": (("task", 1),) if minutes >= 20 else (),
        "coding": (("task", 99),),
        "debugging": (("bug", max(1, 7 * minutes // (10 * MINUTES["bug"]))), ("reading", 2)),
        "design": (("design", max(1, minutes // 45)),),
        "concepts": (),
        "loop": (("task", 1), ("bug", 1), ("design", 1), ("reading", 1)),
    }[round]


def _names(kind: str, topic: str, level: str, draw: Random) -> Iterator[str]:
    """What there is of a kind that takes long, in random order; of one program one mistake only."""
    if kind == "reading":
        found = [name for each in deck.topics_of(topic) for name in readings.of_topic(each, draw)]
        draw.shuffle(found)
        yield from found
        return
    source = designs.of_topic if kind == "design" else tasks.of_topic
    topics = [""] if kind == "bug" and topic == "debugging" else deck.topics_of(topic)  # its own programs are all
    names = [name for each in topics for name in source(each)]
    if kind != "design":
        low, high = LEVELS[level][1]
        names = [name for name in names if low <= _task(name)[1] <= high] or names
    draw.shuffle(names)
    if kind != "bug":
        yield from names
        return
    for name in names:
        if known := bugs.of_exercise(name):
            yield draw.choice(known)


@cache
def _task(name: str) -> tuple[int, int]:
    """(minutes, difficulty) of an exercise."""
    exercise = exercises.find(name)
    return exercise.minutes, exercise.difficulty


def _quick(
    topic: str, level: str, minutes: int, draw: Random, without: Collection[tuple[str, ...]], *, with_claims: bool
) -> Iterator[list[str]]:
    """Short questions until the time is full: cards as they are due, claims, drills that all differ."""
    cards = [card for card in deck.of_topic(topic) if card.level in LEVELS[level][0]]
    waiting = {
        "card": [card.key for card in spacing.in_order(cards, Random(draw.random()))],
        "claim": _claims(topic, draw) if with_claims else [],
        "drill": drills.different(topic, draw, minutes // MINUTES["drill"]),
    }
    place = 0
    while minutes >= MINUTES["card"] and any(waiting.values()):
        kind = QUICK[place % len(QUICK)]
        place += 1
        name = waiting[kind].pop(0) if waiting[kind] else ""
        if name and (kind, name) not in without:
            yield [kind, name]
            minutes -= MINUTES[kind]


def _claims(topic: str, draw: Random) -> list[str]:
    names = [name for each in deck.topics_of(topic) for name in claims.of_topic(each)]
    draw.shuffle(names)
    return names
