"""Spoilers of lab 05: operators that sum where nothing is to be summed, an MLP that gathers in the middle."""

import torch
import torch.nn.functional as F

from course.kit import answers_of
from course.kit.exercises import KnownAnswers
from minillm.comm import ring_all_gather, ring_reduce_scatter

ANSWERS = answers_of("05_tensor_parallel")
Enter, Leave, cut_mlp, mlp = ANSWERS.Enter, ANSWERS.Leave, ANSWERS.cut_mlp, ANSWERS.mlp

# The conjugate operators

conjugate_operators = KnownAnswers("conjugate-operators")

conjugate_operators.mistake(
    "no-reduction-of-dx", {"ctx.group.all_reduce(gradient.clone())": "gradient"}, expect="other parts' shares are lost"
)
conjugate_operators.mistake(
    "averages-dx", {"gradient.clone()": 'gradient.clone(), op="avg"'}, expect="their shares add"
)
conjugate_operators.mistake(
    "reduces-in-place", {"gradient.clone()": "gradient"}, expect="changed the gradient it was handed"
)
conjugate_operators.mistake(
    "broadcasts-x", {"x.view_as(x)": "group.broadcast(x.clone())"}, expect="every rank has x already"
)
conjugate_operators.mistake(
    "row-backward-mirrors-forward",
    {
        "return group.all_reduce": "ctx.group = group\n        return group.all_reduce",
        "return gradient": "return ctx.group.all_reduce(gradient.clone())",
    },
    expect="4 times too large",
)
conjugate_operators.mistake(
    "mirrors-and-divides",
    {
        "return group.all_reduce": "ctx.group = group\n        return group.all_reduce",
        "return gradient": 'return ctx.group.all_reduce(gradient.clone(), op="avg")',
    },
    expect="right values, but backward called 1 all_reduce",
)
conjugate_operators.mistake(
    "averages-the-output", {"share.clone()": 'share.clone(), op="avg"'}, expect="parts of one sum"
)
conjugate_operators.mistake(
    "group-in-the-class",
    {
        "ctx.group = group": "Enter.group = group",
        "ctx.group.all_reduce(gradient.clone())": "Enter.group.all_reduce(gradient.clone())",
    },
    expect="keep the group in ctx",
)
conjugate_operators.mistake(
    "sums-in-float64", {"share.clone()": "share.double()"}, expect="returned torch.float64 for inputs of torch.float32"
)
conjugate_operators.mistake("changes-its-input", {"share.clone()": "share"}, expect="forward changed its input")


class ByFunctions:
    """Enter as a hook on the gradient instead of an autograd function."""

    @staticmethod
    def apply(x, group):
        x = x.view_as(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: group.all_reduce(gradient.clone()))
        return x


class BySubtraction:
    """Leave as share + (sum - share), the second term a constant: its gradient is the share's own."""

    @staticmethod
    def apply(share, group):
        total = group.all_reduce(share.detach().clone())
        return share + (total - share.detach())


class InTwoHalves(Leave):
    """The sum as a reduce-scatter and an all-gather, which is what a ring does anyway."""

    @staticmethod
    def forward(ctx, share, group):
        flat = share.flatten()
        return ring_all_gather(ring_reduce_scatter(flat, group), group, torch.empty_like(flat)).view_as(share)


conjugate_operators.alternative("hook-and-constant")((ByFunctions, BySubtraction))
conjugate_operators.alternative("reduce-scatter-and-gather")((Enter, InTwoHalves))

# The MLP

parallel_mlp = KnownAnswers("parallel-mlp")

parallel_mlp.mistake(
    "cut-the-wrong-way",
    {
        "gate.chunk(world_size)": "gate.chunk(world_size, dim=1)",
        "up.chunk(world_size)": "up.chunk(world_size, dim=1)",
        "down.chunk(world_size, dim=1)": "down.chunk(world_size)",
    },
    expect="inner numbers, whole",
)
parallel_mlp.mistake("forgets-enter", {"x = Enter.apply(x, group)": ""}, expect="is Enter in front of every use of x")
parallel_mlp.mistake(
    "one-enter-each",
    {
        "x = Enter.apply(x, group)": "",
        "x @ gate": "Enter.apply(x, group) @ gate",
        "x @ up": "Enter.apply(x, group) @ up",
    },
    expect="backward called 2 all_reduce",
)
parallel_mlp.mistake("no-return", {"return Leave.apply": "Leave.apply"}, expect="is there a return")
parallel_mlp.mistake(
    "autograd-cut-off",
    {
        "Leave.apply((F.silu(x @ gate.T) * (x @ up.T)) @ down.T, group)": (
            "group.all_reduce(((F.silu(x @ gate.T) * (x @ up.T)) @ down.T).detach())"
        )
    },
    expect="autograd cannot pass through it",
)
parallel_mlp.mistake(
    "forgets-leave",
    {"Leave.apply((F.silu(x @ gate.T) * (x @ up.T)) @ down.T, group)": "(F.silu(x @ gate.T) * (x @ up.T)) @ down.T"},
    expect="output is wrong",
)


class Gather(torch.autograd.Function):
    """[n, f/t] -> [n, f]; backward, this rank's columns."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return torch.cat(group.all_gather(x.contiguous()).chunk(group.world_size), dim=1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(ctx.group.world_size, dim=1)[ctx.group.rank].contiguous(), None


def gathers_between(x, shards, group):
    """The column layer's output is gathered, as a stand-alone one's is, and cut again for the row layer."""
    gate, up, down = shards
    x = Enter.apply(x, group)
    inner = Gather.apply(F.silu(x @ gate.T) * (x @ up.T), group)
    return Leave.apply(inner.chunk(group.world_size, dim=1)[group.rank] @ down.T, group)


parallel_mlp.mistake("gathers-between-the-layers", expect="needs nothing from the others")((cut_mlp, gathers_between))


def fused(x, shards, group):
    """Gate and up as one product, as most real implementations have it."""
    both = Enter.apply(x, group) @ torch.cat(shards[:2]).T
    gate, up = both.chunk(2, dim=1)
    return Leave.apply((F.silu(gate) * up) @ shards[2].T, group)


parallel_mlp.alternative("gate-and-up-in-one")((cut_mlp, fused))
parallel_mlp.alternative(
    "every-t-th-inner-number",
    {
        "gate.chunk(world_size)[rank]": "gate[rank::world_size]",
        "up.chunk(world_size)[rank]": "up[rank::world_size]",
        "down.chunk(world_size, dim=1)[rank]": "down[:, rank::world_size]",
    },
)
