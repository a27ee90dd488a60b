"""The strict harness: what must hold of every exercise and every lab, whoever wrote it.

    in the unsolved lab every check says "not attempted"
    what an exercise leaves unwritten is replaced by what its check returns, before anything else reads it
    every exercise passes alone, where nothing else is solved
    every mistake is rejected with its sentence, every alternative is accepted

From the first two follows that an unsolved lab computes what its solution does, and nbval runs the solutions in a
kernel, strictly. So cells are run here for the checks alone: those that a check stands on, in this process, where they
share a namespace that is `__main__`, as in a notebook.
"""

import ast
import builtins
import contextlib
import linecache
import os
import re
import sys
import types
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib
from nbformat import NotebookNode

from course.kit import checks, exercises, masters, progress
from course.kit.answers import checked_exercise, names_of
from course.kit.checks import verify


def check_unsolved(master: Path, scratch: Path) -> None:
    """The lab as handed out checks every exercise that it registers, and no check takes a stub for an attempt."""
    notebook, lab = masters.lab(master), masters.name_of(master)
    registered = {exercise.name for exercise in exercises.all_exercises(lab)}
    names = _exercises_of(notebook)
    assert registered == set(names), (
        f"{lab} registers {sorted(registered - set(names))} without checking them "
        f"and checks {sorted(set(names) - registered)}, which it does not register"
    )
    outcomes = run(notebook, master, scratch, only=needed(notebook, names))
    tried = {name: outcomes[name].last for name in names if outcomes[name].last != "not attempted"}
    assert not tried, f"{lab}: nothing is solved, yet the checks say {tried}"


def check_rebound(master: Path) -> None:
    """No cell of the lab reads what a learner has not written yet, or what only the solution has.

    A name that an answer defines may be read in a function's body before its check and called after it; anything else
    comes after `name = check(...)`, which leaves the course's own version there.
    """
    solved, lab = {cell.id: cell.source for cell in masters.solution(master).cells}, masters.name_of(master)
    unwritten, promised, bound, read = set(), set(), set(dir(builtins)), set()
    for cell in masters.lab(master).cells:
        if cell.cell_type != "code":
            continue
        answered = ast.parse(_plain(solved[cell.id])).body
        for statement, answer in zip(ast.parse(_plain(cell.source)).body, answered, strict=True):
            reads, binds = names_of(statement)[0] | names_of(answer)[0], names_of(statement)[1]
            bound, read = bound | binds, read | reads
            if ast.dump(statement) != ast.dump(answer):
                unwritten |= binds
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                promised |= reads & unwritten - binds
            elif not any(map(checked_exercise, ast.walk(statement))):
                early = reads & unwritten
                assert not early, (
                    f"{lab}: '{ast.unparse(statement)[:60]}' reads {sorted(early)} before a check binds it"
                )
            elif isinstance(statement, ast.Assign) and _replaces(statement.value, unwritten):
                unwritten, promised = unwritten - binds, promised - binds
    assert not promised, f"{lab}: functions read {sorted(promised)}, which no `name = check(...)` binds again"
    assert read <= bound, f"{lab}: no cell of the unsolved lab binds {sorted(read - bound)}"


def _replaces(value: ast.expr, unwritten: Collection[str]) -> bool:
    """check(...), or check(...) if ... else something that later cells can use: neither a constant nor what the learner
    has not written."""
    if isinstance(value, ast.IfExp):
        return (
            not isinstance(value.orelse, ast.Constant)
            and checked_exercise(value.body) is not None
            and not names_of(value.orelse)[0] & set(unwritten)
        )
    return checked_exercise(value) is not None


def check_alone(master: Path, name: str, scratch: Path) -> None:
    """Only exercise `name` is solved: it passes and no other does. Runs its check and what that stands on."""
    notebook = masters.lab(master, solved=[name])
    _same_passed(master, [name], run(notebook, master, scratch, only=needed(notebook, [name])))


def check_half(master: Path, scratch: Path) -> None:
    """Every second exercise is solved: those pass, the others do not, and the lab runs to its end."""
    names = _exercises_of(masters.lab(master))
    _same_passed(master, names[::2], run(masters.lab(master, solved=names[::2]), master, scratch))


def needed(notebook: NotebookNode, names: Collection[str]) -> set[int]:
    """Indices of the cells that check `names`, and of all before them that set a name which these, or those, read."""
    cells, wanted, found = notebook.cells, set(), set()
    for index in reversed(range(len(cells))):
        if cells[index].cell_type != "code":
            continue
        reads, sets = names_of(ast.parse(_plain(cells[index].source)))
        if sets & wanted or set(names) & set(masters.checked(cells[index])):
            found.add(index)
            wanted |= reads
    return found


