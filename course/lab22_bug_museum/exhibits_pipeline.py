"""Exhibits of pipelines: the factor of the microbatches, tied embeddings that drift apart, and two that cancel."""

from collections.abc import Sequence

from course.kit.receipts import row
from course.lab22_bug_museum import training_measurements as seen
from course.lab22_bug_museum.exhibit import Clue, Exhibit, Measurement, Suspect, WrongFix
from course.lab22_bug_museum.training_runs import Job, Oracle, Record, Run, Scene, together
from course.shared.faults import training as faults
from course.shared.faults.patches import Patch
from minillm.train.parallel_config import ParallelConfig

PIPELINE_FACTOR = Exhibit(
    name="slow-with-clipping",
    title="A pipeline that learns slowly once it clips",
    kind="training",
    symptom=(
        "A model that trained well on one GPU is moved to a pipeline of two stages with four microbatches. The first "
        "loss is the same to six digits, the curve falls as before and AdamW's learning rate needed no change. A "
        "month later somebody raises the number of microbatches to hide the bubble, and a run with gradient clipping "
        "no longer learns as fast as it did."
    ),
    faults=(faults.MICROBATCHES_SUMMED,),
    run=Run(Scene(ParallelConfig(pp=2, accumulate=4))),
    looks=lambda record: [seen.falls(record), seen.starts_right(record)],
    trace=lambda record: [seen.gradients_are_right(record), seen.norm_is_right(record), seen.starts_right(record)],
    measurements=seen.USUAL,
    innocents=(
        Suspect(
            "pipeline, messages",
            "a gradient that travels back arrives at the wrong microbatch",
            "Then gradients would point elsewhere. Here every one of them has the right direction and only the wrong "
            "length, and mixed-up microbatches cannot do that.",
        ),
        Suspect(
            "clipping",
            "each stage clips by the norm of its own parameters",
            "Clipping comes after the gradients, and the gradients themselves are already wrong before it. Local norms "
            "would also be smaller than the true one, not larger.",
        ),
        Suspect(
            "data parallelism",
            "gradients are summed over replicas and not averaged",
            "There is one replica: the ledger shows messages along the pipeline and no all-reduce of gradients.",
        ),
        Suspect(
            "optimizer",
            "AdamW's epsilon is too large for such small gradients",
            "An optimizer cannot change the gradient norm of the very first step, which is wrong before it has run.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "only the gradient",
            "The gradient is right now, but the log still divides by the number of microbatches: a loss that is "
            "already a share of the whole batch's is averaged once more.",
            ({"loss_of)": "loss_of) / count"},),
        ),
        WrongFix(
            "divided by the stages",
            "The factor is the number of microbatches. Dividing by the number of stages is right for one ratio of the "
            "two and wrong for all others.",
            (
                {
                    "return loss(nll)": "return loss(nll) * count / self.pipeline.group.world_size",
                    "loss_of)": "loss_of) * self.pipeline.group.world_size / count",
                },
            ),
        ),
        WrongFix(
            "the log undone",
            "This takes the average out of the log and leaves the factor in the loss: now the gradient is too large, "
            "and the loss is as well.",
            ({"return loss(nll)": "return loss(nll) * count"},),
        ),
    ),
    investigation=(
        Clue(
            "gradient-norms",
            "The norm is logged anyway, so it costs nearly nothing, and it halves the space: four times one process's "
            "in every step is a scale, not a lost message.",
        ),
        Clue(
            "gradients",
            "All parameters have the same multiple, on both stages: the factor enters before the backward begins, "
            "which leaves the loss. It equals the number of microbatches.",
        ),
    ),
    misleading=Clue(
        "losses",
        "The curve is nearly one process's. Adam divides each gradient by its own size, so a constant factor vanishes "
        "from the update; only clipping, weight decay's relative share and plain SGD notice it.",
    ),
    lesson=(
        "A loss curve under Adam says nothing about the scale of gradients. Compare the gradient norm of the first "
        "step with one process, under SGD in float64 where you can, before any curve."
    ),
    proof=Oracle([ParallelConfig(pp=2, accumulate=3)]),
)

