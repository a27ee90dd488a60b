"""Exhibits of the loop around the step: the learning rate, and the utilisation in the log."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from course.kit.receipts import Row, row
from course.lab22_bug_museum import training_measurements as seen
from course.lab22_bug_museum.exhibit import Clue, Exhibit, Measurement, Suspect, WrongFix
from course.lab22_bug_museum.training_runs import SMALL, Run, Scene, text
from course.shared.faults import training as faults
from course.shared.faults.patches import Patch, planted
from course.shared.table import table
from minillm.adapters.attach import adapted_kinds
from minillm.predict.model import causal_context, training_flops
from minillm.predict.training.adapters import Adapters
from minillm.train import Trainer
from minillm.train.parallel_config import ParallelConfig
from minillm.train.steptime import Step


def _three_microbatches(patches: Sequence[Patch]) -> list[Row]:
    record = Run(Scene(ParallelConfig(dp=2, accumulate=3)))(patches, random.randrange(2**31))
    pairs = zip(record.steps, record.alone.steps, strict=True)
    return [row("steps of three microbatches with another learning rate", 0, sum(a.lr != b.lr for a, b in pairs))]


SCHEDULE_RUNS_AHEAD = Exhibit(
    name="half-way",
    title="A run that stops learning half-way",
    kind="training",
    symptom=(
        "To fit the memory, a batch is computed in two microbatches of half the size. The first half of the run is "
        "nearly as before, then the loss hardly moves. The data are blamed: they seem to be exhausted."
    ),
    faults=(faults.SCHEDULE_RUNS_AHEAD,),
    run=Run(Scene(ParallelConfig(dp=2, accumulate=2))),
    looks=lambda record: [seen.falls(record), seen.gradients_are_right(record), seen.norm_is_right(record)],
    trace=lambda record: [
        row(f"learning rate of step {n}", record.alone.steps[n].lr, record.steps[n].lr, "", 1e-9)
        for n in range(len(record.steps))
    ],
    measurements=seen.USUAL,
    innocents=(
        Suspect(
            "data, loader",
            "accumulation reads each window twice",
            "The windows of a step are disjoint and as many as one process reads.",
        ),
        Suspect(
            "loss",
            "the gradient is an average of microbatches of unequal size",
            "Gradients of the first step are one process's, by name.",
        ),
        Suspect(
            "data parallelism, `no_sync`",
            "only the last microbatch is reduced",
            "Then the gradient of the first step would be that of half the windows. It is right.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "divided",
            "The factor is turned round: now the schedule is too slow by the number of microbatches and never ends.",
            ({faults.RATE: "learning_rate(self.steps_done // self.config.accumulate, self.config)"},),
        ),
        WrongFix(
            "by windows",
            "The position of the loader counts windows, of which a step has many: the warm-up is over in the first "
            "step.",
            ({faults.RATE: "learning_rate(self.loader.position, self.config)"},),
        ),
        WrongFix(
            "one step late",
            "A schedule stepped after the update starts with the rate of step 0 twice. Ask it for the step that runs "
            "now.",
            ({faults.RATE: "learning_rate(max(0, self.steps_done - 1), self.config)"},),
        ),
    ),
    investigation=(
        Clue(
            "learning-rate",
            "Two minutes, since it is in every log: it reaches its minimum half-way. The place is found.",
        ),
    ),
    misleading=Clue(
        "gradients",
        "They are right, and they always will be: nothing between the loss and the gradient is wrong.",
    ),
    lesson=(
        "Plot what you believe to be constant or known: learning rate, tokens per step, weight norm. A schedule that "
        "is a function of the step has nothing to step too often and nothing to lose on resume."
    ),
    proof=_three_microbatches,
    budget=30,
)


@dataclass(frozen=True)
class Utilisation:
    """Steps of one process. flops: per token, by the model's formula; peak: FLOP/s that the MFU is a share of."""

    steps: tuple[Step, ...]
    peak: float
    flops: float
    full: float

    @property
    def implied(self) -> float:
        """FLOPs per token for which the log's MFU, seconds and tokens fit together."""
        last = self.steps[-1]
        return last.mfu * last.time.total * self.peak / last.tokens


LONG = Scene(ParallelConfig(), steps=4, seq_len=32)


def _utilisation(patches: Sequence[Patch], seed: int) -> Utilisation:
    peak = 1e12
    with planted(patches):
        trainer = Trainer(LONG.alone(seed), text(seed), peak_flops=peak)
        steps = tuple(trainer.step() for _ in range(LONG.steps))
        trainer.loader.close()
    flops = [training_flops(SMALL, context).total for context in (causal_context(LONG.seq_len, None), LONG.seq_len)]
    return Utilisation(steps, peak, *flops)


