"""Labs on the pretended node of tests/engine/node, which shows eight GPUs to a machine that has none.

What a lab hands to `launch`, in the claims that the tour runs and in the cells of its solution, by themselves or in a
function of its experiments, runs there with NCCL's rules, whatever device it asks for; what it makes without `device=`
is on its GPU, as after `torch.set_default_device`.
And claims hold beside GPUs that they do not use, as on a node whose owner runs `minillm tour`.

On a real node rank programs of labs stay on the CPU: the scripts in labs/torchrun/ ask for GPUs, and
tests/engine/node/test_node_programs.py runs those. ON_THE_CPU has what cannot run elsewhere, with the reason.
"""

import ast
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch

from course.kit import course
from course.kit.answers import Answers, _Unchecked, names_of
from course.lab08_expert_parallel import experiments_training
from minillm.comm import launch
from tests.engine.node.launching import all_launches_on_a_node
from tests.engine.node.node import pretend_node

pytestmark = pytest.mark.full
WHOLE = os.environ.get("MINILLM_PROOF") == "all"
SEED = int(os.environ["MINILLM_SEED"])
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zero_bubble_v", "dualpipe")  # of lab 06
# What a run draws from: programs that are short on the node. MINILLM_PROOF=all takes all that `launch` is handed.
SHORT = {
    "00": ("launched", "witnesses", "cell of hello", "cell of sum_losses_fixed"),
    "01": ("bytes_moved", "same_bits", "messages", "logged", "cell of before_and_after", "cell of training_steps"),
    "03": ("rows", "cell of shards_and_batch", "cell of experiments_breaks.as_they_become_ready"),
    "04": ("reduction", "prefetch", "clipping", "saving", "scaler"),
    "05": ("step", "cell of links.pairs"),
    "06": SCHEDULES,
    "07": ("traffic", "offsets"),
    "08": ("traffic",),
    "09": ("torch_mesh", "bug_hunt", "scaling"),
    "10": ("slow", "hang", "rank_0"),
    "11": ("dealt", "two_jobs", "torch_sampler", "cell of experiments.dealt", "cell of experiments.torch_loader"),
    "17": ("reduced_twice", "cell of rank_programs.train_twice"),
    "18": ("hidden",),
    "22": ("factor_under_adam", "slow-with-clipping", "two-gpus-one-run", "fourth-step"),
    "23": ("shards_are_reduced", "optimizer_states_stay", "barrier_moves_weights"),
}
ON_RANKS = ("00", "01", "03", "04", "05", "06", "07", "08", "09", "10", "11", "17", "18", "22", "23")
COMPILED = "25"  # its claims compile for a GPU that they see, and the node has no driver
ALONE = tuple(lab for lab in course.numbers("receipts") if lab not in (*ON_RANKS, COMPILED))
SAMPLE = 5  # labs of each kind, one program of each; MINILLM_PROOF=all: every program of every lab

# Why a program cannot run on the node's GPUs.
PEER = "torch's own DDP, FSDP2, DTensor or pipelining: their C++ takes the node's tensors for what they are, the CPU's"
CLOCK = "times ranks that sleep for a computation and for an emulated link, by the host's clock"
SENDS_FIRST = "a stage sends before it asks: gloo keeps a message until its receiver comes, NCCL's ranks both wait"
HOST_WAITS = "says of gloo that a rank waits inside an all-reduce: on a GPU the host only launches it"
ON_THE_CPU = {"18 over_links": CLOCK, "23 utilisation_is_compute": HOST_WAITS}
ON_THE_CPU |= dict.fromkeys(
    (
        *("03 trace", "03 cell of production.traced_step", "03 cell of production.libraries"),
        *("04 seeds", "04 cell of experiments_breaks.all_accidents", "04 cell of experiments_torch.peers"),
        *("05 cell of experiments_torch.peers", "06 cell of experiments_torch.peers"),
        *("10 distributed_checkpoint", "10 cell of production.distributed_checkpoint", "23 scalers_on_shards"),
    ),
    PEER,
)
ON_THE_CPU |= dict.fromkeys(
    (f"06 cell of experiments_breaks.{name}" for name in ("four_stages_and_one", "bug_hunt", "bug_hunt 2", "deadlock")),
    SENDS_FIRST,
)


def drawn(labs: tuple[str, ...]) -> list[str]:
    return list(labs) if WHOLE else sorted(random.Random(SEED).sample(labs, SAMPLE))


@pytest.mark.parametrize("lab", drawn(ON_RANKS if WHOLE else tuple(SHORT)))
def test_rank_programs_of_a_lab_run_on_gpus(lab: str) -> None:
    """Of a claim or a cell of the lab that calls `launch`; with MINILLM_PROOF=all of each."""
    found = programs(lab)
    forget_measurements()  # and then keep them: claims share a launch
    for name in shuffled(found if WHOLE else {name: found[name] for name in (f"{lab} {each}" for each in SHORT[lab])}):
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


