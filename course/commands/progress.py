"""`python -m minillm progress`: how far the learner is, lab by lab, and which cards of the interview are due."""

import shlex
import sys
from typing import Annotated

import typer

from course.commands import interview
from course.kit import exercises, progress
from course.lab24_interview import spacing
from minillm.measure.provenance import JsonFile, write_json


def command(
    reset: Annotated[bool, typer.Option("--reset", help="Forget all progress; asks first, and keeps a copy.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --reset: do not ask.")] = False,
    json_file: JsonFile = None,
) -> int:
    """Show exercises passed, attempts, hints used and minutes per lab; cards that are due and the weakest topics."""
    if yes and not reset:
        raise ValueError("--yes answers the question of --reset: give both, or leave it out")
    if reset:
        return _reset(yes)
    rows = progress.summary(exercises.all_exercises())
    print(progress.table(rows) if rows else "No exercise is registered.")
    topics = spacing.due()
    seen, late = (sum(counts[place] for counts in topics.values()) for place in (0, 1))
    print(f"Interview cards: {seen} seen, {late} due. {interview.weakest(topics)}")
    print(f"Kept in {progress.path()}; start over with: python -m minillm progress --reset")
    cards = [{"topic": topic, "seen": each[0], "due": each[1], "difficulty": each[2]} for topic, each in topics.items()]
    write_json(json_file, {"rows": rows, "cards": cards})
    return 0


def _reset(sure: bool) -> int:
    """Exit status 1 if the learner would rather keep it."""
    file = progress.path()
    if not sure and not sys.stdin.isatty():
        raise ValueError(f"--reset forgets all that {file} holds, and no terminal is there to ask you: add --yes")
    if not sure and not _agreed(f"Forget all progress, kept in {file}? [y/N] "):
        print("Nothing was changed.")
        return 1
    copy = progress.reset()
    if copy is None:
        print(f"There was no progress to forget ({file}).")
    else:
        print(f"Progress forgotten. To have it back: mv {shlex.quote(str(copy))} {shlex.quote(str(file))}")
    return 0


def _agreed(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False