ADAPTED = Scene(ParallelConfig(), steps=1, seq_len=32, settings=(("lora", 2),))


def _other_runs(patches: Sequence[Patch]) -> list[Row]:
    """The corners of the function: adapters have a formula of their own, and without a peak there is no share of it."""
    config, tokens, peak = ADAPTED.alone(1), text(1), 1e12
    layers = adapted_kinds(SMALL, config.adapter)
    right = Adapters(SMALL, config.lora, layers).training_flops(causal_context(ADAPTED.seq_len, None)).total
    with planted(patches):
        trainers = Trainer(config, tokens, peak_flops=peak), Trainer(LONG.alone(1), tokens)
        adapted, without = (trainer.step() for trainer in trainers)
    for trainer in trainers:
        trainer.loader.close()
    implied = adapted.mfu * adapted.time.total * peak / adapted.tokens
    return [
        row("FLOPs per token with adapters", right, implied, "FLOP", 1e-6),
        row("MFU without a peak", "none", "none" if without.mfu is None else without.mfu),
    ]


UTILISATION = Exhibit(
    name="utilisation",
    title="The longer the sequence, the better the utilisation",
    kind="training",
    symptom=(
        "The model FLOP utilisation (MFU) in the log rises with the length of the sequences; at 16k tokens it passes "
        "100 %. Tokens per second fall meanwhile, as they should. A slide with the number is being prepared."
    ),
    faults=(faults.ATTENTION_TWICE,),
    run=_utilisation,
    looks=lambda record: [
        row("the log has an MFU above 0", True, all(step.mfu > 0 for step in record.steps)),
        row("the loss falls", True, record.steps[-1].loss < record.steps[0].loss + 0.1),
    ],
    trace=lambda record: [row("FLOPs per token that the MFU stands for", record.flops, record.implied, "FLOP", 1e-6)],
    measurements=(
        Measurement(
            "log",
            2,
            "tokens, seconds and MFU of the last step",
            lambda record: table(
                "last step",
                ("", "value"),
                [
                    ("tokens", record.steps[-1].tokens),
                    ("seconds", record.steps[-1].time.total),
                    ("MFU", record.steps[-1].mfu),
                    ("peak, FLOP/s", record.peak),
                ],
            ),
        ),
        Measurement(
            "implied-flops",
            5,
            "MFU · seconds · peak / tokens: what the log takes for the work of a token",
            lambda record: table("FLOPs per token", ("", "FLOP"), [("that the log stands for", record.implied)]),
        ),
        Measurement(
            "by-hand",
            10,
            "the work of a token by hand, with attention to all positions and to those before it",
            lambda record: table(
                "FLOPs per token by hand",
                ("attention", "FLOP"),
                [("to the positions before it", record.flops), ("to all positions", record.full)],
            ),
        ),
        Measurement(
            "peak",
            15,
            "the peak that the MFU is a share of, looked up for this device and data type",
            lambda record: table("peak", ("", "FLOP/s"), [("of the device", record.peak)]),
        ),
    ),
    innocents=(
        Suspect(
            "trainer, MFU",
            "the denominator is the peak of one device for the tokens of several",
            "This run has one device, and the factor would not grow with the length of the sequences.",
        ),
        Suspect(
            "trainer, MFU",
            "recomputed activations count as useful work",
            "Nothing is recomputed in this run, and the share of recomputation does not depend on the length either.",
        ),
        Suspect(
            "machine card",
            "the peak is that of another data type",
            "A wrong peak is a constant factor at every length.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "everything halved",
            "Only attention over positions is halved by causality. Projections and the MLP are not, and they are most "
            "of it.",
            ({faults.CONTEXT: "self.config.seq_len", "tokens * flops": "tokens * flops / 2"},),
        ),
        WrongFix(
            "without attention",
            "6 FLOPs per parameter is the work without attention over positions: a fair lower bound, and at 16k "
            "tokens a long way below the work that is done.",
            ({faults.CONTEXT: "0"},),
        ),
    ),
    investigation=(
        Clue(
            "implied-flops",
            "Turn the number round before you believe it: which work per token does it claim? That needs nothing but "
            "the log.",
        ),
        Clue(
            "by-hand",
            "It equals the count in which each token looks at all positions. Causal attention looks at half of them on "
            "average.",
        ),
    ),
    misleading=Clue("peak", "Whether it is right or not, it is the same at all lengths."),
    lesson=(
        "Say next to an MFU what is in the numerator and in the denominator. A utilisation that rises while tokens "
        "per second fall is a formula's doing."
    ),
    proof=_other_runs,
    budget=30,
)


EXHIBITS = (
    SCHEDULE_RUNS_AHEAD,
    UTILISATION,
)
