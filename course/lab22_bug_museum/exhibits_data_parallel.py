"""Exhibits of data parallelism: what is reduced, and by whom."""

from course.kit.receipts import Row, row
from course.lab22_bug_museum import training_measurements as seen
from course.lab22_bug_museum.exhibit import Clue, Exhibit, Suspect, WrongFix
from course.lab22_bug_museum.training_runs import Oracle, Record, Run, Scene
from course.shared.faults import training as faults
from minillm.train.parallel_config import ParallelConfig

AFTER = """def average() -> None:
            self.group.all_reduce(flat, "avg")
            for parameter in bucket.parameters:
                self.group.all_reduce(parameter.data, "sum")

        return self.group.run("all_reduce", flat, average, async_op=True, how="avg")"""

PARAMETERS_AVERAGED = Exhibit(
    name="a-little-worse",
    title="A little worse than one process",
    kind="training",
    symptom=(
        "Somebody's first data parallelism: two replicas, a hook in backward, one all-reduce of as many bytes as the "
        "model has. The loss falls on both ranks. With Adam the final loss is a little worse than that of one process "
        "with the same windows, which everybody takes for noise."
    ),
    faults=(faults.PARAMETERS_AVERAGED,),
    run=Run(Scene(ParallelConfig(dp=2))),
    looks=lambda record: [seen.falls(record), seen.starts_right(record), _same_bytes(record)],
    trace=lambda record: [seen.gradients_are_right(record), seen.norm_is_right(record), seen.replicas_agree(record)],
    measurements=seen.USUAL,
    innocents=(
        Suspect(
            "data parallelism, start",
            "the replicas are initialised with different seeds and never made equal",
            "Then the first loss would not be one process's. It is, on the very first step, when nothing has been "
            "averaged yet.",
        ),
        Suspect(
            "data parallelism, the bucket",
            "no all-reduce is issued, since `no_sync` is never left",
            "The ledger shows an all-reduce of the model's size in every step. Something is reduced; ask what.",
        ),
        Suspect(
            "data, sampler",
            "both ranks read the same windows",
            "The windows of the first step are disjoint, and equal windows would keep the replicas equal, not let them "
            "drift.",
        ),
        Suspect(
            "loss",
            "the loss of each rank is divided by its own tokens",
            "All windows have the same number of tokens here, so both divisions give the same number.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "both",
            "Averaging gradients is right, and the parameters must not be touched at all: their sum doubles every "
            "weight in each step.",
            ({faults.AVERAGE: AFTER},),
        ),
        WrongFix(
            "summed",
            "These are the gradients, but their sum. The loss of each rank is divided as for an average, so the "
            "gradient is now too large by the number of replicas.",
            ({faults.AVERAGE: 'return self.group.all_reduce(flat, "sum", async_op=True)'},),
        ),
        WrongFix(
            "one rank's",
            "A broadcast makes the replicas equal, with the gradient of rank 0: half of the batch is thrown away.",
            ({faults.AVERAGE: "return self.group.broadcast(flat, async_op=True)"},),
        ),
    ),
    investigation=(
        Clue(
            "replica-check",
            "Replicas that have averaged gradients hold the same bits for ever. These differ in every parameter after "
            "a few steps, so gradients never met: the sampler and the loss are out.",
        ),
        Clue(
            "gradients",
            "The gradient of a parameter is not a multiple of one process's, it is another vector: that of this rank's "
            "own windows. What was reduced was something else.",
        ),
    ),
    misleading=Clue(
        "ledger",
        "One all-reduce of exactly the gradients' bytes, beside two numbers for the loss: parameters and gradients "
        "have the same size, so no count of bytes can tell them apart.",
    ),
    lesson=(
        "A receipt of bytes proves that something was sent, not what. Parameters averaged after the update are even "
        "exact for plain SGD from equal replicas; averaged in backward, before it, they leave each rank its own update."
    ),
    proof=Oracle([ParallelConfig(dp=2), ParallelConfig(dp=3)]),
)


def _same_bytes(record: Record) -> Row:
    """As many bytes as an all-reduce of all gradients, at least."""
    parameters = sum(gradient.numel() for gradient in record.alone.gradients.values())
    return row(
        "bytes all-reduced are at least the model's", True, record.ranks[0].ledger.bytes("all_reduce") >= 4 * parameters
    )


def _windows_are_disjoint(record: Record) -> Row:
    taken = [window for rank in record.ranks for window in rank.windows]
    return row("windows that two ranks read in the first step", 0, len(taken) - len(set(taken)))


