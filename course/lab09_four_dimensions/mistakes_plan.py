"""Spoilers of lab 09, plans and steps: wrong estimates, plans that do not fit or lose, steps with wrong gradients."""

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake
from course.lab09_four_dimensions.experiments_breaks import colleagues_step
from minillm.predict.planner.layout import Layout
from minillm.predict.planner.memory import token_bytes

right = answers_of("09_four_dimensions")

# Estimates.


def _estimate(
    model,
    layout,
    seq,
    rate,
    link,
    *,
    tables=None,
    kinds=(2, 4, 12),
    shards=None,
    flight=None,
    flops=6,
    rounds=2,
    idle=None,
    tokens=None,
    head=1,
    kept=1.0,
):
    """The reference with numbers to change."""
    layers, t = model.num_layers / layout.pp, layout.tp
    own = (layers * model.active_layer + (tables or (2 if layout.pp == 1 else 1)) * model.table) / t
    shards = shards or layout.dp * layout.cp
    held = sum(own * size / (shards if layout.zero > 2 - place else 1) for place, size in enumerate(kinds))
    tokens = tokens or layout.micro_batch * seq / layout.cp
    flight = flight or min(layout.pp, layout.microbatches)
    micro = flops * (layers * model.active_layer + head * model.table) * tokens / t / rate
    micro += layers * 4 * rounds * (t - 1) / t * tokens * model.hidden_size * 2 / link
    idle = layout.pp - 1 if idle is None else idle
    return held + layers * tokens * token_bytes(model, layout) * kept * flight, (layout.microbatches + idle) * micro


@mistake(
    "layout-estimate",
    "the head is forgotten",
    says="With a single stage the first is also the last, and holds the head's table besides the embedding's.",
)
def one_table(model, layout, seq, rate, link):
    return _estimate(model, layout, seq, rate, link, tables=1)


@mistake(
    "layout-estimate",
    "ZeRO over dp alone",
    says="Ranks of cp hold the same parameters as well: ZeRO divides over dp · cp.",
)
def over_dp(model, layout, seq, rate, link):
    return _estimate(model, layout, seq, rate, link, shards=layout.dp)


@mistake(
    "layout-estimate",
    "eight bytes of optimizer",
    says="Adam in mixed precision keeps a 32-bit master weight besides its two moments: 12 bytes.",
)
def eight_bytes(model, layout, seq, rate, link):
    return _estimate(model, layout, seq, rate, link, kinds=(2, 4, 8))


@mistake(
    "layout-estimate",
    "one microbatch in flight",
    says="Under 1F1B the first stage starts a microbatch for every stage before the first one comes back.",
)
def one_in_flight(model, layout, seq, rate, link):
    return _estimate(model, layout, seq, rate, link, flight=1)


@mistake(
    "layout-estimate",
    "all microbatches in flight",
    says="That is GPipe's memory. 1F1B holds at most as many microbatches as there are stages.",
)
def all_in_flight(model, layout, seq, rate, link):
    return _estimate(model, layout, seq, rate, link, flight=layout.microbatches)


@mistake(
    "layout-estimate",
    "without a bubble",
    says="The last stage has to wait for pp - 1 others before it sees its first microbatch.",
)
def no_bubble(model, layout, seq, rate, link):
    return _estimate(model, layout, seq, rate, link, idle=0)


@mistake(
    "layout-estimate",
    "forward only",
    says="2 FLOPs per parameter and token are forward. Backward makes twice as many: 6 together.",
)
def forward_flops(model, layout, seq, rate, link):
    return _estimate(model, layout, seq, rate, link, flops=2)


@mistake(
    "layout-estimate",
    "an all-reduce goes round once",
    says="An all-reduce is a reduce-scatter and an all-gather: 2(t-1)/t of the tensor, not (t-1)/t.",
)
def one_round(model, layout, seq, rate, link):
    return _estimate(model, layout, seq, rate, link, rounds=1)


@mistake(
    "layout-estimate",
    "cp does not divide the tokens",
    says="A rank of cp holds 1/cp of every sequence, so its activations and its work are divided, too.",
)
def whole_sequences(model, layout, seq, rate, link):
    return _estimate(model, layout, seq, rate, link, tokens=layout.micro_batch * seq)


@mistake(
    "layout-estimate",
    "tp divides token_bytes again",
    says="token_bytes knows the layout: it is what one tp rank keeps. Do not divide it by tp once more.",
)
def divided_twice(model, layout, seq, rate, link):
    return _estimate(model, layout, seq, rate, link, kept=1 / layout.tp)


@mistake(
    "layout-estimate",
    "the look-up multiplies",
    says="Only the head multiplies every token by its table. An embedding is looked up, which costs no FLOPs.",
)
def both_tables_multiply(model, layout, seq, rate, link):
    return _estimate(model, layout, seq, rate, link, head=2)


