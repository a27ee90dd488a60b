"""Exhibits of pipelines: the factor of the microbatches, and tied embeddings that drift apart."""

from functools import partial

from course.lab22_bug_museum import training_measurements as seen
from course.lab22_bug_museum.exhibit import Clue, Exhibit, Suspect, WrongFix
from course.lab22_bug_museum.patches import Patch
from course.lab22_bug_museum.training_runs import Scene, oracle, train
from minillm.train.parallel_config import ParallelConfig

RUN = "minillm.parallel.pipeline_parallel.held_parts:HeldParts.run"
MICROBATCHES = Patch(RUN, {"return loss(nll)": "return loss(nll) * count", "loss_of)": "loss_of) / count"})

PIPELINE_FACTOR = Exhibit(
    name="pipeline-factor",
    title="Twice the microbatches, twice the gradient",
    kind="training",
    threads=(
        "https://github.com/pytorch/pytorch/issues/144352",
        "https://github.com/pytorch/torchtitan/issues/800",
    ),
    symptom=(
        "A model that trained well on one GPU is moved to a pipeline of two stages with four microbatches. The first "
        "loss is the same to six digits, the curve falls as before and AdamW's learning rate needed no change. A "
        "month later somebody raises the number of microbatches to hide the bubble, and a run with gradient clipping "
        "no longer learns as fast as it did."
    ),
    faults=(MICROBATCHES,),
    run=partial(train, Scene(ParallelConfig(pp=2, accumulate=4))),
    looks=lambda record: [seen.falls(record), seen.starts_right(record), seen.replicas_agree(record)],
    trace=lambda record: [seen.gradients_are_right(record), seen.norm_is_right(record), seen.starts_right(record)],
    measurements=seen.USUAL,
    suspects=(
        Suspect(
            "pipeline, the loss of a microbatch",
            "each microbatch divides by its own tokens, their gradients are summed, and only the log averages them",
        ),
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
            "The gradient is right now, but the log still divides by the number of microbatches: a loss that is already "
            "a share of the whole batch's is averaged once more.",
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
        "A loss curve under Adam says nothing about the scale of gradients. Compare the gradient norm of the first step "
        "with one process, under SGD in float64 where you can, before any curve."
    ),
    proof=oracle([ParallelConfig(pp=2, accumulate=3)]),
)

EXHIBITS = (PIPELINE_FACTOR,)
