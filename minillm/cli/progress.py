"""`python -m minillm progress`: how far the learner is, lab by lab."""

from typing import Annotated

import typer

from minillm.labkit import exercises, progress
from minillm.measure.provenance import JsonFile, write_json


def command(
    reset: Annotated[bool, typer.Option("--reset", help="Forget all progress.")] = False,
    json_file: JsonFile = None,
) -> int:
    """Show exercises passed, attempts, hints used and minutes per lab."""
    if reset:
        progress.reset()
        print(f"Progress forgotten ({progress.path()}).")
        return 0
    rows = progress.summary(exercises.all_exercises())
    print(progress.table(rows) if rows else "No exercise is registered.")
    print(f"Kept in {progress.path()}; start over with: python -m minillm progress --reset")
    write_json(json_file, {"rows": rows})
    return 0
