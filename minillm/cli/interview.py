"""`python -m minillm interview`: a timed mock interview in the terminal. The course holds what is asked."""

import contextlib
from importlib import import_module
from pathlib import Path
from typing import Annotated

from typer import Option

from minillm.labkit import course
from minillm.measure.provenance import opened

LAB = "course.lab24_interview"


def command(
    topic: Annotated[str, Option(help="Only this topic, or a part of its name.")] = "",
    minutes: Annotated[int, Option(help="How long.")] = 45,
    seed: Annotated[int | None, Option(help="Draw the same session again.")] = None,
    new: Annotated[bool, Option("--new", help="Start afresh although a session is open.")] = False,
    due: Annotated[bool, Option("--due", help="Show what is due and the weakest topics, and ask nothing.")] = False,
    sheet: Annotated[Path | None, Option(help="Write the topic's cards as a page to print (HTML).")] = None,
    folder: Annotated[Path, Option(help="Where whiteboard tasks are written.")] = Path("whiteboard"),
) -> int:
    """Whiteboard task, numeric drills and cards under a clock; goes on where the last session stopped."""
    course.home()
    mock = import_module(f"{LAB}.mock")
    if due:
        print(_due(mock.due()))
        return 0
    if sheet is not None:
        page = import_module(f"{LAB}.sheet").page(topic)
        try:
            with opened(sheet, "w") as file:
                file.write(page)
        except OSError as error:
            raise ValueError(f"--sheet {sheet} cannot be written ({error.strerror}): name another file.") from error
        print(f"Written: {sheet}")
        return 0
    mock.check_minutes(minutes)
    session = None if new or topic or seed is not None else mock.resume()
    if session:
        print(f"Going on with a session of {session.minutes} minutes; --new starts another.")
    session = session or mock.start(topic, minutes, seed)
    print(f"Session {session.seed}: {len(session.items)} items. q leaves at any prompt.")
    with contextlib.suppress(KeyboardInterrupt):  # pressed while something was being saved, which is done by then
        mock.run(session, input, lambda text: print(text, flush=True), folder)
    return 0


def _due(found: dict[str, tuple[int, int, float]]) -> str:
    lines = [f"{'topic':<30}  seen   due  difficulty"]
    for topic, (seen, late, hard) in found.items():
        lines.append(f"{topic:<30}  {seen:>4}  {late:>4}  {f'{hard:.1f}' if seen else '-':>10}")
    weakest = sorted((name for name in found if found[name][0]), key=lambda name: -found[name][2])[:3]
    if weakest:
        lines.append(f"\nWeakest: {', '.join(weakest)}")
    return "\n".join(lines)
