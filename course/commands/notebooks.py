"""`python -m minillm notebooks`: build every lab, execute the solutions that are out of date, or say which those are.

An executed solution carries a fingerprint of the code that made each cell's outputs. It is out of date when its master
gives other cells, or when that code has changed since.
"""

import sys
import time
from pathlib import Path
from typing import Annotated

import nbformat
import typer

import minillm
from course.kit import course, masters
from course.kit.api import group_page
from course.kit.execute import NotebookFailed, execute, off_rows, under_load
from course.kit.fingerprint import KEY, changed, fingerprint
from course.kit.reach import Library

UNDER_LOAD = "shows a machine card that was measured while the machine was busy"


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Labs, such as 01 or 01_collectives, whose solutions are executed whatever their state."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Change nothing; fail if anything is out of date.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Execute every solution, up to date or not.")] = False,
    labs_only: Annotated[bool, typer.Option("--labs-only", help="Build the labs, do not execute solutions.")] = False,
    root: Annotated[Path | None, typer.Option(help="The course, if not the one we are in.")] = None,
) -> int:
    """Build labs/ and solutions/torchrun/ from their masters in course/ and execute solutions/*.ipynb.

    Without names, only those solutions are executed that are missing, differ from their master, or were made by code
    that has changed since: a cell's own, or what it reaches through imports in course/ and minillm/.
    """
    home = course.root(root)
    chosen = course.pick(names or [], sorted({*course.masters(home), *course.scripts(home)}))
    if check:
        problems = stale(home, chosen if names else None)
        for problem in problems:
            print(problem, file=sys.stderr)
        if problems:
            print("Repair with: python -m minillm notebooks", file=sys.stderr)
        else:
            print(f"{len(chosen)} labs are up to date")
        return 1 if problems else 0
    build(home, chosen)
    if labs_only:
        return 0
    solutions, library = [name for name in chosen if name in course.masters(home)], _library(home)
    fresh = [] if names or everything else [name for name in solutions if not _stale_solution(home, name, library)]
    if fresh:
        print(f"{len(fresh)} solutions are up to date; --all executes them, too")
    solved = [solve(home, name, library) for name in solutions if name not in fresh]
    return 0 if all(solved) else 1


def build(home: Path, names: list[str]) -> None:
    """Write the labs and scripts of `names`, and the generated pages."""
    for path, text in (_expected(home, names) | _pages(home)).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def solve(home: Path, name: str, library: Library) -> bool:
    """Execute a solution and write it with its fingerprint; False, and nothing written, if a cell fails or shows a
    machine card that was measured under load."""
    started, target = time.monotonic(), home / "solutions" / f"{name}.ipynb"
    notebook = masters.solution(course.masters(home)[name])
    made_by = fingerprint(notebook, library)  # of the code as it is before the cells run
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        executed = execute(notebook, target.parent)
    except NotebookFailed as error:
        print(f"{name}: {error}", file=sys.stderr)
        return False
    if under_load(executed):
        print(f"{name}: {UNDER_LOAD}; when it is quiet: python -m minillm machine --refresh", file=sys.stderr)
        return False
    executed.metadata[KEY] = made_by.to_json()
    target.write_text(masters.write(executed), encoding="utf-8")
    advice = "execute it again on a quiet machine or explain it in the text"
    for row, values in off_rows(executed):
        print(f"{name}: noisy row '{row}' is off in the stored solution ({values}): {advice}")
    print(f"{name}: {time.monotonic() - started:.1f} s, {target.stat().st_size / 1e3:.0f} kB")
    return True


def stale(home: Path, names: list[str] | None = None) -> list[str]:
    """One sentence per file that its master no longer gives; `names` None also looks for files without a master."""
    known = sorted({*course.masters(home), *course.scripts(home)})
    chosen = known if names is None else names
    expected = _expected(home, chosen) | _pages(home)
    problems = []
    for path, text in expected.items():
        if not path.exists():
            problems.append(f"{path.relative_to(home)} is missing")
        elif path.read_text(encoding="utf-8") != text:
            problems.append(f"{path.relative_to(home)} differs from its master")
    library = _library(home)
    for name in chosen:
        if name in course.masters(home):
            problems += _stale_solution(home, name, library)
    if names is None:
        made = {*expected, *(home / "solutions" / f"{name}.ipynb" for name in course.masters(home))}
        found = [*home.glob("labs/*.ipynb"), *home.glob("*/torchrun/*.py"), *home.glob("solutions/*.ipynb")]
        problems += [f"{path.relative_to(home)} has no master" for path in sorted(set(found) - made)]
    return problems


def _expected(home: Path, names: list[str]) -> dict[Path, str]:
    """What labs/ and solutions/torchrun/ must hold, by path."""
    notebooks, scripts = course.masters(home), course.scripts(home)
    files = {home / "labs" / f"{n}.ipynb": masters.write(masters.lab(notebooks[n])) for n in names if n in notebooks}
    for name in (name for name in names if name in scripts):
        files[home / "labs" / "torchrun" / f"{name}.py"] = masters.script(scripts[name])
        files[home / "solutions" / "torchrun" / f"{name}.py"] = masters.script(scripts[name], solved=True)
    return files


def _pages(home: Path) -> dict[Path, str]:
    """Pages of the documentation that are generated, where there is documentation."""
    return {home / "docs" / "group.md": group_page()} if (home / "docs").is_dir() else {}


def _library(home: Path) -> Library:
    """The course's modules, and minillm's where the course does not hold them."""
    return Library(home, Path(minillm.__file__).parents[1])


def _stale_solution(home: Path, name: str, library: Library) -> list[str]:
    path = home / "solutions" / f"{name}.ipynb"
    if not path.exists():
        return [f"{path.relative_to(home)} is missing"]
    committed, fresh = nbformat.read(path, as_version=4), masters.solution(course.masters(home)[name])
    codes = [cell for cell in committed.cells if cell.cell_type == "code"]
    outputs = [output for cell in codes for output in cell.outputs]
    problems = []
    if _bare(committed) != _bare(fresh):
        problems.append("differs from its master")
    elif not outputs or any(cell.execution_count is None for cell in codes if cell.source.strip()):
        problems.append("has not been executed")
    elif KEY not in committed.metadata:
        problems.append("does not say which code made its outputs")
    elif change := changed(committed, fingerprint(fresh, library)):
        problems.append(change)
    if under_load(committed):
        problems.append(UNDER_LOAD)
    if any(output.output_type == "error" for output in outputs):
        problems.append("shows an error")
    return [f"{path.relative_to(home)} {problem}" for problem in problems]


def _bare(notebook: nbformat.NotebookNode) -> str:
    """Everything but outputs, execution counts and the fingerprint."""
    copy = nbformat.from_dict(notebook)
    copy.metadata.pop(KEY, None)
    for cell in copy.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return masters.write(copy)
