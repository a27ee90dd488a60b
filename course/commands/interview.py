"""`python -m minillm interview`: a timed mock interview in the terminal. The course holds what is asked."""

import contextlib
from pathlib import Path
from typing import Annotated

from typer import Option

from course.lab24_interview import mock
from course.lab24_interview.sheet import page
from minillm.files import opened, refusing


def command(
    topic: Annotated[str, Option(help="Only this topic, or a part of its name.", show_default="all topics")] = "",
    minutes: Annotated[int, Option(help="How long the session takes.")] = 45,
    seed: Annotated[int | None, Option(help="Draw the same task and drills again; cards come as they are due.")] = None,
    new: Annotated[bool, Option("--new", help="Draw a session although one is open, which stays open.")] = False,
    due: Annotated[bool, Option("--due", help="Show what is due and the weakest topics, and ask nothing.")] = False,
    sheet: Annotated[Path | None, Option(help="Write the topic's cards as a page to print (HTML).")] = None,
    folder: Annotated[Path, Option(help="Where whiteboard tasks are written.")] = Path("whiteboard"),
) -> int:
    """Whiteboard task, numeric drills and cards under a clock; goes on where the last session stopped.

    With --topic or --seed it goes on with the last session of that topic or seed, or draws one.
    """
    if due:
        print(_due(mock.due()))
        return 0
    if sheet is not None:
        text = page(topic)
        with refusing("--sheet", sheet), opened(sheet, "w") as file:
            file.write(text)
        print(f"Written: {sheet}")
        return 0
    mock.check_minutes(minutes)
    session = None if new else mock.resume(topic, seed)
    if session:
        about = session.topic or "all topics"
        print(f"Going on with a session of {session.minutes} minutes on {about}; --new starts another.")
    session = session or mock.start(topic, minutes, seed)
    print(f"Session {session.seed}: {len(session.items)} items, {len(session.done)} done. q leaves at any prompt.")
    if others := [f"--seed {each.seed}" for each in mock.open_sessions() if each.name != session.name]:
        print(f"Also open: {', '.join(others)}.")
    with contextlib.suppress(KeyboardInterrupt):  # pressed while something was being saved, which is done by then
        mock.run(session, input, lambda text: print(text, flush=True), folder)
    return 0


def weakest(due: dict[str, tuple[int, int, float]]) -> str:
    """A line that names the weakest topics of `mock.due()`, or how to find them out."""
    names = mock.weakest(due)
    return f"Weakest: {', '.join(names)}" if names else "No card has been asked yet: python -m minillm interview"


def _due(due: dict[str, tuple[int, int, float]]) -> str:
    lines = [f"{'topic':<30}  seen   due  difficulty"]
    for topic, (seen, late, difficulty) in due.items():
        lines.append(f"{topic:<30}  {seen:>4}  {late:>4}  {f'{difficulty:.1f}' if seen else '-':>10}")
    return "\n".join([*lines, "", weakest(due)])
