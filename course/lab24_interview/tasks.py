"""Whiteboard tasks: exercises of the labs, taken out of their notebooks and put under a clock. Their checks are hidden.

A task is written into a file with its whole statement, signature and docstring; what the candidate writes there is run
as in the lab: on real ranks where the topic is ranks, with fresh inputs, values and receipts. What the answer imports
is the candidate's to know: the file has torch and what its own text names.
"""

import ast
import io
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from nbformat import NotebookNode

from course.kit import course, exercises, masters
from course.kit.answers import checked_exercise, names_of
from course.kit.checks import diagnose, verify
from course.lab24_interview import wording
from minillm.files import write_whole

TASKS: dict[str, str] = {  # exercise: topic of the cards
    "matmul-cost": "hardware",
    "ring-reduce-scatter": "collectives",
    "ring-all-gather": "collectives",
    "tree-broadcast": "collectives",
    "all-to-all": "collectives",
    "token-weighted-loss": "data parallel and ZeRO",
    "top-k-error-feedback": "data parallel and ZeRO",
    "shard-partition": "data parallel and ZeRO",
    "clip-across-shards": "data parallel and ZeRO",
    "parallel-mlp": "tensor and sequence parallel",
    "vocabulary-cross-entropy": "tensor and sequence parallel",
    "one-f-one-b-order": "pipeline parallel",
    "balance-stages": "pipeline parallel",
    "loss-scaling": "memory and precision",
    "clip-global-norm": "memory and precision",
    "rms-norm": "memory and precision",
    "adamw": "memory and precision",
    "newton-schulz": "memory and precision",
    "save-interval": "checkpoints and faults",
    "atomic-commit": "checkpoints and faults",
    "straggler": "checkpoints and faults",
    "pack-windows": "data",
    "bpe-encode": "data",
    "nucleus": "decoding and the cache",
    "kv-bytes": "decoding and the cache",
    "block-pool": "decoding and the cache",
    "lru-eviction": "decoding and the cache",
    "block-keys": "decoding and the cache",
    "token-budget-step": "batching and scheduling",
    "queue-waits": "batching and scheduling",
    "token-bucket": "serving systems",
    "residual": "speculative decoding",
    "verifier": "speculative decoding",
    "sequences-that-fit": "serving systems",
    "merge-softmax": "long context and experts",
    "tiled-forward": "long context and experts",
    "rotary": "long context and experts",
    "zigzag-order": "long context and experts",
    "dispatch-order": "long context and experts",
    "top-k-router": "long context and experts",
    "capacity-drops": "long context and experts",
    "tokens-to-experts": "long context and experts",
    "replay-step": "kernels and compilation",
    "mesh-strides": "planning",
    "crossing-bytes": "planning",
}


GIVEN, YOURS = "# Given: what earlier exercises have built.", "# Yours to write:"


@dataclass(frozen=True)
class Result:
    """passed, and what the check said."""

    passed: bool
    said: str


@dataclass(frozen=True)
class Task:
    """statement: what is asked, in words. stub: the file that the candidate starts from, which begins with it.
    candidate: the expression that the lab hands to its check."""

    name: str
    minutes: int
    statement: str
    stub: str
    candidate: str

    def judge(self, code: str) -> Result:
        """Run the candidate's file and the exercise's check on it. What goes wrong is said, never raised.

        The file sees an empty standard input: exit() closes it, and the session still has its own.
        """
        namespace: dict[str, Any] = {"__name__": "whiteboard"}
        try:
            with patch("sys.stdin", io.StringIO()):
                exec(compile(code, f"{self.name}.py", "exec"), namespace)
                candidate = eval(self.candidate, namespace)
                return self._check(candidate)
        except (KeyboardInterrupt, MemoryError):
            raise
        except SystemExit:
            return Result(False, "the file called exit(): leave it out, the check calls your function itself.")
        except BaseException as error:
            return Result(False, f"the file stopped with {type(error).__name__}: {error}")

    def _check(self, candidate: Any) -> Result:
        exercise, seed = exercises.find(self.name), 20
        outcome = verify(exercise, candidate, seed)
        if outcome.status == "passed":
            return Result(True, "passed")
        hint = diagnose(exercise, outcome, seed) if outcome.status == "failed" else ""
        return Result(False, " ".join(part for part in (outcome.message, hint) if part))


