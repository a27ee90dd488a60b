"""Exhibits of models that are cut over ranks: tensor and sequence parallelism, and norms over such a model."""

from course.kit.receipts import row
from course.lab22_bug_museum import training_measurements as seen
from course.lab22_bug_museum.exhibit import Clue, Exhibit, Suspect, WrongFix
from course.lab22_bug_museum.training_runs import Oracle, Run, Scene
from course.shared.faults import training as faults
from minillm.train.parallel_config import ParallelConfig

NORMS_UNDER_SEQUENCE = Exhibit(
    name="worse-after-conversion",
    title="Worse after the conversion",
    kind="training",
    symptom=(
        "Sequence parallelism is switched on to save activations under tensor parallelism. Loss and gradient norm "
        "agree with the run before to three digits for as long as anybody looks. A checkpoint converted to another "
        "number of ranks is slightly worse than the run that wrote it."
    ),
    faults=(faults.NORMS_NOT_SUMMED,),
    run=Run(Scene(ParallelConfig(tp=2, sequence=True))),
    looks=lambda record: [
        seen.falls(record),
        seen.starts_right(record),
        row("gradient norm, to 5 %", record.alone.norm, record.ranks[0].norm, "", 0.05),
    ],
    trace=lambda record: [seen.gradients_are_right(record), seen.replicas_agree(record)],
    measurements=seen.USUAL,
    innocents=(
        Suspect(
            "checkpoint",
            "the conversion cuts the slices in another order",
            "The ranks disagree during the run already, before anything is saved. A conversion can only choose one of "
            "them.",
        ),
        Suspect(
            "sequence parallelism, gather",
            "the gather before attention joins the parts in the wrong order",
            "The first loss is one process's, so the forward pass has the tokens in order.",
        ),
        Suspect(
            "tensor parallelism, matrices",
            "a row-parallel layer sums its output twice",
            "Matrices have the right gradients. Only the vectors of the norms are wrong.",
        ),
        Suspect(
            "gradient norm",
            "the norm counts the norms' weights twice",
            "The logged norm is nearly right, and it does not change the gradients anyway.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "everything",
            "Slices of matrices belong to one rank each. Summing them over the ranks adds different parts of a matrix "
            "to each other; only what is held by all and seen by each in part is a partial sum.",
            (
                {
                    "sum_partial(self.stepped.gradients_by_name(), self.stepped.placements, self.groups.tp)": (
                        "[self.groups.tp.all_reduce(each) for each in self.stepped.gradients_by_name().values()]"
                    )
                },
            ),
        ),
        WrongFix(
            "over the replicas",
            "The parts of a sequence lie on the ranks of tensor parallelism. The replicas of this run are one rank, "
            "and a sum over one rank changes nothing.",
            (
                {
                    "self.stepped.placements, self.groups.tp)": "self.stepped.placements, self.groups.replicas)",
                },
            ),
        ),
    ),
    investigation=(
        Clue(
            "replica-check",
            "It names them: `attention_norm`, `mlp_norm` and `norm` differ between ranks, since their gradients "
            "differ. That is the class of parameters that all ranks hold whole and each trains on its part of the "
            "sequence.",
        ),
    ),
    misleading=Clue(
        "gradient-norms",
        "The norms' weights are few, so the norm of the whole gradient agrees to three digits. It has cost people "
        "months.",
    ),
    lesson=(
        "Whatever is replicated and sees a part of the tokens has a partial gradient. A list of names to reduce goes "
        "stale; a placement that says `Partial` for each parameter does not."
    ),
    proof=Oracle([ParallelConfig(tp=2, sequence=True)]),
    budget=45,
)

