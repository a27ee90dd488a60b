"""An exhibit of whole runs: a checkpoint that lacks a part."""

from collections.abc import Sequence
from dataclasses import dataclass

from course.kit.receipts import row
from course.lab22_bug_museum.exhibit import Clue, Exhibit, Measurement, Suspect, WrongFix
from course.lab22_bug_museum.training_runs import Scene, text
from course.shared.faults import training as faults
from course.shared.faults.patches import Patch, planted
from course.shared.table import Table, table
from minillm.comm import Group, launch
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


HALF_A_CHECKPOINT = Exhibit(
    name="restart-bump",
    title="Off the curve after every restart",
    kind="training",
    symptom=(
        "ZeRO-1 on two ranks. After each restart the loss is exactly where it was for one step, then a little off the "
        "old curve, now above it and now below. The file has the size that it should have. Everybody calls it the "
        "restart bump."
    ),
    faults=(faults.HALF_A_CHECKPOINT,),
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
    innocents=(
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
            ({faults.GATHERED: faults.OWN_STATE.replace("group.rank == 0", "group.rank == 1")},),
        ),
        WrongFix(
            "no state at all",
            "Without any state Adam starts from nothing everywhere: every parameter's update is wrong now, and the "
            "file no longer looks like a mistake.",
            ({faults.GATHERED: faults.OWN_STATE.replace("not group or group.rank == 0 or ", "")},),
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

EXHIBITS = (HALF_A_CHECKPOINT,)
