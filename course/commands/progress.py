"""`python -m minillm progress`: how far the learner is, lab by lab, which cards are due, and what is handed in."""

import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from course.commands import interview
from course.kit import course, exercises, hand_in, progress
from course.lab24_interview import spacing
from minillm.files import write_whole
from minillm.measure.provenance import JsonFile, write_json


def command(
    reset: Annotated[bool, typer.Option("--reset", help="Forget all progress; asks first, and keeps a copy.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --reset: do not ask.")] = False,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the answers that passed, to hand them in.")
    ] = None,
    grade: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Run what was handed in again; may be given many times.")
    ] = None,
    json_file: JsonFile = None,
) -> int:
    """Show exercises passed, attempts, hints used and minutes per lab; cards that are due and the weakest topics."""
    if yes and not reset:
        raise ValueError("--yes answers the question of --reset: give both, or leave it out")
    if sum(map(bool, (reset, export, grade))) > 1:
        raise ValueError("--reset, --export and --grade are three commands: give one of them")
    if reset:
        return _reset(yes)
    if export:
        return _export(export)
    if grade:
        return _grade(grade, json_file)
    rows = progress.summary(exercises.all_exercises())
    print(progress.table(rows) if rows else "No exercise is registered.")
    topics = spacing.due()
    seen, late = (sum(counts[place] for counts in topics.values()) for place in (0, 1))
    print(f"Interview cards: {seen} seen, {late} due. {interview.weakest(topics)}")
    print(f"Kept in {progress.path()}; start over with: python -m minillm progress --reset")
    cards = [{"topic": topic, "seen": each[0], "due": each[1], "difficulty": each[2]} for topic, each in topics.items()]
    write_json(json_file, {"rows": rows, "cards": cards})
    return 0


def _export(file: Path) -> int:
    home = course.home()
    found = hand_in.collect(home / "labs", course.masters(home))
    try:
        write_whole(file, json.dumps(found, indent=1) + "\n")
    except OSError as error:
        raise ValueError(f"--export {file} cannot be written ({error.strerror})") from error
    labs = found["content"]["labs"]
    count = sum(len(each["passed"]) for each in labs.values())
    print(f"{count} exercises of {', '.join(labs)} are in {file} (SHA-256 {found['sha256'][:12]}).")
    return 0


def _grade(files: list[Path], json_file: Path | None) -> int:
    """Exit status 1 if an answer that was handed in does not pass again."""
    handed_in = {file: hand_in.read(file) for file in files}  # all are read before the first one is run
    rows = []
    for file, labs in handed_in.items():
        for lab, content in labs.items():
            with tempfile.TemporaryDirectory(prefix="minillm-grade-") as scratch:
                found = hand_in.grade(lab, content, Path(scratch))
            lost = sorted(set(found.claimed) - set(found.passed))
            print(f"{file}: {lab}: {len(found.claimed) - len(lost)} of {len(found.claimed)} pass again", end="")
            print(f"; not {', '.join(lost)}" * bool(lost) + f"; {found.stopped}" * bool(found.stopped), flush=True)
            rows.append({"file": str(file), "lab": lab, "passed": found.passed, "lost": lost, "stopped": found.stopped})
    write_json(json_file, {"rows": rows})
    return 1 if any(row["lost"] for row in rows) else 0


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
