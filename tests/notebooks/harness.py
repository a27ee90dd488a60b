"""The strict harness: what must hold of every exercise and every lab, whoever wrote it.

    every check fails on the unsolved lab, which still runs to its end
    every check passes on the solution
    every exercise passes alone, where nothing else is solved (only the cells that it stands on are run)
    a lab with every second exercise solved runs to its end
    every mistake is rejected with its sentence, every alternative is accepted

Labs run in this process (cells share a namespace that is `__main__`, as in a notebook): a kernel per run would cost
minutes. What nbval has run in a kernel already is not run again: its record is judged.
"""

import ast
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

from minillm.labkit import checks, exercises, masters, progress
from minillm.labkit.answers import names_of
from minillm.labkit.checks import verify


def check_unsolved(master: Path, scratch: Path) -> None:
    """The lab as handed out: runs to its end, and no check passes."""
    outcomes = recorded("unsolved", master) or run(masters.lab(master), master, scratch)
    _same_exercises(master, outcomes)
    passed = [name for name, entry in outcomes.items() if entry.passed]
    assert not passed, f"{masters.name_of(master)}: nothing is solved, yet these checks pass: {passed}"


def check_solved(master: Path, scratch: Path) -> None:
    """The solution: every check passes, strictly."""
    outcomes = recorded("solved", master) or run(masters.solution(master), master, scratch, strict=True)
    _same_exercises(master, outcomes)
    failed = [name for name, entry in outcomes.items() if not entry.passed]
    assert not failed, f"{masters.name_of(master)}: solved, yet these checks do not pass: {failed}"


def recorded(state: str, master: Path) -> dict[str, progress.Entry]:
    """What the lab's checks said when nbval ran it just before (MINILLM_RECORDS, see the Makefile); {} if not."""
    if "MINILLM_RECORDS" not in os.environ:
        return {}
    with mock.patch.dict(os.environ, {"MINILLM_PROGRESS": str(Path(os.environ["MINILLM_RECORDS"], f"{state}.json"))}):
        outcomes = {name: entry for name, entry in progress.load().items() if entry.lab == masters.name_of(master)}
    assert outcomes, f"{masters.name_of(master)} left no {state} record in {os.environ['MINILLM_RECORDS']}: was it run?"
    return outcomes


def check_alone(master: Path, name: str, scratch: Path) -> None:
    """Only exercise `name` is solved: it passes and no other does. Runs its check and what that stands on."""
    notebook = masters.lab(master, solved=[name])
    _same_passed(master, [name], run(notebook, master, scratch, only=needed(notebook, name)))


def check_half(master: Path, scratch: Path) -> None:
    """Every second exercise is solved: those pass, the others do not, and the lab runs to its end."""
    names = [name for cell in masters.lab(master).cells for name in masters.checked(cell)]
    _same_passed(master, names[::2], run(masters.lab(master, solved=names[::2]), master, scratch))


def needed(notebook: NotebookNode, name: str) -> set[int]:
    """Indices of the cells that check `name`, and of all before them that set a name which these, or those, read."""
    cells, wanted, found = notebook.cells, set(), set()
    for index in reversed(range(len(cells))):
        if cells[index].cell_type != "code":
            continue
        reads, sets = names_of(ast.parse(_plain(cells[index].source)))
        if name in masters.checked(cells[index]) or sets & wanted:
            found.add(index)
            wanted |= reads
    return found


def check_reference(exercise: exercises.Exercise) -> None:
    """The course's own answer passes."""
    outcome = checks.verify(exercise, exercise.reference)
    assert outcome.status == "passed", f"the reference of '{exercise.name}' is not accepted: {outcome.message}"


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
    notebook: NotebookNode, master: Path, scratch: Path, strict: bool = False, only: Collection[int] | None = None
) -> dict[str, progress.Entry]:
    """Execute the notebook's code (`only`: of these cells) in this process; the outcome of every check that ran."""
    record = scratch / f"{masters.name_of(master)}-{len(list(scratch.iterdir()))}.json"
    variables = {"MINILLM_PROGRESS": str(record), "MINILLM_STRICT": "1" if strict else "0"}
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


def _same_exercises(master: Path, outcomes: dict[str, progress.Entry]) -> None:
    registered = {exercise.name for exercise in exercises.all_exercises() if exercise.lab == masters.name_of(master)}
    assert registered == set(outcomes), (
        f"{masters.name_of(master)} registers {sorted(registered - set(outcomes))} without checking them "
        f"and checks {sorted(set(outcomes) - registered)} of other labs"
    )