@cache
def notebooks(lab: str) -> tuple[NotebookNode, NotebookNode]:
    """The lab as handed out and solved: many tasks and bugs come from each."""
    master = course.masters(course.home())[lab]
    return masters.lab(master), masters.solution(master)


def task(name: str) -> Task:
    """The task of an exercise. ValueError for one that no lab has."""
    exercise = exercises.find(name)
    notebook, answers = notebooks(exercise.lab)
    source = next(cell.source for cell in notebook.cells if name in masters.checked(cell))
    right = next(place for place, cell in enumerate(answers.cells) if name in masters.checked(cell))
    before = [cell.source for cell in answers.cells[:right] if cell.cell_type == "code"]
    given = _given(answers.cells[right].source, before)
    yours, candidate = before_check(source, name)
    text = wording.statement(name, exercise.lab, notebook, yours)
    heading = f"{name}, {exercise.minutes} minutes"
    first = next(cell.source for cell in notebook.cells if cell.cell_type == "code")
    imports = imports_of(first, [*given, yours], text)
    parts = [
        wording.as_comment(f"{heading}\n\n{text}"),
        "\n".join(imports),
        *([GIVEN, *given] if given else []),
        f"{YOURS}\n{yours}",
    ]
    return Task(name, exercise.minutes, text, "\n\n".join(filter(None, parts)) + "\n", candidate)


def of_topic(topic: str) -> list[str]:
    """Tasks of a topic of the cards, which may have none; all of them for ""."""
    known = {exercise.name for exercise in exercises.all_exercises()}
    return [name for name, its in TASKS.items() if name in known and topic in ("", its)]


def write(folder: Path, name: str, stub: str) -> tuple[Path, Path | None]:
    """The stub as FOLDER/NAME.py, and where an older file of that name was moved: none of its work is lost."""
    path, moved = folder / f"{name}.py", None
    folder.mkdir(parents=True, exist_ok=True)
    if path.exists():
        older = (folder / f"{name}-{number}.py" for number in range(1, 10**6))
        moved = path.rename(next(each for each in older if not each.exists()))
    write_whole(path, stub)
    return path, moved


def before_check(source: str, name: str) -> tuple[str, str]:
    """The cell up to its check, and what it hands to it."""
    for statement in ast.parse(source).body:
        for node in ast.walk(statement):
            if checked_exercise(node) == name:
                return "\n".join(source.split("\n")[: statement.lineno - 1]).strip(), ast.unparse(node.args[1])
    raise ValueError(f"no check of {name!r} in {source!r}")


def _given(answer: str, before: list[str]) -> list[str]:
    """What an answer may need of earlier exercises, solved."""
    known = {
        node.name: node
        for source in before
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    used, given = names_of(ast.parse(answer))[0], []
    own = {node.name for node in ast.parse(answer).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for name, node in reversed(known.items()):  # an earlier one may be used by a later one that is given
        if name in used - own:
            given.insert(0, ast.unparse(node))
            used |= names_of(node)[0]
    return given


def imports_of(first_cell: str, code: list[str], text: str) -> list[str]:
    """The lab's imports of torch, and of what the given code uses or the text names: no more, it would be a hint."""
    used = {name for part in code for name in names_of(ast.parse(part))[0]}
    kept = []
    for node in ast.parse(first_cell).body:
        if not isinstance(node, ast.Import | ast.ImportFrom) or getattr(node, "module", "") == "course.kit":
            continue
        names = {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        named = any(f"`{name}(" in text for name in names)
        if names & ({"torch", "F"} | used) or named:
            kept.append(ast.unparse(node))
    return kept
