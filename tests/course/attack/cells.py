"""The cell of an exercise as a syntax tree, and the candidates that are made from it.

A candidate is the text of a whole cell with one thing changed. Its key names that change by the statement before and
after, so a table of verdicts survives edits elsewhere in the lab.
"""

import ast
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property

from course.kit import exercises
from course.kit.answers import answers_of, checked_exercise

KINDS = ("mutant", "cheat", "variant")


@dataclass(frozen=True)
class Candidate:
    """One changed answer. kind: mutant and cheat must be refused, a variant must pass.

    edit: what was changed, in one line. text: the cell.
    """

    exercise: str
    kind: str
    edit: str
    text: str

    @property
    def key(self) -> tuple[str, str]:
        return self.exercise, self.edit


@dataclass(frozen=True)
class Cell:
    """The cell of the master that checks an exercise."""

    exercise: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def solution_lines(self) -> set[int]:
        """Numbers of the lines that a learner writes."""
        inside, lines = False, set()
        for number, line in enumerate(self.text.splitlines(), start=1):
            if line.strip() in ("# BEGIN SOLUTION", "# END SOLUTION"):
                inside = "BEGIN" in line
            elif inside:
                lines.add(number)
        return lines

    @cached_property
    def answered(self) -> list[ast.FunctionDef | ast.ClassDef]:
        """The functions and classes that are handed to the check."""
        checks = [node for node in ast.walk(self.tree) if checked_exercise(node) == self.exercise]
        names = {node.id for node in ast.walk(checks[0].args[1]) if isinstance(node, ast.Name)}
        kinds = (ast.FunctionDef, ast.ClassDef)
        return [node for node in self.tree.body if isinstance(node, kinds) and node.name in names]

    @property
    def functions(self) -> list[ast.FunctionDef]:
        return [node for node in self.answered if isinstance(node, ast.FunctionDef)]

    def nodes(self) -> Iterator[tuple[int, ast.AST]]:
        """(number in the walk of the tree, node) of all that a learner writes, but for the texts of errors."""
        skipped: set[int] = set()
        for number, node in enumerate(ast.walk(self.tree)):
            if id(node) in skipped or isinstance(node, (ast.Raise, ast.JoinedStr)):
                skipped |= {id(child) for child in ast.iter_child_nodes(node)}
            if id(node) not in skipped and getattr(node, "lineno", 0) in self.solution_lines:
                yield number, node

    def replaced(self, kind: str, number: int, new: ast.AST, label: str = "") -> Candidate | None:
        """The cell with `new` in place of a node; None if its text stays the same."""
        tree = deepcopy(self.tree)
        old = list(ast.walk(tree))[number]
        parents = {id(child): parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
        statement = old
        while not isinstance(statement, ast.stmt):
            statement = parents[id(statement)]
        before = header(statement)
        _put(parents[id(old)], old, new)
        after = header(new if statement is old else statement)
        text = ast.unparse(ast.fix_missing_locations(tree))
        if text == ast.unparse(self.tree):
            return None
        return Candidate(self.exercise, kind, f"{label}{': ' if label else ''}{before} => {after}", text)

    def prepared(self, kind: str, edit: str, *, before: str = "", change: str = "") -> Candidate:
        """The cell with statements in front of it, and others between the answer and its check."""
        body = deepcopy(self.tree.body)
        checked = next(index for index, statement in enumerate(body) if any(map(checked_exercise, ast.walk(statement))))
        statements = [*ast.parse(before).body, *body[:checked], *ast.parse(change).body, *body[checked:]]
        return Candidate(self.exercise, kind, edit, ast.unparse(ast.Module(statements, type_ignores=[])))


def cell_of(exercise: str) -> Cell:
    return Cell(exercise, answers_of(exercises.find(exercise).lab).cell(exercise))


def header(statement: ast.AST) -> str:
    """A statement in one line; of a compound one what stands before its body."""
    if not isinstance(statement, ast.stmt):
        statement = ast.Expr(statement)
    bare = deepcopy(statement)
    for field in ("body", "orelse", "handlers", "finalbody"):
        if getattr(bare, field, None):
            setattr(bare, field, [ast.Pass()] if field == "body" else [])
    text = ast.unparse(ast.fix_missing_locations(bare))
    return " ".join(line.strip() for line in text.splitlines() if line.strip() != "pass" or text == "pass")


def unique(candidates: Iterator[Candidate | None]) -> list[Candidate]:
    """Without those that are the same text; a second change with the same key gets a number."""
    texts, seen, kept = set(), {}, []
    for candidate in candidates:
        if candidate is None or candidate.text in texts:
            continue
        texts.add(candidate.text)
        seen[candidate.key] = seen.get(candidate.key, 0) + 1
        if seen[candidate.key] > 1:
            edit = f"{candidate.edit} ({seen[candidate.key]})"
            candidate = Candidate(candidate.exercise, candidate.kind, edit, candidate.text)
        kept.append(candidate)
    return kept


def _put(parent: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for field, value in ast.iter_fields(parent):
        if value is old:
            setattr(parent, field, new)
        elif isinstance(value, list):
            setattr(parent, field, [new if each is old else each for each in value])
