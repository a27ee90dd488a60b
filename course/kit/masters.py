"""From one master, course/labNN_topic/notebook.py, to the lab and its solution.

    course/lab01_collectives/notebook.py     labs/01_collectives.ipynb       solutions/01_collectives.ipynb

    def ring(x, group):             def ring(x, group):             def ring(x, group):
        "x: [n]"                        "x: [n]"                        "x: [n]"
        # BEGIN SOLUTION                raise NotImplementedError       ... the answer ...
        ... the answer ...
        # END SOLUTION

Masters are jupytext percent files. Cells tagged "solution-only" stay out of the lab. Cell ids follow from a cell's
source, so an edit changes one id. The same markers turn
course/labNN_topic/torchrun.py into the scripts of labs/torchrun/ and solutions/torchrun/.
"""

import hashlib
import re
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

_BEGIN = re.compile(r"^(?P<indent>\s*)# BEGIN SOLUTION\s*$")
_END = re.compile(r"^\s*# END SOLUTION\s*$")
_MARKER_WORDS = re.compile(r"(BEGIN|END) SOLUTION")
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def name_of(master: Path) -> str:
    """NN_topic of the lab in whose folder the master lies."""
    return master.parent.name.removeprefix("lab")


def lab(master: Path, solved: Collection[str] = ()) -> NotebookNode:
    """The lab a learner opens: answers replaced by `raise NotImplementedError`, no outputs.

    solved: exercises whose answers stay, as in a lab that is half done. The answers of an exercise are those in the
    cells after the previous check, up to and including the cell of its own check.
    """
    cells = _read(master)
    answered = _answer_cells(cells, solved)
    kept = [cell for cell in cells if "solution-only" not in cell.metadata.get("tags", [])]
    return _notebook([_derive(master, cell, keep=cell["id"] in answered) for cell in kept])


def solution(master: Path) -> NotebookNode:
    """The solved lab, not executed yet."""
    return _notebook([_derive(master, cell, keep=True) for cell in _read(master)])


def script(master: Path, *, solved: bool = False) -> str:
    """The torchrun exercise of a script, or the script with its answers."""
    return _rewrite(master.read_text(encoding="utf-8"), str(master), keep=solved)


def checked(cell: NotebookNode) -> list[str]:
    """Names of the exercises that a cell checks: every `check("name", ...)` in its code."""
    if cell.cell_type != "code":
        return []
    code = re.sub(r"#.*", "", cell.source)
    return re.findall(r"""\bcheck\(\s*["']([\w-]+)["']""", code)


def write(notebook: NotebookNode) -> str:
    """A notebook as committed: sorted keys, one-space indentation, a final newline."""
    nbformat.validate(notebook)
    return nbformat.writes(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _rewrite(source: str, where: str, *, keep: bool) -> str:
    lines, begun = [], None
    for number, line in enumerate(source.splitlines(), start=1):
        if begin := _BEGIN.match(line):
            if begun:
                raise ValueError(f"{where}: line {number} begins a solution inside the one begun on line {begun}")
            if not begin["indent"]:
                raise ValueError(
                    f"{where}: line {number} begins a solution at column 0; put it inside a function, "
                    "otherwise the unsolved lab would stop there"
                )
            begun = number
            lines += [] if keep else [f"{begin['indent']}raise NotImplementedError"]
        elif _END.match(line):
            if not begun:
                raise ValueError(f"{where}: line {number} ends a solution that was never begun")
            begun = None
        elif _MARKER_WORDS.search(line):
            raise ValueError(f"{where}: line {number} must read exactly '# BEGIN SOLUTION' or '# END SOLUTION'")
        elif keep or not begun:
            lines.append(line)
    if begun:
        raise ValueError(f"{where}: the solution begun on line {begun} has no '# END SOLUTION' in the same cell")
    return "\n".join(lines) + ("\n" if source.endswith("\n") else "")


def _read(master: Path) -> list[NotebookNode]:
    """The master's cells with ids that depend on nothing but their source."""
    return _parsed(name_of(master), master.read_text(encoding="utf-8"))


@lru_cache(maxsize=64)  # more than there are labs; what is derived from the cells is new each time
def _parsed(name: str, text: str) -> list[NotebookNode]:
    seen, cells = {}, jupytext.reads(text, fmt="py:percent").cells
    for cell in cells:
        digest = hashlib.sha1(f"{name}\n{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        seen[digest] = seen.get(digest, 0) + 1
        cell["id"] = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    return cells


def _answer_cells(cells: list[NotebookNode], solved: Collection[str]) -> set[str]:
    """Ids of the cells that hold the answers of the exercises `solved`."""
    answers, waiting = set(), []
    for cell in cells:
        waiting.append(cell["id"])
        if names := checked(cell):
            answers |= set(waiting) if set(names) & set(solved) else set()
            waiting = []
    return answers


def _notebook(cells: list[NotebookNode]) -> NotebookNode:
    return nbformat.v4.new_notebook(cells=cells, metadata=nbformat.from_dict(_METADATA))


def _derive(master: Path, cell: NotebookNode, *, keep: bool) -> NotebookNode:
    tags = {"tags": cell.metadata["tags"]} if cell.metadata.get("tags") else {}
    if cell.cell_type == "markdown":
        return nbformat.v4.new_markdown_cell(cell.source, id=cell["id"], metadata=tags)
    if cell.cell_type == "code":
        source = _rewrite(cell.source, f"{name_of(master)}, cell '{_first_line(cell.source)}'", keep=keep)
        return nbformat.v4.new_code_cell(source, id=cell["id"], metadata=tags)
    raise ValueError(f"{name_of(master)} has a {cell.cell_type} cell; only code and markdown cells are allowed")


def _first_line(source: str) -> str:
    return next((line.strip() for line in source.splitlines() if line.strip()), "")
