"""Exhibits of sequences that are cut over ranks: context parallelism."""

from course.lab22_bug_museum import training_measurements as seen
from course.lab22_bug_museum.exhibit import Clue, Exhibit, Suspect, WrongFix
from course.lab22_bug_museum.training_runs import Oracle, Run, Scene
from course.shared.faults import training as faults
from minillm.train.parallel_config import ParallelConfig

CONTEXT_NOT_REDUCED = Exhibit(
    name="second-replica",
    title="A second replica helps more than it should",
    kind="training",
    symptom=(
        "Context parallelism over two ranks, so that a document fits; there is no data parallelism yet. The loss is "
        "right in the first step and falls. As soon as a second replica is added, the same settings train noticeably "
        "better."
    ),
    faults=(faults.CONTEXT_NOT_REDUCED,),
    run=Run(Scene(ParallelConfig(cp=2))),
    looks=lambda record: [seen.falls(record), seen.starts_right(record)],
    trace=lambda record: [seen.gradients_are_right(record), seen.replicas_agree(record), seen.norm_is_right(record)],
    measurements=seen.USUAL,
    innocents=(
        Suspect(
            "ring attention",
            "the backward of the ring uses a stale block of keys",
            "That would spoil queries and keys and leave, for example, the last norm alone. Here every parameter is "
            "wrong.",
        ),
        Suspect(
            "loss",
            "the loss is a mean of the two ranks' means",
            "Both ranks have equally many tokens here, so the mean of means is the mean.",
        ),
        Suspect(
            "positions",
            "the second rank counts positions from zero",
            "Wrong positions would change the first loss, and it is one process's to six digits.",
        ),
        Suspect(
            "start",
            "the ranks of a sequence start from different weights",
            "Then the first loss would be another one. They start alike and drift apart afterwards.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "over dp",
            "Now the model is wrapped, over the ranks of dp, of which there is one. Whoever sees other tokens belongs "
            "to the average: dp times cp.",
            (
                {
                    "wrap(model, self.groups.replicas)": (
                        "wrap(model, self.groups.mesh.dp if self.groups.is_split else self.group)"
                    )
                },
            ),
        ),
        WrongFix(
            "for cp alone",
            "This asks for context parallelism and forgets dp: with dp and pp, gradients of the replicas no longer "
            "meet.",
            ({"self.averaged_over > 1": "self.layout.cp > 1"},),
        ),
    ),
    investigation=(
        Clue(
            "ledger",
            "Messages of the ring, and sums of a few bytes: no all-reduce of the model's size. Nothing that a "
            "gradient could travel with. This halves the space in one step: the question is no longer what is reduced "
            "wrongly but why nothing is.",
        ),
        Clue(
            "replica-check",
            "Ranks that hold the same weights drift apart in all of them, which confirms it and shows that it matters.",
        ),
    ),
    misleading=Clue(
        "losses",
        "The loss is summed over both ranks, so it is that of the whole sequence, and both ranks learn something "
        "useful. A curve that falls is no evidence.",
    ),
    lesson=(
        "An axis of size 1 is a corner of its own. The ranks that average gradients are those that see other tokens, "
        "however the axes are called."
    ),
    proof=Oracle([ParallelConfig(cp=2), ParallelConfig(dp=2, pp=2, accumulate=2)]),
)

