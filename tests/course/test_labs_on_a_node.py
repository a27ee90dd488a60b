"""Labs on the pretended node of tests/engine/node, which shows eight GPUs to a machine that has none.

What a lab hands to `launch`, in the claims that the tour runs and in the cells of its solution, runs there with NCCL's
rules, whatever device it asks for; what it makes without `device=` is on its GPU, as after `torch.set_default_device`.
And claims hold beside GPUs that they do not use, as on a node whose owner runs `minillm tour`.

On a real node rank programs of labs stay on the CPU: the scripts in labs/torchrun/ ask for GPUs, and
tests/engine/node/test_node_programs.py runs those. ON_THE_CPU has what cannot run elsewhere, with the reason.
"""

import ast
import os
import random
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest

from course.kit import course
from course.kit.answers import Answers, _Unchecked, names_of
from tests.engine.node.launching import all_launches_on_a_node
from tests.engine.node.node import pretend_node

pytestmark = pytest.mark.full
WHOLE = os.environ.get("MINILLM_PROOF") == "all"
SEED = int(os.environ["MINILLM_SEED"])
# What a run draws from: programs that are short on the node. MINILLM_PROOF=all takes all that `launch` is handed.
SHORT = {
    "00": ("launched", "witnesses", "cell of hello", "cell of sum_losses_fixed"),
    "01": ("bytes_moved", "same_bits", "messages", "logged", "cell of before_and_after", "cell of training_steps"),
    "03": ("rows", "cell of shards_and_batch", "cell of experiments_breaks.as_they_become_ready"),
    "04": ("reduction", "prefetch"),
    "05": ("step", "cell of links.pairs"),
    "08": ("traffic",),
    "09": ("torch_mesh", "bug_hunt"),
    "10": ("slow", "hang", "rank_0"),
    "11": ("dealt", "two_jobs", "torch_sampler", "cell of experiments.dealt", "cell of experiments.torch_loader"),
    "17": ("reduced_twice", "cell of rank_programs.train_twice"),
    "18": ("hidden",),
}
ON_RANKS = ("00", "01", "03", "04", "05", "06", "07", "08", "09", "10", "11", "17", "18", "22", "23")
COMPILED = "25"  # its claims compile for a GPU that they see, and the node has no driver
ALONE = tuple(lab for lab in course.numbers("receipts") if lab not in (*ON_RANKS, COMPILED))
SAMPLE = 5  # labs of each kind, one program of each; MINILLM_PROOF=all: every program of every lab

TRITON = "attention under context parallelism takes Triton's kernels on a GPU, which ranks of the node cannot run"
PEER = "puts torch's own DDP, FSDP or checkpoints beside minillm, on a group or a mesh that it makes for the CPU"
CLOCK = "times ranks that sleep for a computation and for an emulated link, by the host's clock"
ON_THE_CPU = {"18 over_links": CLOCK, "10 distributed_checkpoint": PEER}
ON_THE_CPU |= dict.fromkeys(("03 trace", "03 cell of production.traced_step", "03 cell of production.libraries"), PEER)
ON_THE_CPU |= dict.fromkeys(
    ("04 clipping", "04 seeds", "04 saving", "04 scaler", "04 cell of experiments_breaks.all_accidents"), PEER
)
ON_THE_CPU |= dict.fromkeys(("07 work", "07 traffic", "07 long_step", "07 overlap"), TRITON)
ON_THE_CPU |= dict.fromkeys(("09 bytes_between_nodes", "09 by_axis", "09 fsdp_or_tensor", "09 scaling"), TRITON)


def drawn(labs: tuple[str, ...]) -> list[str]:
    return list(labs) if WHOLE else sorted(random.Random(SEED).sample(labs, SAMPLE))


@pytest.mark.parametrize("lab", drawn(ON_RANKS if WHOLE else tuple(SHORT)))
def test_rank_programs_of_a_lab_run_on_gpus(lab: str) -> None:
    """Of a claim or a cell of the lab that calls `launch`; with MINILLM_PROOF=all of each."""
    found = claims(lab) | launching_cells(lab)
    for name in shuffled(found if WHOLE else {name: found[name] for name in (f"{lab} {each}" for each in SHORT[lab])}):
        forget_measurements()
        with all_launches_on_a_node(makes_on_gpu=True) as launched:
            told(found[name], name)
        if launched and not WHOLE:
            break
    forget_measurements()
    assert launched or WHOLE


@pytest.mark.parametrize("lab", drawn(ALONE))
def test_a_claim_of_a_lab_holds_beside_gpus(lab: str) -> None:
    found = claims(lab)
    for name in shuffled(found)[: None if WHOLE else 1]:
        forget_measurements()
        with pretend_node():
            told(found[name], name)
    forget_measurements()


def shuffled(found: dict[str, Callable]) -> list[str]:
    names = [name for name in found if name not in ON_THE_CPU]
    return random.Random(SEED).sample(names, len(names))


def claims(lab: str) -> dict[str, Callable]:
    return {f"{lab} {claim.__name__}": partial(holds, claim) for claim in course.load("receipts", lab).CLAIMS}


def told(run: Callable, name: str) -> None:
    """pytest cannot name what is drawn here."""
    try:
        run()
    except Exception as error:
        error.add_note(f"{name}; MINILLM_SEED={SEED} draws it again")
        raise


def holds(claim: Callable) -> None:
    made = claim()
    off = [row for row in made.rows if row.verdict == "off" and row.steady]
    assert made.rows and not off, off


def launching_cells(lab: str) -> dict[str, Callable]:
    """Statements of the solved notebook that call `launch`."""
    master = next(path for name, path in course.masters(course.home()).items() if name.startswith(lab))
    statements = ast.parse(master.read_text(encoding="utf-8")).body
    calls = {number: _handed_to_launch(statement) for number, statement in enumerate(statements)}
    return {f"{lab} cell of {program}": partial(run_cell, master, n) for n, program in calls.items() if program}


def _handed_to_launch(statement: ast.stmt) -> str:
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call) and ast.unparse(node.func) == "launch"]
    return ast.unparse(calls[0].args[0]) if calls else ""


def run_cell(master: Path, number: int) -> None:
    """The statement and what it stands on."""
    answers = Answers(master)
    statement = answers._statements[number]
    answers._run(names_of(statement)[0], number)
    code = _Unchecked().visit(ast.Module([deepcopy(statement)], type_ignores=[]))
    exec(compile(code, str(master), "exec"), answers._module.__dict__)


def forget_measurements() -> None:
    """Labs keep what they have measured, for several claims."""
    for name, module in list(sys.modules.items()):
        if name.startswith("course.lab"):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