NORM_COUNTS_COPIES = Exhibit(
    name="clips-too-often",
    title="Clipped in steps that are harmless on one process",
    kind="training",
    symptom=(
        "A model with tied embeddings moves from one process to a pipeline of two stages. Every gradient has been "
        "checked against one process, by name, and is right. Still the run clips in steps in which one process does "
        "not."
    ),
    faults=(faults.NORM_COUNTS_COPIES,),
    run=Run(Scene(ParallelConfig(pp=2, accumulate=2), model=seen.TIED)),
    looks=lambda record: [seen.falls(record), seen.starts_right(record), seen.gradients_are_right(record)],
    trace=lambda record: [seen.norm_is_right(record)],
    measurements=seen.USUAL,
    innocents=(
        Suspect(
            "pipeline, loss",
            "the loss is too large by the number of microbatches",
            "Then the gradients would be, too, and each of them has been compared and is right.",
        ),
        Suspect(
            "pipeline, tied embedding",
            "the two stages' gradients of the embedding are not added up",
            "The embedding's gradient is one process's, which is the sum of both uses.",
        ),
        Suspect(
            "clipping",
            "the threshold is applied per stage and not to the whole model",
            "Then the logged norm would be smaller than one process's, since each stage sees a part. It is larger.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "rank 0 only",
            "Now the second stage's own parameters count nowhere: each parameter has to count once, on some rank.",
            ({faults.COUNTED: "counted = list(gradients.values()) if group is None or group.rank == 0 else []"},),
        ),
        WrongFix(
            "divided by the ranks",
            "Dividing the sum by the number of ranks is right only if every rank holds everything. Most parameters "
            "are on one stage.",
            (
                {
                    faults.COUNTED: "counted = list(gradients.values())",
                    "return (group.all_reduce(total) if": "return (group.all_reduce(total) / group.world_size if",
                },
            ),
        ),
        WrongFix(
            "without the shared",
            "This leaves the shared parameter out on both stages, and so it never counts.",
            (
                {
                    faults.COUNTED: "counted = [g for name, g in gradients.items() if 'embedding' not in str(name)]",
                },
            ),
        ),
    ),
    investigation=(
        Clue(
            "gradient-norms",
            "It is larger than one process's in every step, although the report says that each gradient is right. Then "
            "the sum over parameters is wrong, not its terms.",
        ),
        Clue(
            "replica-check",
            "One parameter is held by two ranks, and they agree in it: the tied embedding. The squares of its "
            "gradient, added once more, are what is too much.",
        ),
    ),
    misleading=Clue(
        "gradients",
        "Twelve minutes to confirm what the report said. Right gradients and a wrong norm are two different things, "
        "and clipping looks at the norm.",
    ),
    lesson=(
        "Sums over the whole model need an owner for every parameter. Test the norm on its own: no comparison of "
        "gradients will notice it."
    ),
    proof=Oracle([ParallelConfig(pp=2, accumulate=2), ParallelConfig(tp=2)], case="tied"),
    budget=45,
)

PATCHWORK = Exhibit(
    name="another-start",
    title="Another start on another number of ranks",
    kind="training",
    symptom=(
        "Dropout masks have to differ between tensor-parallel ranks, so somebody adds the rank to the seed at the top "
        "of the program. The run trains as well as before. But it cannot be repeated on another number of ranks: with "
        "the same seed, two and four ranks begin with different losses."
    ),
    faults=(faults.PATCHWORK,),
    run=Run(Scene(ParallelConfig(tp=2))),
    looks=lambda record: [seen.falls(record), seen.replicas_agree(record)],
    trace=lambda record: [seen.gradients_are_right(record)],
    measurements=seen.USUAL,
    innocents=(
        Suspect(
            "data, sampler",
            "each rank shuffles with its own seed",
            "Both ranks of a tensor-parallel pair read the same windows, and their numbers are one process's.",
        ),
        Suspect(
            "tensor parallelism, loss",
            "the vocabulary's slices are normalised on their own",
            "Then the loss would be that of half a vocabulary, lower by about log 2. It differs in the third digit.",
        ),
        Suspect(
            "optimizer",
            "the state of the optimizer depends on the number of ranks",
            "The first loss differs already, before any optimizer has run.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "a constant seed",
            "All ranks agree now, on a seed that nobody can choose: the run's own seed no longer says which model it "
            "is.",
            ({"start.fill(part, seed, device": "start.fill(part, 0, device"},),
        ),
        WrongFix(
            "the rank of tp",
            "The rank within its group is still a rank: slices of one matrix have to come from one draw.",
            ({"start.fill(part, seed, device": "start.fill(part, seed + self.groups.tp.rank, device"},),
        ),
    ),
    investigation=(
        Clue(
            "losses",
            "The very first loss is another model's. That excludes everything that happens after the forward pass: "
            "reductions, optimizer, schedule.",
        ),
        Clue(
            "windows",
            "The data are the same. What is left before the first loss is the model, and how it is drawn.",
        ),
    ),
    misleading=Clue(
        "replica-check",
        "Slices are on one rank each, so nothing can differ, and the norms' weights, which are copies, all start at "
        "one. A patchwork of random slices is a fine random model: only the comparison with one process shows it.",
    ),
    lesson=(
        "Draw a parameter from (seed, name) and cut it, and the model is the same on any number of ranks. Only what is "
        "meant to differ, such as dropout, may know the rank."
    ),
    proof=Oracle([ParallelConfig(tp=2)]),
    budget=45,
)


EXHIBITS = (
    NORMS_UNDER_SEQUENCE,
    NORM_COUNTS_COPIES,
    PATCHWORK,
)