TIED_DRIFT = Exhibit(
    name="too-good-a-curve",
    title="A curve that is better than it should be",
    kind="training",
    symptom=(
        "A small model shares its embedding with its head. Cut into two stages, the loss falls even faster than it "
        "did on one process, and the difference grows. When the checkpoint is exported, which keeps one embedding, "
        "the model is worse than the last loss of the log."
    ),
    faults=(faults.TIED_NOT_SUMMED,),
    run=Run(Scene(ParallelConfig(pp=2, accumulate=2), model=seen.TIED)),
    looks=lambda record: [seen.falls(record), seen.starts_right(record)],
    trace=lambda record: [seen.gradients_are_right(record), seen.replicas_agree(record), seen.norm_is_right(record)],
    measurements=seen.USUAL,
    innocents=(
        Suspect(
            "pipeline, loss",
            "the gradient is too large by the number of microbatches",
            "Only one parameter has a wrong gradient; a factor in the loss would be in all of them.",
        ),
        Suspect(
            "export",
            "the wrong stage's embedding is written",
            "Whichever is written is the wrong half: during the run the two stages hold two different embeddings.",
        ),
        Suspect(
            "initialisation",
            "the head starts from another draw than the embedding",
            "Then the first loss would be another one than that of one process.",
        ),
        Suspect(
            "optimizer",
            "weight decay is applied to the embedding on one stage",
            "The gradient of the embedding is wrong in the first step, before any update.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "averaged",
            "An embedding that is used twice has the sum of both uses as its gradient, as in one process, where both "
            "add up in one `.grad`.",
            (
                {
                    faults.TIED_SUMMED: f"{faults.TIED_SUMMED}\n"
                    "        for name in self._shared & self.parts().keys():\n"
                    "            self.parts()[name].grad.div_(2)"
                },
            ),
        ),
        WrongFix(
            "the head's use dropped",
            "The copies agree now, and the gradient of the head is thrown away: the embedding learns from one use of "
            "two.",
            (
                {
                    faults.TIED_SUMMED: "dropped = self._shared & self.parts().keys() if self.groups.pp.rank else ()\n"
                    "        for name in dropped:\n"
                    f"            self.parts()[name].grad.zero_()\n        {faults.TIED_SUMMED}"
                },
            ),
        ),
    ),
    investigation=(
        Clue(
            "replica-check",
            "One name: `embedding.weight`, which both stages hold, differs. Nothing else does. That is place and "
            "parameter in one measurement.",
        ),
        Clue(
            "gradients",
            "Its gradient is a part of one process's, everything else is right: what is missing is the other use.",
        ),
    ),
    misleading=Clue(
        "losses",
        "The loss falls faster than it should: two untied matrices can do more than a tied one. A better curve is no "
        "reason to relax.",
    ),
    lesson=(
        "What several ranks hold needs a sum for its gradient and a check of equality for its value. The check costs "
        "eight bytes for each tensor, so run it from the first day."
    ),
    proof=Oracle([ParallelConfig(pp=2, accumulate=2)], case="tied"),
    budget=45,
)


class _Both:
    """With as many microbatches as replicas, and with twice as many."""

    runs = tuple(Run(Scene(ParallelConfig(dp=2, pp=2, accumulate=n), steps=4)) for n in (2, 4))

    def __call__(self, patches: Sequence[Patch], seed: int) -> tuple[Record, ...]:
        return self.many([(patches, seed)])[0]

    def many(self, jobs: Sequence[Job]) -> list[tuple[Record, ...]]:
        found = together([(run, *job) for run in self.runs for job in jobs])
        return list(zip(found[: len(jobs)], found[len(jobs) :], strict=True))