MEAN_OF_MEANS = Exhibit(
    name="thirteen-tokens",
    title="Sixteen tokens agree, thirteen do not",
    kind="training",
    symptom=(
        "Sequences of 13 tokens over two context-parallel ranks, padded to 16. The logged loss is right in the first "
        "step. With 16 tokens the layout agrees with one process in every digit; with 13 it is a little worse, for "
        "which padding is blamed."
    ),
    faults=(faults.MEAN_OF_MEANS,),
    run=Run(Scene(ParallelConfig(cp=2), seq_len=13)),
    looks=lambda record: [seen.falls(record), seen.starts_right(record), seen.replicas_agree(record)],
    trace=lambda record: [seen.gradients_are_right(record), seen.norm_is_right(record)],
    measurements=seen.USUAL,
    innocents=(
        Suspect(
            "padding",
            "padded positions count in the loss",
            "The log's tokens and loss are one process's: positions of padding have no target and count for nothing.",
        ),
        Suspect(
            "data parallelism",
            "the gradients of the two ranks are not averaged",
            "The replica check is clean and the ledger has the all-reduce: they are averaged, with wrong weights.",
        ),
        Suspect(
            "ring attention",
            "the mask lets padding be attended to",
            "Padding comes after every real token, so causal attention never looks at it, and the first loss is right.",
        ),
        Suspect(
            "positions",
            "the zigzag order gives a rank the other's positions",
            "Then 16 tokens would be wrong as well.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "own tokens, then the ranks",
            "The ranks' gradients are averaged afterwards, which divides by the number of ranks already; and its own "
            "tokens remain the wrong divisor.",
            ({faults.TAKEN: "nll, own = module", faults.DIVIDED: "loss = nll / own / self.averaged_over"},),
        ),
        WrongFix(
            "all tokens, averaged once more",
            "The divisor is the tokens of all ranks now, and the average over ranks divides once more: the gradient "
            "is too small by the number of ranks.",
            ({faults.TAKEN: "nll, own = module", faults.DIVIDED: "loss = nll / self.sum(own)"},),
        ),
    ),
    investigation=(
        Clue(
            "gradient-norms",
            "A few percent too large in the first step, and off by another share in each later one. No clean factor, "
            "so it is a weighting and not a forgotten division.",
        ),
        Clue(
            "gradients",
            "Every parameter is off by another share: a different mixture of the same two ranks' gradients. With 16 "
            "tokens it vanishes, so the mixture depends on how many tokens each rank has.",
        ),
    ),
    misleading=Clue(
        "losses",
        "The log adds up sums of losses and divides by all tokens, so it is right. What is logged and what is "
        "differentiated are two numbers.",
    ),
    lesson=(
        "The mean over tokens is no mean of means. Divide by the tokens of the whole step over the number of ranks "
        "that average, and test with unequal numbers."
    ),
    proof=Oracle([ParallelConfig(cp=2), ParallelConfig(dp=2)], case="unequal"),
)

STALE_BLOCK = Exhibit(
    name="long-documents",
    title="Long documents that nobody can reproduce",
    kind="training",
    symptom=(
        "Ring attention over two ranks. Its output agrees with full attention to the last bit that float32 has, and a "
        "test says so. The loss falls. Fine-tuning a model on long documents gives results that nobody can reproduce "
        "with full attention."
    ),
    faults=(faults.STALE_BLOCK,),
    run=Run(Scene(ParallelConfig(cp=2))),
    looks=lambda record: [seen.falls(record), seen.starts_right(record), seen.replicas_agree(record)],
    trace=lambda record: [seen.gradients_are_right(record)],
    measurements=seen.USUAL,
    innocents=(
        Suspect(
            "ring attention, softmax",
            "partial outputs are merged with the wrong log-sum-exps",
            "The output would be wrong, and it is right: the first loss is one process's.",
        ),
        Suspect(
            "strategy, wrapping",
            "gradients of context-parallel ranks are never reduced",
            "The replica check is clean, and parameters behind the last attention have the right gradients.",
        ),
        Suspect(
            "positions",
            "rotary positions of the second rank start at zero",
            "That changes the forward pass, which is right.",
        ),
        Suspect(
            "mixed precision",
            "gradients of keys are added up in 16 bits",
            "Everything here is float32, and rounding does not change a gradient by a third.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "own block only",
            "Skipping the other ranks' blocks removes the wrong numbers and the right ones with them: queries "
            "attended to those keys, and both need their gradients.",
            ({"if attention.is_seen:": "if attention.is_seen and source == rank:"},),
        ),
        WrongFix(
            "own mask for own block",
            "Mask and block fit together now, and both are this rank's own, in every step: its own keys count N times "
            "and the others never.",
            (
                {
                    faults.ARRIVED: "attention.backward(q, k, v, lse",
                    "ctx.segments, source)": "ctx.segments, rank)",
                },
            ),
        ),
        WrongFix(
            "keys alone",
            "The keys are the block's now. The values are still this rank's own.",
            ({faults.ARRIVED: "attention.backward(q, block[0], v, lse"},),
        ),
    ),
    investigation=(
        Clue(
            "gradients",
            "The head, the last norm and the last MLP are right, queries and keys are wrong by a large share: the "
            "error enters in the backward of attention. Since the forward pass is right, it is in what the backward "
            "reads.",
        ),
    ),
    misleading=Clue(
        "gradient-norms",
        "It agrees to four digits. At the start attention is nearly uniform and gradients of queries and keys are "
        "small, so they hardly count in the norm.",
    ),
    lesson=(
        "A test of the output tests half of an autograd function. Compare gradients of all inputs with full "
        "attention, in float64, at sizes at which every rank has several blocks."
    ),
    proof=Oracle([ParallelConfig(cp=2), ParallelConfig(cp=4)]),
    budget=45,
)


EXHIBITS = (
    CONTEXT_NOT_REDUCED,
    MEAN_OF_MEANS,
    STALE_BLOCK,
)
