"""The strict harness: what must hold of every exercise and every lab, whoever wrote it.

    every check fails on the unsolved lab, which still runs to its end
    every check passes on the solution
    every exercise passes alone, in a lab where nothing else is solved
    every mutant is rejected with a message that fits its mistake, every alternative is accepted

Labs run in this process (cells share a namespace that is `__main__`, as in a notebook): a kernel per run would cost
minutes.
"""

import contextlib
import linecache
import os
import re
import sys
import types
from collections.abc import Collection, Iterator
from pathlib import Path
from unittest import mock

import matplotlib
from nbformat import NotebookNode

from minillm.labkit import checks, exercises, masters, progress


def check_unsolved(master: Path, scratch: Path) -> None:
    """The lab as handed out: runs to its end, and no check passes."""
    outcomes = run(masters.lab(master), master, scratch)
    _same_exercises(master, outcomes)
    passed = [name for name, entry in outcomes.items() if entry.passed]
    assert not passed, f"{master.stem}: nothing is solved, yet these checks pass: {passed}"


def check_solved(master: Path, scratch: Path) -> None:
    """The solution: every check passes, strictly."""
    outcomes = run(masters.solution(master), master, scratch, strict=True)
    _same_exercises(master, outcomes)
    failed = [name for name, entry in outcomes.items() if not entry.passed]
    assert not failed, f"{master.stem}: solved, yet these checks do not pass: {failed}"


def check_alone(master: Path, name: str, scratch: Path) -> None:
    """Only exercise `name` is solved: it passes, no other does, and the lab runs to its end."""
    outcomes = run(masters.lab(master, solved=[name]), master, scratch)
    passed = {exercise for exercise, entry in outcomes.items() if entry.passed}
    assert passed == {name}, f"{master.stem}: only '{name}' is solved, yet what passes is {sorted(passed)}"


def check_reference(exercise: exercises.Exercise) -> None:
    """The course's own answer passes."""
    outcome = checks.verify(exercise, exercise.reference)
    assert outcome.status == "passed", f"the reference of '{exercise.name}' is not accepted: {outcome.message}"


def check_mutant(answer: exercises.Answer) -> None:
    """A wrong answer fails, and the message says why."""
    outcome = checks.verify(exercises.find(answer.exercise), answer.candidate)
    who = f"mutant '{answer.label}' of '{answer.exercise}'"
    assert outcome.status == "failed", f"{who} is not rejected but {outcome.status}"
    fits = re.search(answer.expect, outcome.message, re.IGNORECASE)
    assert fits, f"{who} is rejected with {outcome.message!r}, which lacks {answer.expect!r}"


def check_alternative(answer: exercises.Answer) -> None:
    """Another right answer passes."""
    outcome = checks.verify(exercises.find(answer.exercise), answer.candidate)
    who = f"alternative '{answer.label}' of '{answer.exercise}'"
    assert outcome.status == "passed", f"{who} is not accepted: {outcome.message}"


def check_counts(lab: str, registered: Collection[exercises.Exercise], answers: Collection[exercises.Answer]) -> None:
    """Three mutants or more per exercise, two alternatives or more per lab."""
    names = {exercise.name for exercise in registered if exercise.lab == lab}
    for name in sorted(names):
        mutants = [answer for answer in answers if answer.exercise == name and answer.expect is not None]
        assert len(mutants) >= 3, f"'{name}' has {len(mutants)} mutants; three are the least"
    others = [answer for answer in answers if answer.exercise in names and answer.expect is None]
    assert len(others) >= 2, f"{lab} has {len(others)} alternatives; two are the least"


def run(notebook: NotebookNode, master: Path, scratch: Path, strict: bool = False) -> dict[str, progress.Entry]:
    """Execute the notebook's code in this process; returns the outcome of every check that ran."""
    record = scratch / f"{master.stem}-{len(list(scratch.iterdir()))}.json"
    variables = {"MINILLM_PROGRESS": str(record), "MINILLM_STRICT": "1" if strict else "0"}
    with mock.patch.dict(os.environ, variables), contextlib.chdir(master.parent), _as_main() as namespace:
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type == "code":
                _execute(cell.source, f"<{master.stem}, cell {index}>", namespace)
        return progress.load()


def _execute(source: str, name: str, namespace: dict) -> None:
    plain = re.sub(r"^(\s*)[%!].*$", r"\1pass", source, flags=re.MULTILINE)
    linecache.cache[name] = (len(plain), None, plain.splitlines(keepends=True), name)  # for tracebacks and getsource
    exec(compile(plain, name, "exec"), namespace)


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


def _same_exercises(master: Path, outcomes: dict[str, progress.Entry]) -> None:
    registered = {exercise.name for exercise in exercises.all_exercises() if exercise.lab == master.stem}
    assert registered == set(outcomes), (
        f"{master.stem} registers {sorted(registered - set(outcomes))} without checking them "
        f"and checks {sorted(set(outcomes) - registered)} of other labs"
    )
