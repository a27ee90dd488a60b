"""`python -m minillm progress`: how far the learner is, lab by lab, and which cards of the interview are due."""

from typing import Annotated

import typer

from minillm.cli import interview
from minillm.labkit import exercises, progress
from minillm.measure.provenance import JsonFile, write_json


def command(
    reset: Annotated[bool, typer.Option("--reset", help="Forget all progress.")] = False,
    json_file: JsonFile = None,
) -> int:
    """Show exercises passed, attempts, hints used and minutes per lab; cards that are due and the weakest topics."""
    if reset:
        progress.reset()
        print(f"Progress forgotten ({progress.path()}).")
        return 0
    rows = progress.summary(exercises.all_exercises())
    print(progress.table(rows) if rows else "No exercise is registered.")
    topics = interview.cards()
    seen, late = (sum(counts[place] for counts in topics.values()) for place in (0, 1))
    print(f"Interview cards: {seen} seen, {late} due. {interview.weakest(topics)}")
    print(f"Kept in {progress.path()}; start over with: python -m minillm progress --reset")
    cards = [{"topic": topic, "seen": each[0], "due": each[1], "difficulty": each[2]} for topic, each in topics.items()]
    write_json(json_file, {"rows": rows, "cards": cards})
    return 0
