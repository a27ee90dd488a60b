"""Whiteboard tasks: exercises of the labs, taken out of their notebooks and put under a clock. Their checks are hidden.

A task is written into a file with the imports, signature and docstring; what the candidate writes there is run as in
the lab: on real ranks where the topic is ranks, with fresh inputs, values and receipts.
"""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course.kit import course, exercises, masters
from course.kit.answers import checked_exercise, names_of
from course.kit.checks import diagnose, verify
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
    "zigzag-order": "long context and experts",
    "dispatch-order": "long context and experts",
    "top-k-router": "long context and experts",
    "capacity-drops": "long context and experts",
    "tokens-to-experts": "long context and experts",
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
    """stub: what the candidate starts from; candidate: the expression that the lab hands to its check."""

    name: str
    minutes: int
    stub: str
    candidate: str

    def judge(self, code: str) -> Result:
        """Run the candidate's file and the exercise's check on it. What goes wrong is said, never raised."""
        namespace: dict[str, Any] = {"__name__": "whiteboard"}
        try:
            exec(compile(code, f"{self.name}.py", "exec"), namespace)
            candidate = eval(self.candidate, namespace)
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:  # the candidate's own code, which may even call exit()
            return Result(False, f"the file stopped with {type(error).__name__}: {error}")
        exercise, seed = exercises.find(self.name), 20
        outcome = verify(exercise, candidate, seed)
        if outcome.status == "passed":
            return Result(True, "passed")
        hint = diagnose(exercise, outcome, seed) if outcome.status == "failed" else ""
        return Result(False, " ".join(part for part in (outcome.message, hint) if part))


def task(name: str) -> Task:
    """The task of an exercise. ValueError for one that no lab has."""
    exercise = exercises.find(name)
    master = course.masters(course.home())[exercise.lab]
    notebook, answers = masters.lab(master), masters.solution(master)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    source = next(cell.source for cell in notebook.cells if name in masters.checked(cell))
    place = next(place for place, cell in enumerate(answers.cells) if name in masters.checked(cell))
    before = [cell.source for cell in answers.cells[:place] if cell.cell_type == "code"]
    given, used = _given(answers.cells[place].source, before)
    imports = [node for node in ast.parse(cells[0]).body if isinstance(node, ast.Import | ast.ImportFrom)]
    imports = [node for node in imports if getattr(node, "module", "") != "course.kit"]
    kept = [ast.unparse(node) for node in imports if used & {(a.asname or a.name).split(".")[0] for a in node.names}]
    statements = ast.parse(source).body
    check, first = next(
        (node, statement.lineno)
        for statement in statements
        for node in ast.walk(statement)
        if checked_exercise(node) == name
    )
    body = "\n".join(source.split("\n")[: first - 1])
    parts = ["\n".join(kept), *([GIVEN, *given] if given else []), f"{YOURS}\n{body.strip()}"]
    return Task(name, exercise.minutes, "\n\n".join(filter(None, parts)) + "\n", ast.unparse(check.args[1]))


def _given(answer: str, before: list[str]) -> tuple[list[str], set[str]]:
    """What an answer may need of earlier exercises, solved, and all names that it and they use."""
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
    return given, used


def of_topic(topic: str) -> list[str]:
    """Tasks of a topic of the cards; all of them if none belongs to it."""
    known = {exercise.name for exercise in exercises.all_exercises()}
    matching = [name for name, its in TASKS.items() if name in known and (not topic or its == topic)]
    return matching or [name for name in TASKS if name in known]


def write(folder: Path, made: Task) -> Path:
    """The stub as a file; what stands there already is kept, as it may be half an answer."""
    path = folder / f"{made.name}.py"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, made.stub)
    return path
