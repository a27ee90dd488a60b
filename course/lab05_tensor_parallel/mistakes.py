"""Spoilers of lab 05: operators that sum where nothing is to be summed, an MLP that gathers in the middle."""

import torch
import torch.nn.functional as F

from course.kit import answers_of
from course.kit.exercises import alternative, mistake
from minillm.comm import ring_all_gather, ring_reduce_scatter

ANSWERS = answers_of("05_tensor_parallel")
Enter, Leave, cut_mlp, mlp = ANSWERS.Enter, ANSWERS.Leave, ANSWERS.cut_mlp, ANSWERS.mlp

# The conjugate operators


class KeepsItsShare(Enter):
    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Averages(Enter):
    @staticmethod
    def backward(ctx, gradient):
        return ctx.group.all_reduce(gradient.clone(), op="avg"), None


class InPlace(Enter):
    @staticmethod
    def backward(ctx, gradient):
        return ctx.group.all_reduce(gradient), None


class BroadcastsForward(Enter):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return group.broadcast(x.clone())


class Mirrors(Leave):
    @staticmethod
    def forward(ctx, share, group):
        ctx.group = group
        return group.all_reduce(share.clone())

    @staticmethod
    def backward(ctx, gradient):
        return ctx.group.all_reduce(gradient.clone()), None


class MirrorsAndDivides(Mirrors):
    @staticmethod
    def backward(ctx, gradient):
        return ctx.group.all_reduce(gradient.clone(), op="avg"), None


class AveragesForward(Leave):
    @staticmethod
    def forward(ctx, share, group):
        return group.all_reduce(share.clone(), op="avg")


class ChangesItsInput(Leave):
    @staticmethod
    def forward(ctx, share, group):
        return group.all_reduce(share)


mistake("conjugate-operators", "no-reduction-of-dx", expect="other parts' shares are lost")((KeepsItsShare, Leave))
mistake("conjugate-operators", "averages-dx", expect="their shares add")((Averages, Leave))
mistake("conjugate-operators", "reduces-in-place", expect="changed the gradient it was handed")((InPlace, Leave))
mistake("conjugate-operators", "broadcasts-x", expect="every rank has x already")((BroadcastsForward, Leave))
mistake("conjugate-operators", "row-backward-mirrors-forward", expect="4 times too large")((Enter, Mirrors))
mistake("conjugate-operators", "mirrors-and-divides", expect="right values, but backward called 1 all_reduce")(
    (Enter, MirrorsAndDivides)
)
mistake("conjugate-operators", "averages-the-output", expect="parts of one sum")((Enter, AveragesForward))
mistake("conjugate-operators", "changes-its-input", expect="forward changed its input")((Enter, ChangesItsInput))


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


alternative("conjugate-operators", "hook-and-constant")((ByFunctions, BySubtraction))
alternative("conjugate-operators", "reduce-scatter-and-gather")((Enter, InTwoHalves))

# The MLP


def cut_by_columns(gate, up, down, rank, world_size):
    return gate.chunk(world_size, dim=1)[rank], up.chunk(world_size, dim=1)[rank], down.chunk(world_size)[rank]


def without_enter(x, shards, group):
    gate, up, down = shards
    return Leave.apply((F.silu(x @ gate.T) * (x @ up.T)) @ down.T, group)


def enters_twice(x, shards, group):
    gate, up, down = shards
    hidden = F.silu(Enter.apply(x, group) @ gate.T) * (Enter.apply(x, group) @ up.T)
    return Leave.apply(hidden @ down.T, group)


def without_leave(x, shards, group):
    gate, up, down = shards
    x = Enter.apply(x, group)
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def returns_nothing(x, shards, group):
    mlp(x, shards, group)


def sums_in_the_open(x, shards, group):
    """all_reduce as it is: autograd does not see it."""
    gate, up, down = shards
    x = Enter.apply(x, group)
    return group.all_reduce(((F.silu(x @ gate.T) * (x @ up.T)) @ down.T).detach())


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


mistake("parallel-mlp", "cut-the-wrong-way", expect="inner numbers, whole")((cut_by_columns, mlp))
mistake("parallel-mlp", "forgets-enter", expect="is Enter in front of every use of x")((cut_mlp, without_enter))
mistake("parallel-mlp", "one-enter-each", expect="backward called 2 all_reduce")((cut_mlp, enters_twice))
mistake("parallel-mlp", "no-return", expect="is there a return")((cut_mlp, returns_nothing))
mistake("parallel-mlp", "autograd-cut-off", expect="autograd cannot pass through it")((cut_mlp, sums_in_the_open))
mistake("parallel-mlp", "forgets-leave", expect="output is wrong")((cut_mlp, without_leave))
mistake("parallel-mlp", "gathers-between-the-layers", expect="needs nothing from the others")(
    (cut_mlp, gathers_between)
)


def cut_interleaved(gate, up, down, rank, world_size):
    """Every t-th inner number instead of a block of them."""
    return gate[rank::world_size], up[rank::world_size], down[:, rank::world_size]


def fused(x, shards, group):
    """Gate and up as one product, as most real implementations have it."""
    both = Enter.apply(x, group) @ torch.cat(shards[:2]).T
    gate, up = both.chunk(2, dim=1)
    return Leave.apply((F.silu(gate) * up) @ shards[2].T, group)


alternative("parallel-mlp", "gate-and-up-in-one")((cut_mlp, fused))
alternative("parallel-mlp", "every-t-th-inner-number")((cut_interleaved, mlp))