def check_mistake(answer: exercises.Answer, seed: int = 1) -> None:
    """A wrong answer fails, and the learner reads its sentence."""
    exercise = exercises.find(answer.exercise)
    outcome = checks.verify(exercise, answer.candidate, seed)
    who = f"mistake '{answer.label}' of '{answer.exercise}'"
    assert outcome.status == "failed", f"{who} is not rejected but {outcome.status}"
    if answer.says:
        with mock.patch.object(checks, "verify", _verify_once):
            said = checks.diagnose(exercise, outcome, seed)
        assert said == answer.says, f"{who} draws {said!r}, not its own sentence, after {outcome.message!r}"
    else:
        fits = re.search(answer.expect, outcome.message, re.IGNORECASE)
        assert fits, f"{who} is rejected with {outcome.message!r}, which lacks {answer.expect!r}"


_known: dict[tuple, tuple[Any, checks.Outcome]] = {}


def _verify_once(exercise: exercises.Exercise, candidate: Any, seed: int) -> checks.Outcome:
    """`checks.verify` for the known answers that a learner's one is compared with: once each, not once a comparison."""
    key = (exercise.name, id(candidate), seed)
    if key not in _known:
        _known[key] = candidate, verify(exercise, candidate, seed)  # the candidate is kept so that its id stays its own
    return _known[key][1]


def check_alternative(answer: exercises.Answer) -> None:
    """Another right answer passes."""
    outcome = checks.verify(exercises.find(answer.exercise), answer.candidate)
    who = f"alternative '{answer.label}' of '{answer.exercise}'"
    assert outcome.status == "passed", f"{who} is not accepted: {outcome.message}"


def check_counts(lab: str, registered: Collection[exercises.Exercise], answers: Collection[exercises.Answer]) -> None:
    """Three mistakes or more per exercise, two alternatives or more per lab."""
    names = {exercise.name for exercise in registered if exercise.lab == lab}
    for name in sorted(names):
        wrong = [answer for answer in answers if answer.exercise == name and answer.wrong]
        assert len(wrong) >= 3, f"'{name}' has {len(wrong)} mistakes; three are the least"
    others = [answer for answer in answers if answer.exercise in names and not answer.wrong]
    assert len(others) >= 2, f"{lab} has {len(others)} alternatives; two are the least"


def run(
    notebook: NotebookNode, master: Path, scratch: Path, only: Collection[int] | None = None
) -> dict[str, progress.Entry]:
    """Execute the notebook's code (`only`: of these cells) in this process; the outcome of every check that ran."""
    record = scratch / f"{masters.name_of(master)}-{len(list(scratch.iterdir()))}.json"
    variables = {"MINILLM_PROGRESS": str(record), "MINILLM_STRICT": "0"}
    with mock.patch.dict(os.environ, variables), contextlib.chdir(master.parent), _as_main() as namespace:
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type == "code" and (only is None or index in only):
                _execute(cell.source, f"<{masters.name_of(master)}, cell {index}>", namespace)
        return progress.load()


def _execute(source: str, name: str, namespace: dict) -> None:
    plain = _plain(source)
    linecache.cache[name] = (len(plain), None, plain.splitlines(keepends=True), name)  # for tracebacks and getsource
    exec(compile(plain, name, "exec"), namespace)


def _plain(source: str) -> str:
    """Without the lines that only a notebook understands."""
    return re.sub(r"^(\s*)[%!].*$", r"\1pass", source, flags=re.MULTILINE)


@contextlib.contextmanager
def _as_main() -> Iterator[dict]:
    """A namespace that is the module `__main__` while the lab runs: pickling treats its functions as a notebook's."""
    before, matplotlib_backend = sys.modules["__main__"], matplotlib.get_backend()
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    matplotlib.use("agg")
    try:
        yield module.__dict__
    finally:
        sys.modules["__main__"] = before
        if "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].close("all")
        matplotlib.use(matplotlib_backend)


def _same_passed(master: Path, solved: Collection[str], outcomes: dict[str, progress.Entry]) -> None:
    passed = {exercise for exercise, entry in outcomes.items() if entry.passed}
    assert passed == set(solved), (
        f"{masters.name_of(master)}: only {sorted(solved)} solved, yet what passes is {sorted(passed)}"
    )


def _exercises_of(notebook: NotebookNode) -> list[str]:
    return [name for cell in notebook.cells for name in masters.checked(cell)]
