"""How drills, claims, tasks and bugs went, by topic of the cards: kept beside the cards' own record."""

from course.kit import progress
from course.lab24_interview import claims, designs, drills, readings, tasks
from course.lab24_interview.spacing import SECTION

WELL = ("right", "passed", "3", "4")


def record(kind: str, name: str, outcome: str) -> None:
    """Count an answer under its topics; a card has a record of its own."""
    if kind == "card":
        return
    counted = results()
    for topic in topics_of(kind, name):
        well, asked = counted.get(topic, (0, 0))
        counted[topic] = (well + (outcome in WELL), asked + 1)
    progress.keep(SECTION, progress.section(SECTION) | {"results": {each: list(of) for each, of in counted.items()}})


def results() -> dict[str, tuple[int, int]]:
    """By topic: (answered well, asked). What is damaged counts as nothing."""
    kept = progress.section(SECTION).get("results")
    counted = {}
    for topic, counts in (kept if isinstance(kept, dict) else {}).items():
        if isinstance(counts, list) and len(counts) == 2 and all(isinstance(each, int) for each in counts):
            counted[topic] = (counts[0], counts[1])
    return counted


def topics_of(kind: str, name: str) -> list[str]:
    """Of the cards. A drill belongs to each topic that asks it."""
    if kind == "drill":
        return [topic for topic, kinds in drills.TOPICS.items() if name.partition(":")[0] in kinds]
    if kind == "reading":
        return [readings.TOPICS[name.partition(":")[0]]]
    if kind == "claim":
        return [claims.TOPICS[claims.claim(name).topic]]
    return [designs.TOPICS[name] if kind == "design" else tasks.TASKS[name.partition("/")[0]]]
