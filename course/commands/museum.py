"""`python -m minillm museum`: lists the exhibits of lab 22, plays one in the terminal, plants one for others."""

import shlex
import shutil
import textwrap
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from typer import Argument, Option

from course.kit.card import Card
from course.lab22_bug_museum import receipts
from course.lab22_bug_museum.game import Case, visit
from course.lab22_bug_museum.plant import plant as plant_run

FOLDER = Path("broken_run")
WIDTH = 110  # of a line that is still easy to read
COMMANDS = "order NAME..., accuse LETTER..., code, fix FILE, debrief, card, q"


def command(
    exhibit: Annotated[str | None, Argument(help="The exhibit to play.", show_default="list them all")] = None,
    seed: Annotated[int | None, Option(help="Of the run that is measured.", show_default="drawn", min=0)] = None,
    fix: Annotated[Path | None, Option(help="Judge the functions of this Python file as a repair, and end.")] = None,
    plant: Annotated[int | None, Option(help="Write a broken run to find: number N draws which.", min=0)] = None,
    out: Annotated[
        Path | None,
        Option(help="The folder that --plant makes; the teacher's sheet lies beside it.", show_default=str(FOLDER)),
    ] = None,
) -> int:
    """Real bugs planted in minillm: symptoms, measurements that cost minutes, a culprit to name and code to repair."""
    if out is not None and plant is None:
        raise ValueError(f"--out {out} is for a run that is planted: add --plant N, or leave it out")
    if fix is not None and (exhibit is None or plant is not None):
        raise ValueError(f"--fix {fix} repairs an exhibit: name it, as in `museum EXHIBIT --fix {fix}`")
    if plant is not None:
        out = out or FOLDER
        sheet = plant_run(plant, out)
        print(f"Written: {out} (README.md says what was reported), and {sheet} for the teacher")
        return 0
    if exhibit is None:
        print(receipts.hall())
        return 0
    case = visit(exhibit, seed)
    if fix is not None:
        card = case.repair(*functions_of(fix, case))
        _say(card)
        return 0 if card.good else 1
    play(case, input, _say)
    return 0


def play(case: Case, ask: Callable[[str], str], say: Callable[[Any], None]) -> None:
    """Plays a case: `ask` returns what the player types, `say` shows something. Ends with q or the end of input."""
    say(case)
    say(f"Type: {COMMANDS}")
    while True:
        try:
            words = shlex.split(ask(f"{case.clock()} > "))
        except (EOFError, KeyboardInterrupt):
            return
        except ValueError as error:  # a quotation mark without its other half
            say(str(error))
            continue
        if words and words[0] in ("q", "quit", "exit"):
            return
        try:
            say(_done(case, words))
        except ValueError as error:
            say(str(error))


def _done(case: Case, words: list[str]) -> Any:
    match words:
        case ["order", *names]:
            return case.order(*names)
        case ["accuse", *letters]:
            return case.accuse(*letters)
        case ["code"]:
            return case.code()
        case ["fix", file]:
            return case.repair(*functions_of(Path(file), case))
        case ["debrief"]:
            return case.debrief()
        case ["debrief", "now"]:
            return case.debrief(give_up=True)
        case ["card"]:
            return case
    return f"Type one of: {COMMANDS}; `debrief now` gives up."


def functions_of(path: Path, case: Case) -> list[Callable]:
    """The functions of a file that carry the names of the exhibit's places, in order. ValueError for what lacks."""
    if not path.is_file():
        raise ValueError(f"{path} is no file: write the repaired functions into a Python file and name it")
    module = _loaded(path)
    names = [fault.target.rpartition(":")[2].rpartition(".")[2] for fault in case.exhibit.faults]
    lacking = [name for name in names if not callable(getattr(module, name, None))]
    if lacking:
        raise ValueError(
            f"{path} defines no {' and no '.join(lacking)}: the functions to repair are {', '.join(names)}"
        )
    return [getattr(module, name) for name in names]


def _loaded(path: Path) -> ModuleType:
    """The file as a module that nobody can import, so that its functions travel to ranks by value."""
    spec = spec_from_file_location("__main__", path)
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    return module


def _say(thing: Any) -> None:
    print(_folded(str(thing)) if isinstance(thing, str | Card | Case) else thing, flush=True)


def _folded(text: str) -> str:
    """Lines that are wider than the terminal, folded between words with their own indentation."""
    width, lines = min(shutil.get_terminal_size().columns, WIDTH), []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(line, width, subsequent_indent=indent, drop_whitespace=True) or [""]
    return "\n".join(lines)