def test_text_of_lab_08_is_where_its_model_is() -> None:
    with pretend_node() as node:
        node.makes_on = torch.device("cuda:0")
        order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
        assert experiments_training.text.__wrapped__()[order[:16]].device == node.makes_on


@pytest.mark.parametrize("lab", ON_RANKS)
def test_what_is_drawn_or_stays_on_the_cpu_is_a_program_of_the_lab(lab: str) -> None:
    known = programs(lab)
    named = [f"{lab} {each}" for each in SHORT.get(lab, ())]
    stay = [name for name in ON_THE_CPU if name.startswith(lab)]
    assert set(named) | set(stay) <= set(known) and not set(named) & set(stay), sorted(known)


def programs(lab: str) -> dict[str, Callable]:
    return claims(lab) | launching_cells(lab)


def shuffled(found: dict[str, Callable]) -> list[str]:
    names = [name for name in found if name not in ON_THE_CPU]
    return random.Random(SEED).sample(names, len(names))


def claims(lab: str) -> dict[str, Callable]:
    """What the tour runs; of many statements, exhibits or schedules each. Lab 04 has several claims in one launch,
    together with one of torch's FSDP2: here each has a launch of its own."""
    receipts = course.load("receipts", lab)
    found = {f"{lab} {claim.__name__}": partial(holds, claim) for claim in receipts.CLAIMS}
    if statements := getattr(receipts, "STATEMENTS", None):
        found = {f"{lab} {key}": partial(holds, its.run) for key, its in statements.items()}
    if lab == "06":
        jobs = {name: receipts.Job(name, speed=None) for name in SCHEDULES}  # one step, of no emulated device
        run = receipts.experiments.run
        found |= {f"06 {name}": partial(holds, lambda job=job: receipts.held(run([job]))) for name, job in jobs.items()}
    if lab == "22":
        training = [name for name, its in receipts.museum.EXHIBITS.items() if its.kind == "training"]
        found |= {f"22 {name}": partial(holds, partial(receipts.leaves_a_trace, name)) for name in training}
    if lab == "04":
        breaks, ranks, bad = receipts.experiments_breaks, receipts.WORLD, receipts.BAD_RANK
        found["04 clipping"] = lambda: holds(partial(receipts.clipping, launch(breaks.clip_with, ranks)))
        found["04 saving"] = lambda: holds(partial(receipts.saving, launch(breaks.save_on_rank_0, ranks)[0]))
        found["04 scaler"] = lambda: holds(
            partial(receipts.scaler, launch(breaks.scale_with_plain_scaler, ranks, bad), bad)
        )
    return found


def told(run: Callable, name: str) -> None:
    """pytest cannot name what is drawn here."""
    try:
        run()
    except Exception as error:
        error.add_note(f"{name}; MINILLM_SEED={SEED} draws it again")
        raise


def holds(claim: Callable) -> None:
    made = claim()
    rows = getattr(made, "rows", made)
    off = [row for row in rows if row.verdict == "off" and row.steady]
    assert rows and not off, off


def launching_cells(lab: str) -> dict[str, Callable]:
    """Statements of the solved notebook that call `launch`, or a function of the lab's experiments that does."""
    master = next(path for name, path in course.masters(course.home()).items() if name.startswith(lab))
    statements = ast.parse(master.read_text(encoding="utf-8")).body
    indirect, found, times = launching_functions(master.parent), {}, Counter()
    for number, statement in enumerate(statements):
        if program := _launched_by(statement, indirect):
            times[program] += 1
            again = f" {times[program]}" if times[program] > 1 else ""
            found[f"{lab} cell of {program}{again}"] = partial(run_cell, master, number)
    return found


def launching_functions(folder: Path) -> set[str]:
    """Names of functions that call `launch`, or one that does, in what the lab measures."""
    called = {}
    for path in (*folder.glob("experiments*.py"), *folder.glob("training*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                called[node.name] = {name.rpartition(".")[2] for name, _ in _calls(node)}
    found = {"launch"}
    while more := {name for name, names in called.items() if names & found} - found:
        found |= more
    return found


def _calls(node: ast.AST) -> list[tuple[str, ast.Call]]:
    return [(ast.unparse(each.func), each) for each in ast.walk(node) if isinstance(each, ast.Call)]


def _launched_by(statement: ast.stmt, indirect: set[str]) -> str:
    for name, call in _calls(statement):
        module, _, function = name.rpartition(".")
        if name == "launch":
            return ast.unparse(call.args[0])
        if module not in ("", "receipts") and function in indirect:
            return name
    return ""


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
