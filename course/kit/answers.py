"""The course's own answers: each is written once, between BEGIN SOLUTION and END SOLUTION in a lab's notebook.py.

    right = answers_of("01_collectives")
    right.all_gather                        # the function as the solved notebook defines it
    answer_to("ring-all-gather", "01_collectives")      # what the notebook hands to check("ring-all-gather", ...)
    changed_answer("ring-all-gather", "01_collectives", {"rank - 1": "rank + 1"})   # the same, but for an edit

A master is plain Python, so nothing else of it is run: from the statement that defines a name, back to the imports and
helpers which that one reads, and `check("name", x)` counts as x. What is made this way belongs to a module that cannot
be imported, so cloudpickle sends it to ranks by value, as it does with what a notebook's cell defines.
"""

import ast
import re
import symtable
from copy import deepcopy
from functools import cache
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

from course.kit import course

EDITED = " (edited)"  # what the file of an edited answer is called in tracebacks: it is nobody's file, as a learner's


class Answers:
    """The names of one solved master as attributes; each is made when it is first asked for."""

    def __init__(self, master: Path):
        self._begin(master, ast.parse(master.read_text(encoding="utf-8"), str(master)).body, str(master))
        self._uses = [names_of(statement) for statement in self._statements]

    def _begin(self, master: Path, statements: list[ast.stmt], file: str) -> None:
        """file: what tracebacks call it."""
        self._master, self._statements, self._file = master, statements, file
        self._module = ModuleType(f"course.{master.parent.name}.notebook")
        self._module.__file__ = file
        self._done: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not any(name in binds for _, binds in self._uses):
            raise AttributeError(f"{self._master} defines no '{name}'")
        self._run({name}, len(self._statements))
        return self._module.__dict__[name]

    def __reduce__(self) -> tuple[type["Answers"], tuple[Path]]:
        return Answers, (self._master,)  # another process makes its own

    def to(self, exercise: str) -> Any:
        """What the master hands to `check(exercise, ...)`. ValueError if it checks no such exercise."""
        for index, statement in enumerate(self._statements):
            for node in ast.walk(statement):
                if checked_exercise(node) == exercise:
                    candidate = ast.Expression(node.args[1])
                    self._run(names_of(candidate)[0], index)
                    return eval(compile(candidate, self._file, "eval"), self._module.__dict__)
        raise ValueError(f"{self._master} has no check('{exercise}', ...), so the exercise has no answer there")

    def changed(self, exercise: str, edits: dict[str, str]) -> Any:
        """What the master would hand to `check(exercise, ...)` if each text of `edits` were another in that cell.

        ValueError if a text does not stand there exactly once.
        """
        cell = self.cell(exercise)
        for old, new in edits.items():
            if cell.count(old) != 1:
                raise ValueError(
                    f"{old!r} stands {cell.count(old)} times in the cell of {self._master} that checks '{exercise}'; "
                    "an edit needs a text that stands there once"
                )
            cell = cell.replace(old, new)
        return self.rewritten(exercise, cell)

    def cell(self, exercise: str) -> str:
        """The text of the cell that checks the exercise."""
        text = self._master.read_text(encoding="utf-8")
        first, last = _cell_of(text, exercise)
        return "".join(text.splitlines(keepends=True)[first:last])

    def place(self, exercise: str) -> tuple[str, int]:
        """(the master's file, how many of its lines come before the cell that checks the exercise)."""
        return self._file, _cell_of(self._master.read_text(encoding="utf-8"), exercise)[0]

    def rewritten(self, exercise: str, cell: str) -> Any:
        """What the master would hand to `check(exercise, ...)` if the cell that checks it had this text."""
        first, last = _cell_of(self._master.read_text(encoding="utf-8"), exercise)
        edited = ast.increment_lineno(ast.parse(cell), first).body
        inside = [index for index, statement in enumerate(self._statements) if first < statement.lineno <= last]
        before, after = slice(inside[0]), slice(inside[-1] + 1, None)
        copy = Answers.__new__(Answers)
        statements = [*self._statements[before], *edited, *self._statements[after]]
        copy._begin(self._master, statements, f"{self._master}{EDITED}")
        copy._uses = [*self._uses[before], *map(names_of, edited), *self._uses[after]]
        return copy.to(exercise)

    def _run(self, wanted: set[str], end: int) -> None:
        """Execute, among the first `end` statements, those that bind a wanted name, and what they stand on."""
        needed = []
        for index in reversed(range(end)):
            reads, binds = self._uses[index]
            if binds & wanted:
                needed.append((index, set(wanted)))
                wanted = wanted | reads
        for index, names in reversed(needed):
            if index not in self._done:
                code = ast.Module([deepcopy(_only(self._statements[index], names))], type_ignores=[])
                exec(compile(_Unchecked().visit(code), self._file, "exec"), self._module.__dict__)
                if not isinstance(self._statements[index], (ast.Import, ast.ImportFrom)):
                    self._done.add(index)


