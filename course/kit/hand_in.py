"""What a learner hands in and a teacher runs again: the cells of their notebooks, and what they say is passed.

    {"content": {"minillm": "0.1.0", "labs": {"01_collectives": {
        "passed": ["ring-all-gather", ...], "cells": [["3f9c0c1d7a52", "def all_gather ..."], ...]}}},
     "sha256": "..."}

The digest is of the content, so that a file that was cut or edited on its way is found. It is no proof of who wrote the
answers: passed is what passes again. For that the learner's answers go into the lab as it is handed out, whose checks
nobody has edited.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from course.kit import course, execute, masters, progress


@dataclass(frozen=True)
class Graded:
    """One lab of one learner. passed: when its answers were run again; stopped: the cell that raised, and its error."""

    lab: str
    claimed: tuple[str, ...]
    passed: tuple[str, ...]
    stopped: str = ""


def collect(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """The learner's notebooks of these labs and what they passed on this machine. ValueError if they passed nothing."""
    entries, labs = progress.load(), {}
    for name in names:
        file = folder / f"{name}.ipynb"
        if not file.exists():
            continue
        cells = [[cell.get("id", ""), cell.source] for cell in _read(file).cells if cell.cell_type == "code"]
        passed = sorted(key for key, entry in entries.items() if entry.lab == name and entry.passed)
        if passed:
            labs[name] = {"passed": passed, "cells": cells}
    if not labs:
        raise ValueError(f"there is nothing to export: no exercise of the notebooks in {folder} is passed yet")
    content = {"minillm": version("minillm"), "labs": labs}
    return {"content": content, "sha256": _digest(content)}


def read(file: Path) -> dict[str, Any]:
    """The labs of a file that `collect` made. ValueError if it is none, or was changed."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        content, digest = found["content"], found["sha256"]
        labs = dict(content["labs"])
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} is nothing that `progress --export` wrote") from error
    if digest != _digest(content):
        raise ValueError(f"{file} was changed after it was written: its content does not have the digest that it names")
    if unknown := sorted(labs.keys() - course.masters(course.home()).keys()):
        raise ValueError(f"{file} holds answers of {', '.join(unknown)}, which this copy of the course does not have")
    return labs


def grade(lab: str, handed_in: dict[str, Any], scratch: Path, timeout_s: float = 180.0) -> Graded:
    """Run the lab with these answers in it, in `scratch`, and see which checks pass."""
    notebook = with_answers(masters.lab(course.masters(course.home())[lab]), handed_in["cells"])
    file, stopped = scratch / f"{lab}.progress.json", ""
    try:
        execute.execute(notebook, scratch, timeout_s=timeout_s, strict=False, progress_file=file)
    except execute.NotebookFailed as failure:
        stopped = str(failure)
    found = json.loads(file.read_text(encoding="utf-8"))["exercises"] if file.exists() else {}
    passed = tuple(sorted(name for name, entry in found.items() if entry["passed"]))
    return Graded(lab, tuple(handed_in["passed"]), passed, stopped)


def with_answers(lab: NotebookNode, cells: list[list[str]]) -> NotebookNode:
    """The lab with a learner's version of each cell that asks for an answer, and with the cells that they added."""
    asks = {cell.id for cell in lab.cells if "raise NotImplementedError" in cell.source}
    theirs, added, last = {}, {}, ""
    known = {cell.id for cell in lab.cells}
    for cell_id, source in cells:
        if cell_id in known:
            theirs[cell_id], last = source, cell_id
        else:
            added.setdefault(last, []).append(source)
    kept = [nbformat.v4.new_code_cell(source) for source in added.get("", ())]
    for cell in lab.cells:
        if cell.id in asks and cell.id in theirs:
            cell.source = theirs[cell.id]
        kept += [cell, *map(nbformat.v4.new_code_cell, added.get(cell.id, ()))]
    return nbformat.v4.new_notebook(cells=kept, metadata=lab.metadata)


def _read(file: Path) -> NotebookNode:
    try:
        return nbformat.read(file, as_version=4)
    except Exception as error:  # of json, of nbformat's schemas
        raise ValueError(f"{file} is no notebook that can be read: {str(error).splitlines()[0]}") from error


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
