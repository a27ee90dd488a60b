"""Spoilers of lab 05: sequence shards whose norms drift apart, sums that are thrown away."""

from course.kit.exercises import KnownAnswers

# The bug of gpt-neox#1257, PaddleNLP#7610 and Megatron-LM#1446.

sequence_parallel = KnownAnswers("sequence-parallel")

sequence_parallel.mistake(
    "norm-gradients-not-reduced",
    {
        "group.all_reduce(torch.cat([p.grad.flatten() for p in parameters]))": (
            "torch.cat([p.grad.flatten() for p in parameters])"
        )
    },
    expect="will drift apart",
)
sequence_parallel.mistake(
    "norm-gradients-averaged", {"in parameters]))": 'in parameters]), op="avg")'}, expect="so the shares add"
)
sequence_parallel.mistake(
    "one-all-reduce-per-norm",
    {
        "group.all_reduce(torch.cat([p.grad.flatten() for p in parameters]))": (
            "torch.cat([group.all_reduce(p.grad).flatten() for p in parameters])"
        )
    },
    expect="latency is all they cost",
)
sequence_parallel.mistake(
    "gather-backward-cuts",
    {
        "ctx.group.reduce_scatter(gradient.contiguous())": (
            "gradient.chunk(ctx.group.world_size)[ctx.group.rank].clone()"
        )
    },
    expect="has to sum the ranks' shares",
)
sequence_parallel.mistake(
    "all-reduce-then-slice",
    {"group.reduce_scatter(share)": "group.all_reduce(share.clone()).chunk(group.world_size)[group.rank].clone()"},
    expect="its own rows of the sum only",
)
sequence_parallel.mistake(
    "backward-all-reduce-then-slice",
    {
        "ctx.group.reduce_scatter(gradient.contiguous())": (
            "ctx.group.all_reduce(gradient.clone()).chunk(ctx.group.world_size)[ctx.group.rank].clone()"
        )
    },
    expect="its own rows of the sum only",
)
sequence_parallel.mistake(
    "scatter-without-sum",
    {"group.reduce_scatter(share)": "share.chunk(group.world_size)[group.rank].clone()"},
    expect="the output is wrong",
)
sequence_parallel.mistake(
    "scatter-backward-own-rows",
    {
        "ctx.group.all_gather(gradient.contiguous())": (
            "torch.cat([gradient * (rank == ctx.group.rank) for rank in range(ctx.group.world_size)])"
        )
    },
    expect="bring the gradients of all rows",
)
sequence_parallel.alternative(
    "all-to-all-and-a-sum",
    {
        "group.reduce_scatter(share)": (
            "group.all_to_all(share.contiguous()).unflatten(0, (group.world_size, -1)).sum(0)"
        ),
        "torch.cat([p.grad.flatten() for p in parameters])": (
            "torch.nn.utils.parameters_to_vector([p.grad for p in parameters])"
        ),
    },
)
sequence_parallel.mistake(
    "new-gradients",
    {"p.grad.copy_(total.view_as(p.grad))": "p.grad = total.view_as(p.grad).clone()"},
    expect="right sums, but in new tensors",
)
sequence_parallel.mistake(
    "norms-of-one-length",
    {
        "torch.cat([p.grad.flatten() for p in parameters])": (
            "torch.cat([p.grad.flatten()[: parameters[-1].numel()] for p in parameters])"
        ),
        "flat.split([p.numel() for p in parameters])": "flat.chunk(len(parameters))",
    },
    expect="wrong for three norms of several lengths|size",
)
sequence_parallel.mistake(
    "gathers-the-norms",
    {
        "group.all_reduce(torch.cat([p.grad.flatten() for p in parameters]))": (
            "group.all_gather(torch.cat([p.grad.flatten() for p in parameters])).view(group.world_size, -1).sum(0)"
        )
    },
    expect="1 all_gather, where one all-reduce sends less",
)
sequence_parallel.mistake(
    "group-in-the-class",
    {
        "ctx.group = group\n        return group.all_gather": "GatherIn.group = group\n        return group.all_gather",
        "ctx.group.reduce_scatter(gradient": "GatherIn.group.reduce_scatter(gradient",
    },
    expect="keep the group in ctx",
)
