"""Which code made a notebook's outputs: a digest per cell, kept in the executed solution's metadata.

A cell stands on the statements of the notebook that bind what it reads, and on whatever those read from the course's
clone (see `reach`). `check("name", f)` also stands on the verifier of that name, without its hints. Comments and
docstrings count where a cell shows them: `inspect.getsource` shows the text as it is, and `show(view)` the first
paragraph of the view's docstring. Data files that code names count as they are. Third-party packages, the Python
version and what builds and runs notebooks do not count.
"""

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nbformat import NotebookNode

from course.kit.interact import first_paragraph
from course.kit.reach import Library, Node, Source, parts

KEY = "minillm"  # in a notebook's metadata
HERE = "<notebook>"
LENGTH = 12  # digits of a digest
NAMED = 3  # files that a sentence names


@dataclass(frozen=True)
class Fingerprint:
    """cells: digest by cell id. files: digest of what the notebook stands on in each file, by the file's path.

    files_of: the paths of what each cell stands on, by its id.
    """

    cells: dict[str, str]
    files: dict[str, str]
    files_of: dict[str, set[str]]

    def to_json(self) -> dict[str, dict[str, str]]:
        return {"cells": self.cells, "files": self.files}


def fingerprint(notebook: NotebookNode, library: Library) -> Fingerprint:
    """Of the code cells of a solution whose imports are found in `library`."""
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    cells, files_of, digests = {}, {}, {}
    for cell, found in zip(codes, _parts_by_cell([cell.source for cell in codes], library), strict=True):
        cells[cell["id"]] = _digest(digest for _, digest in found)
        files_of[cell["id"]] = {file for file, _ in found} - {HERE}
        for file, digest in found:
            digests.setdefault(file, set()).add(digest)
    files = {file: _digest(found) for file, found in sorted(digests.items()) if file != HERE}
    return Fingerprint(cells, files, files_of)


def changed(executed: NotebookNode, now: Fingerprint) -> str:
    """Names the first cell of an executed notebook whose code has changed since, and the files; "" if none has."""
    then = executed.metadata[KEY]
    heads = {cell["id"]: _head(cell.source) for cell in executed.cells}
    stale = [each for each, digest in now.cells.items() if then["cells"].get(each) != digest]
    if not stale:
        return ""
    differ = {file for file, digest in now.files.items() if then["files"].get(file) != digest}
    files = sorted(differ & set().union(*(now.files_of[each] for each in stale))) or sorted(
        set(then["files"]) - set(now.files)
    )
    others = f" and {len(stale) - 1} more" if len(stale) > 1 else ""
    where = f" in {', '.join(files[:NAMED])}{', ...' if len(files) > NAMED else ''}" if files else ""
    return f"was executed before the code of cell '{heads[stale[0]]}'{others} changed{where}"


def _head(source: str) -> str:
    return (source.strip().splitlines() or [""])[0]


def _parts_by_cell(sources: list[str], library: Library) -> Iterator[set[tuple[str, str]]]:
    """Of each cell, (file, digest) of every statement that it stands on and of every text that it shows."""
    plain = [re.sub(r"^(\s*)[%!].*$", r"\1pass", source, flags=re.MULTILINE) for source in sources]
    notebook = Source(HERE, "\n".join(plain))
    imported = {chain[0] for chains in notebook.imports.values() for chain in chains}
    verifiers = {}
    for module in [*library.modules("course/lab*/checks*.py"), *imported]:
        verifiers |= library.verifiers(module)
    cell_of = [index for index, source in enumerate(plain) for _ in ast.parse(source).body]
    for cell in range(len(sources)):
        own = {number for number, where in enumerate(cell_of) if where == cell}
        earlier = {number for number, where in enumerate(cell_of) if where <= cell}
        statements, roots = _stand_on(notebook, own, earlier, library)
        for call in (call for number in own for call in _calls("check", notebook.statements[number])):
            roots |= {verifiers[name] for name in parts(call.args[0]) if name in verifiers}
        reached = frozenset().union(*map(library.reached, roots))
        found = {(library.file(node[0]), library.digest(node)) for node in reached}
        found |= {(HERE, notebook.digest(number)) for number in statements}
        yield found | set(_shown(notebook, own, library))


def _stand_on(notebook: Source, own: set[int], earlier: set[int], library: Library) -> tuple[set[int], set[Node]]:
    """Statements of the notebook up to a cell that the cell's own stand on, and what all these read from files."""
    statements, roots, waiting = set(own), set(), list(own)
    while waiting:
        found = library.needs_of(notebook, waiting.pop())
        roots |= {node for node in found if node[0] != HERE}
        new = {number for name, number in found if name == HERE and number in earlier} - statements
        statements |= new
        waiting += new
    return statements, roots


def _shown(notebook: Source, own: set[int], library: Library) -> Iterator[tuple[str, str]]:
    """(file, digest) of every text of a file that a cell displays."""
    for number in own:
        code = notebook.statements[number]
        if any(isinstance(node, ast.Attribute) and node.attr == "getsource" for node in ast.walk(code)):
            for module, place in library.needs_of(notebook, number):
                if source := library.source(module):
                    yield library.file(module), _digest([source.text_of(place)])
        for call in _calls("show", code):
            views = {node for chain in parts(call.args[0]) for node in library.follow(notebook, chain)}
            for module, place in views:
                source = library.source(module)
                if source and (text := ast.get_docstring(source.statements[place])):
                    yield library.file(module), _digest([first_paragraph(text)])


def _calls(name: str, tree: ast.AST) -> Iterator[ast.Call]:
    """Calls of a function by its bare name, with an argument."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name and node.args:
            yield node


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha1("\n".join(sorted(texts)).encode()).hexdigest()[:LENGTH]