def _of(which: int, measurement: Measurement, when: str) -> Measurement:
    """The measurement of one of the two runs, under a name of its own."""
    name, about = f"{measurement.name}-{when}", f"{measurement.about}, with {when} microbatches"
    return Measurement(name, measurement.minutes, about, lambda records: measurement.show(records[which]))


FACTORS_CANCEL = Exhibit(
    name="right-with-two",
    title="Right with two microbatches",
    kind="training",
    symptom=(
        "Two replicas of a pipeline of two stages. With two microbatches the layout passes the oracle, gradient by "
        "gradient. With four, which hide more of the bubble, every gradient is twice too large, so somebody suspects "
        "the schedule. This exhibit has two culprits that hide each other: name both, and repair both."
    ),
    faults=(
        faults.MICROBATCHES_SUMMED,
        faults.DIVIDED_TWICE,
    ),
    run=_Both(),
    looks=lambda records: [
        seen.falls(records[0]),
        seen.gradients_are_right(records[0]),
        seen.norm_is_right(records[0]),
        seen.replicas_agree(records[1]),
    ],
    trace=lambda records: [
        row("wrong gradients with two microbatches", 0, len(records[0].wrong_gradients())),
        row("wrong gradients with four microbatches", 0, len(records[1].wrong_gradients())),
        seen.norm_is_right(records[0]),
        seen.norm_is_right(records[1]),
    ],
    measurements=tuple(
        _of(which, measurement, when)
        for measurement in (seen.LOSSES, seen.NORMS, seen.RATIOS, seen.TRAFFIC, seen.REPLICAS)
        for which, when in ((0, "two"), (1, "four"))
    ),
    innocents=(
        Suspect(
            "schedule",
            "with four microbatches some backward runs twice",
            "A backward that runs twice changes the traffic: the ledger has as many messages as the schedule. And it "
            "would spoil the direction, since not all microbatches would count twice.",
        ),
        Suspect(
            "pipeline, messages",
            "the third microbatch receives the first one's activation",
            "Mixed-up microbatches change directions. Every gradient is exactly twice one process's.",
        ),
        Suspect(
            "data parallelism, the bucket",
            "gradients are summed over replicas and not averaged",
            "With two microbatches the result is right, and a missing division would show there as well.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "the loss alone",
            "The factor of the microbatches is gone, and now every gradient is half of what it should be, with two "
            "microbatches too: there is a second bug, which divides by the replicas twice.",
            ({}, None),
        ),
        WrongFix(
            "the division alone",
            "Now the layout that passed the oracle fails as well, by the number of microbatches. The second bug has "
            "only hidden the first.",
            (None, {}),
        ),
        WrongFix(
            "tuned to four",
            "A constant that makes four microbatches right makes two wrong: a factor has to come from what it stands "
            "for.",
            ({"return loss(nll)": "return loss(nll) * count / 2", "loss_of)": "loss_of) * 2 / count"}, None),
        ),
    ),
    investigation=(
        Clue(
            "gradient-norms-four",
            "Twice one process's, with four microbatches, and right with two. A factor of M / 2, then. M is the number "
            "of microbatches, and the 2 asks for an explanation.",
        ),
        Clue(
            "gradients-four",
            "All gradients have the factor, so it is in the loss or in the reduction that all share. One place "
            "multiplies by M and another divides by 2: the ranks along dp are two.",
        ),
    ),
    misleading=Clue(
        "gradients-two",
        "All right, to the last digit. One point on the lattice where two factors cancel is no proof; the sizes of "
        "two axes were equal.",
    ),
    lesson=(
        "Test with sizes that are all different, and none of them 1. Where a factor M / N appears, look for a place "
        "that multiplies by M and another that divides by N; a correction in between would be a third bug."
    ),
    proof=Oracle([ParallelConfig(pp=2, accumulate=3), ParallelConfig(dp=3)]),
)

EXHIBITS = (PIPELINE_FACTOR, TIED_DRIFT, FACTORS_CANCEL)