@mistake(
    "layout-estimate",
    "the table is cut by pp",
    says="A pipeline divides the layers. The embedding table lies on the first stage, whole but for tp.",
)
def table_over_stages(model, layout, seq, rate, link):
    return _estimate(model, layout, seq, rate, link, tables=2 / layout.pp)


@alternative("layout-estimate", "kind by kind")
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


# Plans.


@mistake("plan-for-64", "states alone are divided", expect="does not fit")
def no_room_for_activations():
    return Layout(dp=64, zero=3, microbatches=8)


@mistake("plan-for-64", "ZeRO 1 in a node", expect="does not fit")
def zero_one():
    return Layout(dp=8, tp=8, zero=1, microbatches=64)


@mistake("plan-for-64", "a long pipeline without chunks", expect="times as long as the best")
def plain_pipeline():
    return Layout(tp=8, pp=8, microbatches=512, recompute="full")


@mistake("plan-for-64", "tensor parallelism over two nodes", expect="times as long as the best")
def across_nodes():
    return Layout(dp=4, zero=3, tp=16, microbatches=128, recompute="full")


@mistake("plan-for-64", "half of the GPUs", expect="GPUs of 64")
def half():
    return Layout(dp=16, zero=3, cp=2, microbatches=32, recompute="full")


@mistake("plan-for-64", "another batch", expect="sequences of 512")
def another_batch():
    return Layout(dp=32, zero=3, cp=2, microbatches=1, recompute="full")


@alternative("plan-for-64", "fully sharded, all computed again")
def fully_sharded():
    return Layout(dp=32, zero=3, cp=2, microbatches=16, recompute="full")


@alternative("plan-for-64", "two stages of sharded data parallelism")
def sharded_stages():
    return Layout(dp=16, zero=3, cp=2, pp=2, chunks=8, microbatches=32, recompute="full")


# Hybrid steps.


def _step(model, microbatch, mesh, shares, *, groups=None, op="sum", own_mean=False, norms=True, everything=False):
    """The reference with one thing to change. groups: those over which gradients are reduced, one after the other."""
    tokens, targets = microbatch
    replicas = mesh.joined("dp", "cp")
    loss, count = model(tokens, targets=targets)
    everywhere = replicas.all_reduce(count.detach().clone())
    (loss / (count * replicas.world_size if own_mean else everywhere)).backward()
    for name, parameter in model.named_parameters():
        for group in [replicas] if groups is None else groups:
            group.all_reduce(parameter.grad, op)
        if (norms and name in shares) or everything:
            mesh.tp.all_reduce(parameter.grad)
    return replicas.all_reduce(loss.detach().clone()) / everywhere


@mistake("hybrid-step", "dp of one rank skips", expect="asks how many ranks dp has")
def skipped(model, microbatch, mesh, shares):
    return colleagues_step(model, microbatch, mesh, shares)


@mistake(
    "hybrid-step",
    "over dp alone",
    says="Gradients are summed over dp, but not over cp. Both axes divide the tokens.",
)
def dp_alone(model, microbatch, mesh, shares):
    return _step(model, microbatch, mesh, shares, groups=[mesh.dp])


@mistake(
    "hybrid-step",
    "an average of shares",
    says="You averaged over the replicas what was divided by all tokens already. Shares of one mean are summed.",
)
def averaged(model, microbatch, mesh, shares):
    return _step(model, microbatch, mesh, shares, op="avg")


@mistake(
    "hybrid-step",
    "a mean of means",
    says="Each rank divided by its own number of targets, and they differ. Divide by the number of all of them.",
)
def mean_of_means(model, microbatch, mesh, shares):
    return _step(model, microbatch, mesh, shares, own_mean=True)


@mistake("hybrid-step", "norms are not shared", expect="saw a part of the sequence on each tp rank")
def norms_left_out(model, microbatch, mesh, shares):
    return _step(model, microbatch, mesh, shares, norms=False)


@mistake("hybrid-step", "everything over tp", expect="slices that tp ranks do not share")
def over_tp(model, microbatch, mesh, shares):
    return _step(model, microbatch, mesh, shares, everything=True)


@mistake("hybrid-step", "returns its own loss", expect="loss that you return is not")
def own_loss(model, microbatch, mesh, shares):
    tokens, targets = microbatch
    found = _step(model, microbatch, mesh, shares)
    loss, count = model(tokens, targets=targets)
    return loss.detach() / count if found is not None else None


@alternative("hybrid-step", "first dp, then cp")
def one_after_the_other(model, microbatch, mesh, shares):
    return _step(model, microbatch, mesh, shares, groups=[mesh.dp, mesh.cp])


@alternative("hybrid-step", "one message for all gradients")
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
