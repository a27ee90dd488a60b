"""`python -m minillm interview`: a timed mock interview in the terminal. The course holds what is asked."""

import contextlib
import shutil
from pathlib import Path
from typing import Annotated

from typer import Option

from course.lab24_interview import mock, results, rounds, spacing
from course.lab24_interview import session as sessions
from course.lab24_interview.sheet import page
from course.lab24_interview.wording import for_terminal
from minillm.files import opened, refusing


def command(
    topic: Annotated[str, Option(help="Only this topic, or a part of its name.", show_default="all topics")] = "",
    minutes: Annotated[
        int | None, Option(help="How long the session takes, from now.", show_default="45, or what is left")
    ] = None,
    round: Annotated[str, Option(help=f"One of {', '.join(rounds.ROUNDS)}.", show_default="mixed")] = "",
    level: Annotated[str, Option(help="junior, senior or staff.", show_default="all levels")] = "",
    seed: Annotated[int | None, Option(help="Draw the same task and drills again; cards come as they are due.")] = None,
    new: Annotated[bool, Option("--new", help="Draw a session although one is open, which stays open.")] = False,
    discard: Annotated[bool, Option("--discard", help="Forget an open session (of that topic, round, seed).")] = False,
    due: Annotated[bool, Option("--due", help="Show what is due and the weakest topics, and ask nothing.")] = False,
    sheet: Annotated[Path | None, Option(help="Write the topic's cards as a page to print (HTML).")] = None,
    folder: Annotated[Path, Option(help="Where whiteboard tasks are written.")] = Path("whiteboard"),
) -> int:
    """Whiteboard tasks, bugs, designs, drills, claims and cards under a clock; goes on where the last session stopped.

    With --topic, --round, --level or --seed it goes on with the last session of that kind, or draws one.
    """
    if due:
        print(_due(spacing.due()))
        return 0
    if sheet is not None:
        text = page(topic)
        with refusing("--sheet", sheet), opened(sheet, "w") as file:
            file.write(text)
        print(f"Written: {sheet}")
        return 0
    which = (topic, seed, round, level)
    if discard:
        forgotten = sessions.discard(*which)
        print(f"Forgotten: {forgotten.about}; its grades stay." if forgotten else "No such session is open.")
        return 0
    session = _session(which, minutes, new)
    print(f"Session {session.seed}: {session.about}. q leaves at any prompt.")
    if others := [f"--seed {each.seed} ({each.about})" for each in sessions.open_sessions() if each.key != session.key]:
        print("Also open (--discard forgets one):", *others, sep="\n  ")
    with contextlib.suppress(KeyboardInterrupt):  # pressed while something was being saved, which is done by then
        mock.run(session, input, _say, folder)
    return 0


def _say(text: str) -> None:
    print(for_terminal(text, shutil.get_terminal_size().columns), flush=True)


def weakest(due: dict[str, tuple[int, int, float]]) -> str:
    """A line that names the weakest topics of `spacing.due()`, or how to find them out."""
    if names := spacing.weakest(due, results.results()):
        return f"Weakest: {', '.join(names)}"
    if any(seen for seen, _, _ in due.values()):
        return f"No topic has {spacing.ENOUGH} answers yet, which it takes to call it weak."
    return "No card has been asked yet: python -m minillm interview"


def _session(which: tuple[str, int | None, str, str], minutes: int | None, new: bool) -> sessions.Session:
    topic, seed, round, level = which
    rounds.check(round or "mixed", 45 if minutes is None else minutes, level, resumed=not new)
    session = None if new else sessions.resume(*which)
    if session is None:
        return sessions.start(topic, minutes or rounds.USUAL.get(round, 45), seed, round or "mixed", level)
    if minutes is not None:
        sessions.extend(session, minutes)
    print("Going on where you stopped; --new starts another.")
    return session


def _due(due: dict[str, tuple[int, int, float]]) -> str:
    answered = results.results()
    lines = [f"{'topic':<30}  {'cards':>5}   due  difficulty  other questions well"]
    for topic, (seen, late, difficulty) in due.items():
        well, asked = answered.get(topic, (0, 0))
        other = f"{well} of {asked}" if asked else "-"
        lines.append(f"{topic:<30}  {seen:>5}  {late:>4}  {f'{difficulty:.1f}' if seen else '-':>10}  {other:>20}")
    return "\n".join([*lines, "", weakest(due)])
