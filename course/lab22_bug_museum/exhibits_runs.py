"""Exhibits of whole runs: a checkpoint that lacks a part, and a rank that goes its own way."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from course.kit.receipts import row
from course.lab22_bug_museum.exhibit import Clue, Exhibit, Measurement, Suspect, WrongFix
from course.lab22_bug_museum.patches import Patch, planted
from course.lab22_bug_museum.training_runs import Scene, text
from course.shared.table import Table, table
from minillm.comm import Group, HangError, RankError, launch
from minillm.data import Tokens
from minillm.train import Trainer
from minillm.train.parallel_config import ParallelConfig
from minillm.train.steptime import Step
from minillm.train.strategies.hybrid import make_strategy


@dataclass(frozen=True)
class Resumed:
    """Losses before a checkpoint, after it without interruption, and after it in a new process that loads it.

    norms: |moment| of the optimizer's first moment by parameter, as it was and as it was loaded.
    """

    before: tuple[float, ...]
    went_on: tuple[Step, ...]
    resumed: tuple[Step, ...]
    weights_equal: bool
    moments: dict[str, tuple[float, float]]


RESUME_SCENE = Scene(ParallelConfig(dp=2, zero=1), steps=8)


def _resume(patches: Sequence[Patch], seed: int) -> Resumed:
    return launch(_resume_on_rank, 2, tuple(patches), text(seed), seed)[0]


def _resume_on_rank(group: Group, patches: Sequence[Patch], tokens: Tokens, seed: int) -> Resumed:
    config = RESUME_SCENE.config(seed)
    with make_strategy(group, RESUME_SCENE.layout) as strategy:
        trainer = Trainer(config, tokens, parallel=strategy)
        before = tuple(trainer.step().loss for _ in range(4))
        right = trainer.state_dict()
        with planted(patches):
            saved = trainer.state_dict()
        went_on = tuple(trainer.step() for _ in range(4))
        trainer.loader.close()
    with make_strategy(group, RESUME_SCENE.layout) as strategy, planted(patches):
        trainer = Trainer(config, tokens, parallel=strategy)
        trainer.load_state_dict(saved)
        resumed = tuple(trainer.step() for _ in range(4))
        trainer.loader.close()
    equal = all(right["model"][name].equal(saved["model"][name]) for name in right["model"])
    moments = {
        name: tuple(float(state["optimizer"]["state"][place]["exp_avg"].norm()) for state in (right, saved))
        for place, name in enumerate(right["optimizer"]["names"])
    }
    return Resumed(before, went_on, resumed, equal, moments)


def _curve(record: Resumed) -> Table:
    rows = [(str(n), loss, loss) for n, loss in enumerate(record.before)]
    rows += [(str(a.step), a.loss, b.loss) for a, b in zip(record.went_on, record.resumed, strict=True)]
    return table("loss in nats; the checkpoint is of step 3", ("step", "without interruption", "resumed"), rows)


def _moments(record: Resumed) -> Table:
    rows = [(name, *pair) for name, pair in list(record.moments.items())[:12]]
    return table("norm of Adam's first moment", ("parameter", "before saving", "in the file"), rows)


FULL_STATE, GATHERED = "minillm.parallel.sharding.full_state:full_state", "tensors = gather(local.tensors, local"
OWN = (
    "own = {key: part if not group or group.rank == 0 or not key.startswith('optimizer/') else part * 0\n"
    "           for key, part in local.tensors.items()}\n"
    "    tensors = gather(own, local"
)
HALF_A_CHECKPOINT = Exhibit(
    name="restart-bump",
    title="A bump after every restart",
    kind="training",
    threads=(
        "https://github.com/huggingface/nanotron/issues/106",
        "https://github.com/huggingface/transformers/issues/48569",
    ),
    symptom=(
        "ZeRO-1 on two ranks. After each restart the loss is exactly where it was for one step, then a little above "
        "the old curve for a while. The file has the size that it should have. Everybody calls it the restart bump."
    ),
    faults=(Patch(FULL_STATE, {GATHERED: OWN}, also=("minillm.train.trainer:full_state",)),),
    run=_resume,
    looks=lambda record: [
        row("the weights are saved right", True, record.weights_equal),
        row("first loss after the restart", record.went_on[0].loss, record.resumed[0].loss, "nats", 1e-6),
        row("it goes on learning", True, record.resumed[-1].loss < record.before[0]),
    ],
    trace=lambda record: [
        row(f"loss of step {a.step} after the restart", a.loss, b.loss, "nats", 1e-9)
        for a, b in zip(record.went_on, record.resumed, strict=True)
    ],
    measurements=(
        Measurement("losses", 3, "the curve with the restart and without", _curve),
        Measurement(
            "weights",
            8,
            "are the weights of the file those of the run?",
            lambda record: table("weights", ("", ""), [("equal in every bit", str(record.weights_equal))]),
        ),
        Measurement("optimizer-state", 10, "Adam's first moment, before saving and in the file", _moments),
        Measurement(
            "learning-rate",
            2,
            "the learning rate after the restart",
            lambda record: table(
                "learning rate",
                ("step", "without interruption", "resumed"),
                [(str(a.step), a.lr, b.lr) for a, b in zip(record.went_on, record.resumed, strict=True)],
            ),
        ),
        Measurement(
            "gradient-norms",
            4,
            "gradient norms after the restart",
            lambda record: table(
                "gradient norm",
                ("step", "without interruption", "resumed"),
                [(str(a.step), a.grad_norm, b.grad_norm) for a, b in zip(record.went_on, record.resumed, strict=True)],
            ),
        ),
    ),
    suspects=(
        Suspect(
            "checkpoint, optimizer state", "only rank 0's slices are in the file, and the others' places hold zeros"
        ),
        Suspect(
            "checkpoint, schedule",
            "the learning rate starts again with its warm-up",
            "The learning rate after the restart is that of the uninterrupted run.",
        ),
        Suspect(
            "checkpoint, data",
            "the loader starts again from the first window",
            "The first loss after the restart is the same to the last digit, so the windows are.",
        ),
        Suspect(
            "checkpoint, weights",
            "weights are saved in 16 bits",
            "The weights of the file are equal in every bit.",
        ),
        Suspect(
            "checkpoint, generators",
            "the state of the random generators is lost",
            "Nothing in this run draws numbers after the start: there is no dropout.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "the other rank's",
            "The file has rank 1's slices now and lacks rank 0's. Each rank holds a part, so all have to give theirs.",
            ({GATHERED: OWN.replace("group.rank == 0", "group.rank == 1")},),
        ),
        WrongFix(
            "no state at all",
            "Without any state Adam starts from nothing everywhere: the bump is larger and no longer looks like a "
            "mistake.",
            ({GATHERED: OWN.replace("not group or group.rank == 0 or ", "")},),
        ),
    ),
    investigation=(
        Clue(
            "losses",
            "The first loss after the restart is right in every digit, the second is not: weights and data are fine, "
            "and the update between the two losses is wrong.",
        ),
        Clue(
            "optimizer-state",
            "What an update needs besides weights and gradient is the moments. In the file half of them are zero.",
        ),
    ),
    misleading=Clue(
        "weights",
        "They are right, as the first loss had told already for less.",
    ),
    lesson=(
        "A checkpoint exists when a run that loads it makes the same bits as a run that was never interrupted. A file "
        "of the right size, right weights and a plausible curve are no evidence."
    ),
    budget=40,
)


@dataclass(frozen=True)
class Outcome:
    """How a run ended. error: what the launcher said, "" if nothing; steps: of rank 0; alone: of one process."""

    error: str
    steps: tuple[Step, ...]
    alone: tuple[Step, ...]


LINK_ROUNDS = 50
BRANCH_SCENE = Scene(ParallelConfig(dp=2), steps=6)
SUM = "return self.parallel.sum(total).double() / weight, weight"
ONLY_ROOT = (
    "if self.parallel.is_root or (self.steps_done + 1) % 4:\n"
    "        total = self.parallel.sum(total)\n"
    "    return total.double() / weight, weight"
)


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
    threads=("https://github.com/NVIDIA/nccl/issues/1324",),
    symptom=(
        "Two ranks train without a problem until the fourth step, when both stop: no error, two cores at 100 %. On "
        "one rank the same program runs for days. The interconnect is under suspicion, since a restart gets through "
        "the first three steps again."
    ),
    faults=(Patch("minillm.train.trainer:Trainer.backward", {SUM: ONLY_ROOT}),),
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
    suspects=(
        Suspect("trainer, log", "in every fourth step only rank 0 enters the sum of the loss"),
        Suspect(
            "interconnect",
            "a link loses messages",
            "A lost message would stop a different step each time. It is the fourth step, on every start.",
        ),
        Suspect(
            "data, loader",
            "one rank runs out of windows",
            "A rank without data stops asking for gradients. Here both are past the gradients and differ in which "
            "operation comes next.",
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
            ({SUM: ONLY_ROOT.replace("self.parallel.is_root or ", "")},),
        ),
        WrongFix(
            "the other rank",
            "Now rank 1 sums alone. A collective needs all of its ranks, whoever needs the result.",
            ({SUM: ONLY_ROOT.replace("self.parallel.is_root", "not self.parallel.is_root")},),
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


EXHIBITS = (
    HALF_A_CHECKPOINT,
    BRANCH,
)
