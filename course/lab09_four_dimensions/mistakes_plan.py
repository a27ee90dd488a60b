"""Spoilers of lab 09, plans and steps: wrong estimates, plans that do not fit or lose, steps with wrong gradients."""

from course.kit.exercises import KnownAnswers
from course.lab09_four_dimensions import experiments_plan as plans
from course.lab09_four_dimensions.experiments_breaks import buggy_hybrid_step
from minillm.predict.planner import search
from minillm.predict.planner.layout import Layout
from minillm.predict.planner.memory import stage_memory, token_bytes
from minillm.predict.planner.search import layouts

# Estimates.

layout_estimate = KnownAnswers("layout-estimate")

layout_estimate.mistake(
    "the head is forgotten",
    {"tables = 2 if layout.pp == 1 else 1": "tables = 1"},
    says="With a single stage the first is also the last, and holds the head's table besides the embedding's.",
)
layout_estimate.mistake(
    "ZeRO over dp alone",
    {"layout.dp * layout.cp": "layout.dp"},
    says="Ranks of cp hold the same parameters as well: ZeRO divides over dp · cp.",
)
layout_estimate.mistake(
    "eight bytes of optimizer",
    {"+ 12 /": "+ 8 /"},
    says="Adam in mixed precision keeps a 32-bit master weight besides its two moments: 12 bytes.",
)
layout_estimate.mistake(
    "one microbatch in flight",
    {"min(layout.pp, layout.microbatches)": "1"},
    says="Under 1F1B the first stage starts a microbatch for every stage before the first one comes back.",
)
layout_estimate.mistake(
    "all microbatches in flight",
    {"min(layout.pp, layout.microbatches)": "layout.microbatches"},
    says="That is GPipe's memory. 1F1B holds at most as many microbatches as there are stages.",
)
layout_estimate.mistake(
    "without a bubble",
    {" + layout.pp - 1": ""},
    says="The last stage has to wait for pp - 1 others before it sees its first microbatch.",
)
layout_estimate.mistake(
    "forward only",
    {"compute = 6 *": "compute = 2 *"},
    says="2 FLOPs per parameter and token are forward. Backward makes twice as many: 6 together.",
)
layout_estimate.mistake(
    "an all-reduce goes round once",
    {"4 * 2 * (t - 1)": "4 * (t - 1)"},
    says="An all-reduce is a reduce-scatter and an all-gather: 2(t-1)/t of the tensor, not (t-1)/t.",
)
layout_estimate.mistake(
    "cp does not divide the tokens",
    {"seq / layout.cp": "seq"},
    says="A rank of cp holds 1/cp of every sequence, so its activations and its work are divided, too.",
)
layout_estimate.mistake(
    "tp divides token_bytes again",
    {"token_bytes(model, layout)": "token_bytes(model, layout) / t"},
    says="token_bytes knows the layout: it is what one tp rank keeps. Do not divide it by tp once more.",
)
layout_estimate.mistake(
    "the look-up multiplies",
    {"model.active_layer + model.table)": "model.active_layer + 2 * model.table)"},
    says="Only the head multiplies every token by its table. An embedding is looked up, which costs no FLOPs.",
)
layout_estimate.mistake(
    "the table is cut by pp",
    {"tables = 2 if layout.pp == 1 else 1": "tables = 2 / layout.pp"},
    says="A pipeline divides the layers. The embedding table lies on the first stage, whole but for tp.",
)
for _name, _old, _new, _says in (
    (
        "weights are never sharded",
        "2 / (shards if layout.zero == 3 else 1)",
        "2",
        "ZeRO 3 divides the 2 bytes of weight, too: each rank keeps a shard of them and gathers the rest.",
    ),
    (
        "gradients over dp alone",
        "4 / (shards if",
        "4 / (layout.dp if",
        "ZeRO 2 divides gradients as ZeRO divides the rest: over dp · cp, whose ranks all hold the same parameters.",
    ),
    (
        "ZeRO 1 divides nothing",
        "layout.zero >= 1",
        "layout.zero >= 2",
        "ZeRO 1 divides Adam's 12 bytes already; gradients follow in stage 2.",
    ),
    (
        "stages in flight, however few microbatches",
        "min(layout.pp, layout.microbatches)",
        "layout.pp",
        "With fewer microbatches than stages the first stage never holds pp of them: there are only so many.",
    ),
    (
        "microbatches of one sequence",
        "layout.micro_batch * seq",
        "seq",
        "A microbatch has micro_batch sequences, so its tokens are micro_batch · seq / cp.",
    ),
    (
        "cp leaves the all-reduces as they are",
        "/ t * tokens",
        "/ t * layout.micro_batch * seq",
        "A rank of cp all-reduces the activations of its own tokens, 1/cp of the sequence.",
    ),
    (
        "cp leaves the activations as they are",
        "kept = layers * tokens",
        "kept = layers * layout.micro_batch * seq",
        "A rank of cp keeps the activations of its own tokens, 1/cp of the sequence.",
    ),
):
    layout_estimate.mistake(_name, {_old: _new}, says=_says)


