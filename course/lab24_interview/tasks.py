"""Whiteboard tasks: exercises of the labs, taken out of their notebooks and put under a clock. Their checks are hidden.

A task is written into a file with the imports, signature and docstring; what the candidate writes there is run as in
the lab: on real ranks where the topic is ranks, with fresh inputs, values and receipts.
"""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm.labkit import course, exercises, masters
from minillm.labkit.checks import diagnose, verify

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
    "one-f-one-b-order": "pipeline parallel",
    "balance-stages": "pipeline parallel",
    "loss-scaling": "memory and precision",
    "clip-global-norm": "memory and precision",
    "save-interval": "checkpoints and faults",
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
    "sequences-that-fit": "serving systems",
    "merge-softmax": "long context and experts",
    "dispatch-order": "long context and experts",
}


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
    imports = [node for node in ast.parse(cells[0]).body if isinstance(node, ast.Import | ast.ImportFrom)]
    imports = [node for node in imports if getattr(node, "module", "") != "minillm.labkit"]
    right = next(cell.source for cell in answers.cells if name in masters.checked(cell))  # says what one may need
    used = {node.id for node in ast.walk(ast.parse(right)) if isinstance(node, ast.Name)}
    kept = [ast.unparse(node) for node in imports if used & {(a.asname or a.name).split(".")[0] for a in node.names}]
    statements = ast.parse(source).body
    check, first = next(
        (node, statement.lineno) for statement in statements for node in ast.walk(statement) if _is_check(node, name)
    )
    body = "\n".join(source.split("\n")[: first - 1])
    return Task(name, exercise.minutes, "\n".join([*kept, "", "", body.strip(), ""]), ast.unparse(check.args[1]))


def of_topic(topic: str) -> list[str]:
    """Tasks of a topic of the cards; all of them if none belongs to it."""
    known = {exercise.name for exercise in exercises.all_exercises()}
    matching = [name for name, its in TASKS.items() if name in known and (not topic or its == topic)]
    return matching or [name for name in TASKS if name in known]


def _is_check(node: ast.AST, name: str) -> bool:
    return (  # check("name", candidate)
        isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "check"
        and isinstance(node.args[0], ast.Constant)
        and node.args[0].value == name
    )


def write(folder: Path, made: Task) -> Path:
    """The stub as a file; what stands there already is kept, as it may be half an answer."""
    path = folder / f"{made.name}.py"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(made.stub, encoding="utf-8")
    return path
