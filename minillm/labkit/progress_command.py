"""`python -m minillm progress`: how far the learner is, lab by lab."""

import json
from pathlib import Path
from typing import Annotated

import typer

from minillm.labkit import exercises, progress


def command(
    reset: Annotated[bool, typer.Option("--reset", help="Forget all progress.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the rows as JSON.")
    ] = None,
) -> int:
    """Show exercises passed, attempts, hints used and minutes per lab."""
    if reset:
        progress.reset()
        print(f"Progress forgotten ({progress.path()}).")
        return 0
    rows = progress.summary(exercises.all_exercises())
    print(progress.table(rows) if rows else "No exercise is registered.")
    print(f"Kept in {progress.path()}; start over with: python -m minillm progress --reset")
    if json_file:
        try:
            json_file.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--json {json_file} cannot be written ({error.strerror}); name another file") from error
    return 0