@layout_estimate.alternative("kind by kind")
def kind_by_kind(model, layout, seq, rate, link):
    stage = model.num_layers // layout.pp
    numbers = (stage * model.active_layer + model.table * (1 + (layout.pp == 1))) / layout.tp
    group = layout.dp * layout.cp
    weights, gradients, adam = 2 * numbers, 4 * numbers, 12 * numbers
    if layout.zero > 0:
        adam /= group
    if layout.zero > 1:
        gradients /= group
    if layout.zero > 2:
        weights /= group
    batch = layout.micro_batch * seq // layout.cp
    activations = stage * batch * token_bytes(model, layout) * min(layout.pp, layout.microbatches)
    work = 6 * batch * (stage * model.active_layer + model.table) / layout.tp / rate
    wire = 16 * stage * batch * model.hidden_size * (1 - 1 / layout.tp) / link
    return weights + gradients + adam + activations, (work + wire) * (layout.microbatches + layout.pp - 1)


@layout_estimate.mistake("bytes of the planner", expect="a function of the planner other than `token_bytes` was called")
def asks_the_planner(model, layout, seq, rate, link):
    held = stage_memory(model, layout, seq, stage=0)
    return held.total - held.buffers, kind_by_kind(model, layout, seq, rate, link)[1]


# Plans.

plan_for_64 = KnownAnswers("plan-for-64")

plan_for_64.mistake("states alone are divided", expect="does not fit")(lambda: Layout(dp=64, zero=3, microbatches=8))
plan_for_64.mistake("ZeRO 1 in a node", expect="does not fit")(lambda: Layout(dp=8, tp=8, zero=1, microbatches=64))
plan_for_64.mistake("a long pipeline without chunks", expect="times as long as the best")(
    lambda: Layout(tp=8, pp=8, microbatches=512, recompute="full")
)
plan_for_64.mistake("tensor parallelism over two nodes", expect="times as long as the best")(
    lambda: Layout(dp=4, zero=3, tp=16, microbatches=128, recompute="full")
)
plan_for_64.mistake("half of the GPUs", expect="GPUs of 64")(
    lambda: Layout(dp=16, zero=3, cp=2, microbatches=32, recompute="full")
)
plan_for_64.mistake("another batch", expect="sequences of 512")(
    lambda: Layout(dp=32, zero=3, cp=2, microbatches=1, recompute="full")
)
plan_for_64.mistake("a microbatch and a half", expect="micro_batch 1.6 of a layout must be a whole number")(
    lambda: Layout(dp=2, tp=8, pp=4, chunks=20, micro_batch=1.6, microbatches=160)
)
plan_for_64.mistake("the planner's best", expect="the planner's search was called")(lambda: plans.best().layout)
plan_for_64.mistake("the first of the planner's ranking", expect="the planner's search was called")(
    lambda: search.rank(plans.SEVENTY, plans.SIXTY_FOUR, plans.SEQ, plans.BATCH).best.layout
)
plan_for_64.mistake("the quickest of all that fit", expect="the planner's search was called")(
    lambda: min((each for each in plans.everything() if each.fits), key=lambda each: each.seconds).layout
)
plan_for_64.mistake("the quickest of the planner's layouts, by judge", expect="the planner's search was called")(
    lambda: (
        min(
            (plans.judge(each) for each in layouts(plans.SEVENTY, plans.SIXTY_FOUR, plans.SEQ, plans.BATCH)),
            key=lambda each: (not each.fits, each.seconds),
        ).layout
    )
)
plan_for_64.alternative("two axes")(lambda: Layout(tp=8, pp=8, chunks=10, microbatches=512))
plan_for_64.alternative("two replicas, norms computed again")(
    lambda: Layout(dp=2, zero=1, tp=8, pp=4, chunks=20, microbatches=256, recompute="light")
)


