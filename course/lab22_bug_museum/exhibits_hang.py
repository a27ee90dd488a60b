"""An exhibit of whole runs: a rank that goes its own way."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from course.kit.receipts import row
from course.lab22_bug_museum.exhibit import Clue, Exhibit, Measurement, Suspect, WrongFix
from course.lab22_bug_museum.training_runs import Scene, text
from course.shared.faults import training as faults
from course.shared.faults.patches import Patch, planted
from course.shared.table import Table, table
from minillm.comm import Group, HangError, RankError, launch
from minillm.data import Tokens
from minillm.train import Trainer
from minillm.train.parallel_config import ParallelConfig
from minillm.train.steptime import Step
from minillm.train.strategies.hybrid import make_strategy


@dataclass(frozen=True)
class Outcome:
    """How a run ended. error: what the launcher said, "" if nothing; steps: of rank 0; alone: of one process."""

    error: str
    steps: tuple[Step, ...]
    alone: tuple[Step, ...]


LINK_ROUNDS = 50
BRANCH_SCENE = Scene(ParallelConfig(dp=2), steps=6)


def _until_it_ends(patches: Sequence[Patch], seed: int) -> Outcome:
    alone = Trainer(BRANCH_SCENE.alone(seed), text(seed))
    done = tuple(alone.step() for _ in range(BRANCH_SCENE.steps))
    alone.loader.close()
    try:
        steps = launch(_steps_on_rank, 2, tuple(patches), text(seed), seed, timeout=20.0)[0]
    except (RankError, HangError) as error:
        return Outcome(str(error), (), done)
    return Outcome("", steps, done)


def _steps_on_rank(group: Group, patches: Sequence[Patch], tokens: Tokens, seed: int) -> tuple[Step, ...]:
    with planted(patches), make_strategy(group, BRANCH_SCENE.layout) as strategy:
        trainer = Trainer(BRANCH_SCENE.config(seed), tokens, parallel=strategy)
        steps = tuple(trainer.step() for _ in range(BRANCH_SCENE.steps))
        trainer.loader.close()
        return steps


def _first_line(record: Outcome) -> str:
    return record.error.partition("\n")[0] or "the run ended without an error"


def _links() -> Table:
    wrong, seconds = launch(_reduce_on_rank, 2, timeout=20.0)[0]
    return table("links", ("all-reduces", "wrong", "ms each"), [(LINK_ROUNDS, wrong, 1e3 * seconds / LINK_ROUNDS)])


def _reduce_on_rank(group: Group) -> tuple[int, float]:
    """(all-reduces with a wrong result, seconds of all)."""
    numbers, wrong, started = torch.arange(1 << 15, dtype=torch.float64), 0, time.perf_counter()
    for number in range(LINK_ROUNDS):
        mine = numbers * (group.rank + 1) + number
        group.all_reduce(mine)
        wrong += not torch.equal(mine, 3 * numbers + 2 * number)
    return wrong, time.perf_counter() - started


BRANCH = Exhibit(
    name="fourth-step",
    title="It hangs at the fourth step",
    kind="training",
    symptom=(
        "Two ranks train without a problem until the fourth step, when both stop: no error, two cores at 100 %. On "
        "one rank the same program runs for days. The interconnect is under suspicion, since a restart gets through "
        "the first three steps again."
    ),
    faults=(faults.OWN_BRANCH,),
    run=_until_it_ends,
    looks=lambda record: [row("steps of one process alone", BRANCH_SCENE.steps, len(record.alone))],
    trace=lambda record: [
        row("the run ends without an error", "yes", "no" if record.error else "yes"),
        row("steps on two ranks", BRANCH_SCENE.steps, len(record.steps)),
        *(
            row(f"loss of step {a.step}", b.loss, a.loss, "nats", 1e-5)
            for a, b in zip(record.steps, record.alone, strict=False)
        ),
    ],
    measurements=(
        Measurement("operations", 6, "the operation at which the ranks stand, with shape and number", _first_line),
        Measurement("stacks", 8, "the stack of the rank that complains", lambda record: record.error or "no stack"),
        Measurement(
            "one-rank",
            10,
            "the same program on one rank",
            lambda record: table("one rank", ("", "steps"), [("done", len(record.alone))]),
        ),
        Measurement(
            "links",
            20,
            "all-reduces between the two ranks, without the program",
            lambda record: _links(),
        ),
    ),
    innocents=(
        Suspect(
            "interconnect",
            "a link loses messages",
            "A lost message would stop a different step each time. It is the fourth step, on every start.",
        ),
        Suspect(
            "data, loader",
            "one rank runs out of windows",
            "A rank without data stops asking for gradients. Here both have reduced those of the fourth step, and one "
            "of them is reducing the next step's already.",
        ),
        Suspect(
            "data parallelism, buckets",
            "the ranks reduce their buckets in different orders",
            "The buckets of the first three steps were the same ones. What differs every fourth step is not in the "
            "model.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "nobody sums",
            "It no longer hangs, since in every fourth step nobody sums: the log then has the loss of this rank's "
            "windows, divided by the tokens of all.",
            ({faults.LOGGED: faults.ONLY_ROOT.replace("self.parallel.is_root or ", "")},),
        ),
        WrongFix(
            "the other rank",
            "Now rank 1 sums alone. A collective needs all of its ranks, whoever needs the result.",
            ({faults.LOGGED: faults.ONLY_ROOT.replace("self.parallel.is_root", "not self.parallel.is_root")},),
        ),
    ),
    investigation=(
        Clue(
            "operations",
            "The two ranks stand at the same number and at different operations. So one of them has skipped a call, "
            "and the fault is in a branch, not on a wire.",
        ),
        Clue(
            "stacks",
            "The stack of the rank that went on says where it is; the call before it in the program is the one that "
            "it has left out.",
        ),
    ),
    misleading=Clue(
        "links",
        "Twenty minutes, and every result is right. A hang at the same step of every start is in the program.",
    ),
    lesson=(
        "Whether a collective is called may depend only on what all ranks know. Conditions on the rank, on the data "
        "or on the clock belong around the print, not around the sum."
    ),
    budget=45,
)

EXHIBITS = (BRANCH,)