TWO_REPLICAS_ONE_RUN = Exhibit(
    name="two-gpus-one-run",
    title="Two GPUs, and the curve of one",
    kind="training",
    symptom=(
        "Two replicas, the loss falls, and the replica check that runs every hundred steps has never said a word. "
        "Tokens per second have doubled. Yet per step the loss falls no faster than it did with one GPU and half the "
        "batch. This exhibit has two culprits that hide each other: name both, and repair both."
    ),
    faults=(
        faults.SAME_WINDOWS,
        faults.NEVER_SYNCHRONISED,
    ),
    run=Run(Scene(ParallelConfig(dp=2))),
    looks=lambda record: [seen.falls(record), seen.replicas_agree(record)],
    trace=lambda record: [
        seen.gradients_are_right(record),
        seen.replicas_agree(record),
        _windows_are_disjoint(record),
        seen.norm_is_right(record),
        row("loss of the last step", record.alone.steps[-1].loss, record.steps[-1].loss, "nats", 1e-4),
    ],
    measurements=seen.USUAL,
    innocents=(
        Suspect(
            "data parallelism, the bucket",
            "gradients are summed and not averaged",
            "No gradient is reduced at all: the ledger has no all-reduce of the model's size.",
        ),
        Suspect(
            "optimizer",
            "the learning rate was not scaled with the batch",
            "That is a question of tuning, and it would not make the gradient of the first step equal to that of half "
            "of the batch.",
        ),
        Suspect(
            "replica check",
            "the check compares a rank with itself",
            "The check is right: these replicas really hold the same bits. Ask how they can without sending anything.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "the sampler alone",
            "Now the ranks read different windows and still send nothing, so the replicas drift apart: the second bug "
            "was hidden by the first.",
            ({}, None),
        ),
        WrongFix(
            "the reduction alone",
            "Now two equal gradients are averaged, which changes nothing: each rank still reads the same windows.",
            (None, {}),
        ),
        WrongFix(
            "blocks of windows",
            "The stream is dealt out like cards, so rank r starts at window r. Starting at r · batch_size makes the "
            "ranks overlap, and windows are read twice.",
            ({"position + self.rank + self": "position + self.rank * self.batch_size + self"}, {}),
        ),
    ),
    investigation=(
        Clue(
            "ledger",
            "No all-reduce of the model's size: gradients do not meet. That is the first culprit, and it poses a "
            "riddle, since replicas that do not meet have to drift, and these do not.",
        ),
        Clue(
            "windows",
            "Both ranks read the same windows. Equal replicas on equal data stay equal without a message, which is why "
            "the replica check was silent.",
        ),
    ),
    misleading=Clue(
        "replica-check",
        "It is clean, and it is right: the ranks compute the same thing twice. A check of equality cannot tell "
        "agreement from repetition.",
    ),
    lesson=(
        "Two bugs can satisfy the very check that finds either. After a repair, look at the trace again before you "
        "close the issue, and test data and reduction each on its own."
    ),
    proof=Oracle(
        [
            ParallelConfig(dp=2),
            ParallelConfig(dp=2, accumulate=3),
            ParallelConfig(dp=2, zero=2, accumulate=2),
        ]
    ),
)

EXPERTS_DOUBLED = Exhibit(
    name="eager-experts",
    title="Experts that want half the learning rate",
    kind="training",
    symptom=(
        "A mixture of experts is moved to expert parallelism over two ranks. AdamW trains it, and loss and throughput "
        "are what was hoped for. Weeks later an ablation with plain SGD finds that experts want half the learning rate "
        "of everything else, and a paper is begun."
    ),
    faults=(faults.EXPERTS_DOUBLED,),
    run=Run(Scene(ParallelConfig(dp=2, ep=2), model=seen.EXPERTS)),
    looks=lambda record: [seen.falls(record), seen.starts_right(record), seen.replicas_agree(record)],
    trace=lambda record: [seen.gradients_are_right(record)],
    measurements=seen.USUAL,
    innocents=(
        Suspect(
            "router",
            "the router sends most tokens to few experts",
            "An uneven router makes some experts' gradients large and others' small. Here all of them have exactly the "
            "same multiple.",
        ),
        Suspect(
            "all-to-all",
            "tokens come back to the wrong rank",
            "The first loss is one process's to six digits, so the tokens came home. The forward pass is right.",
        ),
        Suspect(
            "optimizer",
            "weight decay is applied to experts twice",
            "The gradient of the first step is wrong before the optimizer has run.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "over all ranks",
            "Ranks of one expert group hold different experts. Reducing over all ranks adds the gradients of experts "
            "that have nothing to do with each other.",
            ({"own.all_reduce(flat": "self.group.all_reduce(flat"},),
        ),
        WrongFix(
            "a constant",
            "2 is right for two ranks. With four ranks an expert has seen the tokens of all four, and the divisor is "
            "4.",
            ({"flat.div_(self.group.world_size)": "flat.div_(2)"},),
        ),
        WrongFix(
            "not divided",
            "Without a division the gradient is a sum over ranks, and everything else in the model is an average.",
            ({"flat.div_(self.group.world_size)": "flat"},),
        ),
    ),
    investigation=(
        Clue(
            "gradients",
            "Router, attention and embedding are right, and every expert's gradient is 2.0 times one process's. A "
            "clean factor for one class of parameters points at how that class is reduced. Two is the number of ranks.",
        ),
    ),
    misleading=Clue(
        "gradient-norms",
        "Experts contribute so little to the norm of this model that it moves in the fourth digit. A norm over all "
        "parameters hides what happens to a class of small ones.",
    ),
    lesson=(
        "A gradient is divided by the number of ranks whose tokens it has seen, however few of them hold the "
        "parameter. Compare gradients by name, since a norm adds them all up."
    ),
    proof=Oracle([ParallelConfig(dp=4, ep=2), ParallelConfig(dp=4, ep=4)]),
    budget=45,
)

EXHIBITS = (PARAMETERS_AVERAGED, TWO_REPLICAS_ONE_RUN, EXPERTS_DOUBLED)