@plan_for_64.alternative("the quickest of a few, by judge")
def tries_a_few():
    judged = [plans.judge(Layout(tp=tp, cp=8 // tp, pp=8, zero=2, chunks=10, microbatches=512)) for tp in (2, 4, 8)]
    return min((each for each in judged if each.fits), key=lambda each: each.seconds).layout


# Hybrid steps.

hybrid_step = KnownAnswers("hybrid-step")

hybrid_step.mistake("dp of one rank skips", expect="asks how many ranks dp has")(buggy_hybrid_step)
hybrid_step.mistake(
    "over dp alone",
    {"replicas.all_reduce(parameter.grad)": "mesh.dp.all_reduce(parameter.grad)"},
    says="Gradients are summed over dp, but not over cp. Both axes divide the tokens.",
)
hybrid_step.mistake(
    "an average of shares",
    {"replicas.all_reduce(parameter.grad)": 'replicas.all_reduce(parameter.grad, "avg")'},
    says="You averaged over the replicas what was divided by all tokens already. Shares of one mean are summed.",
)
hybrid_step.mistake(
    "a mean of means",
    {"(loss / everywhere)": "(loss / (count * replicas.world_size))"},
    says="Each rank divided by its own number of targets, and they differ. Divide by the number of all of them.",
)
hybrid_step.mistake(
    "norms are not shared", {"name in shares": "False"}, expect="saw a part of the sequence on each tp rank"
)
hybrid_step.mistake("everything over tp", {"name in shares": "True"}, expect="slices that tp ranks do not share")
hybrid_step.mistake(
    "returns its own loss",
    {"return replicas.all_reduce(loss.detach().clone()) / everywhere": "return loss.detach() / count"},
    expect="loss that you return is not",
)
hybrid_step.mistake(
    "the loss on the first rank alone",
    {
        "return replicas.all_reduce(loss.detach().clone()) / everywhere": "total = replicas.all_reduce(loss.detach())\n"
        "    if mesh.dp.rank == mesh.cp.rank == mesh.tp.rank == 0:\n        return total / everywhere"
    },
    expect="loss that you return is not, on 3 of 4 ranks",
)
hybrid_step.mistake(
    "no sum over tp where nothing else is summed",
    {"if name in shares": "if replicas.world_size > 1 and name in shares"},
    says="With dp 1 and cp 1 the tp ranks still hold shares of the norms. Whether an axis has something to add depends "
    "on the size of its own group alone.",
)
hybrid_step.mistake(
    "norms by their name",
    {"name in shares": '"norm" in name'},
    expect="dp 2, tp 2 without sequence parallelism: .* whatever they are called",
)
hybrid_step.mistake(
    "vectors for shares",
    {"name in shares": "parameter.dim() == 1"},
    expect="dp 2, tp 2 without sequence parallelism: .* whatever they are called",
)
hybrid_step.alternative(
    "first dp, then cp",
    {"replicas.all_reduce(parameter.grad)": "mesh.cp.all_reduce(mesh.dp.all_reduce(parameter.grad))"},
)


@hybrid_step.alternative("one message for all gradients")
def coalesced(model, microbatch, mesh, shares):
    import torch

    replicas = mesh.joined("dp", "cp")
    loss, count = model(microbatch[0], targets=microbatch[1])
    totals = replicas.all_reduce(torch.stack((loss.detach(), count.detach().to(loss.dtype))))
    (loss / totals[1]).backward()
    named = dict(model.named_parameters())
    for group, names in ((replicas, list(named)), (mesh.tp, [name for name in named if name in shares])):
        if names and group.world_size > 1:
            flat = group.all_reduce(torch.cat([named[name].grad.flatten() for name in names]))
            for name, part in zip(names, flat.split([named[name].numel() for name in names]), strict=True):
                named[name].grad.copy_(part.view_as(named[name]))
    return totals[0] / totals[1]