@cache
def answers_of(lab: str) -> Answers:
    """The answers of a lab (NN_topic) of this course."""
    masters = course.masters(course.home())
    if lab not in masters:
        raise ValueError(f"lab '{lab}' has no notebook.py in the course, so nobody knows its answers")
    return Answers(masters[lab])


@cache
def answer_to(exercise: str, lab: str) -> Any:
    """The course's answer to an exercise; the same object at every call."""
    return answers_of(lab).to(exercise)


def changed_answer(exercise: str, lab: str, edits: dict[str, str]) -> Any:
    """The course's answer to an exercise with some of its text replaced: {old: new}."""
    return answers_of(lab).changed(exercise, edits)


@cache
def answer_text(exercise: str, lab: str) -> str:
    """What stands between BEGIN and END SOLUTION in the cell that checks the exercise, as a third hint shows it."""
    text = course.masters(course.home())[lab].read_text(encoding="utf-8")
    first, last = _cell_of(text, exercise)
    cell = "\n".join(text.splitlines()[first:last])
    return "\n".join(map(dedent, re.findall(r"# BEGIN SOLUTION\n(.*?)\s*# END SOLUTION", cell, re.DOTALL)))


@cache
def checked_by(lab: str) -> tuple[str, ...]:
    """Names of the exercises in the order in which the lab's notebook checks them; () for a lab without a master."""
    master = course.masters(course.home()).get(lab)
    statements = ast.parse(master.read_text(encoding="utf-8")).body if master else []
    return tuple(filter(None, (checked_exercise(node) for statement in statements for node in ast.walk(statement))))


def names_of(tree: ast.AST, text: str = "") -> tuple[set[str], set[str]]:
    """(names that the code reads from its module, names that it binds there or changes by index or attribute).

    text: the code as it is written, where that is at hand.
    """
    table = symtable.symtable(text or ast.unparse(tree), "<statement>", "exec")
    reads = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced()} | _globals_below(table)
    binds = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    return reads, binds | {name.id for name in _changed(tree)}


def _globals_below(table: symtable.SymbolTable) -> set[str]:
    found = set()
    for child in table.get_children():
        found |= {s.get_name() for s in child.get_symbols() if s.is_global() and s.is_referenced()}
        found |= _globals_below(child)
    return found


def _changed(tree: ast.AST) -> list[ast.Name]:
    """`table` of table["a"] = 1 and of table.a = 1, outside functions and classes."""
    stores, waiting = [], [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            stores.append(node.value)
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)
    return [node for node in stores if isinstance(node, ast.Name)]


def checked_exercise(node: ast.AST) -> str | None:
    """The exercise that a call of `check` names, or None."""
    is_check = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "check"
    return node.args[0].value if is_check and len(node.args) == 2 and isinstance(node.args[0], ast.Constant) else None


def _cell_of(text: str, exercise: str) -> tuple[int, int]:
    """The lines [first, last) of the cell that checks the exercise."""
    checked = next(n.lineno for n in ast.walk(ast.parse(text)) if checked_exercise(n) == exercise)
    starts = [number for number, line in enumerate(text.splitlines()) if line.startswith("# %%")]
    starts.append(len(text.splitlines()))
    return max(s for s in starts if s < checked), min(s for s in starts if s >= checked)


def _only(statement: ast.stmt, names: set[str]) -> ast.stmt:
    """An import of the wanted names alone; any other statement as it is."""
    if isinstance(statement, ast.Import):
        kept = [alias for alias in statement.names if (alias.asname or alias.name.split(".")[0]) in names]
        return ast.copy_location(ast.Import(kept), statement)
    if isinstance(statement, ast.ImportFrom):
        kept = [alias for alias in statement.names if (alias.asname or alias.name) in names]
        return ast.copy_location(ast.ImportFrom(statement.module, kept, statement.level), statement)
    return statement


class _Unchecked(ast.NodeTransformer):
    """check("name", x) -> x"""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return self.visit(node.args[1]) if checked_exercise(node) else self.generic_visit(node)
