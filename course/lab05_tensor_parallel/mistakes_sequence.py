"""Spoilers of lab 05: sequence shards whose norms drift apart, sums that are thrown away."""

import torch

from course.kit import answers_of
from course.kit.exercises import alternative, mistake

ANSWERS = answers_of("05_tensor_parallel")
GatherIn, ScatterOut, sum_norm_gradients = ANSWERS.GatherIn, ANSWERS.ScatterOut, ANSWERS.sum_norm_gradients


class KeepsItsRows(GatherIn):
    """Backward as if every rank had the whole gradient already."""

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(ctx.group.world_size)[ctx.group.rank].clone(), None


class SumsAndCuts(GatherIn):
    @staticmethod
    def backward(ctx, gradient):
        return ctx.group.all_reduce(gradient.clone()).chunk(ctx.group.world_size)[ctx.group.rank].clone(), None


class ReducesAndCuts(ScatterOut):
    @staticmethod
    def forward(ctx, share, group):
        ctx.group = group
        return group.all_reduce(share.clone()).chunk(group.world_size)[group.rank].clone()


class CutsOnly(ScatterOut):
    @staticmethod
    def forward(ctx, share, group):
        ctx.group = group
        return share.chunk(group.world_size)[group.rank].clone()


class OwnRowsBackward(ScatterOut):
    """Backward with zeros for the rows of the others."""

    @staticmethod
    def backward(ctx, gradient):
        rows = torch.zeros(ctx.group.world_size, *gradient.shape, dtype=gradient.dtype)
        rows[ctx.group.rank] = gradient
        return rows.flatten(0, 1), None


def sums_nothing(parameters, group):
    """The bug of gpt-neox#1257, PaddleNLP#7610 and Megatron-LM#1446."""


def averages(parameters, group):
    for p in parameters:
        group.all_reduce(p.grad, op="avg")


def one_each(parameters, group):
    for p in parameters:
        group.all_reduce(p.grad)


NAME = "sequence-parallel"
mistake(NAME, "norm-gradients-not-reduced", expect="will drift apart")((GatherIn, ScatterOut, sums_nothing))
mistake(NAME, "norm-gradients-averaged", expect="so the shares add")((GatherIn, ScatterOut, averages))
mistake(NAME, "one-all-reduce-per-norm", expect="latency is all they cost")((GatherIn, ScatterOut, one_each))
mistake(NAME, "gather-backward-cuts", expect="has to sum the ranks' shares")(
    (KeepsItsRows, ScatterOut, sum_norm_gradients)
)
mistake(NAME, "all-reduce-then-slice", expect="its own rows of the sum only")(
    (GatherIn, ReducesAndCuts, sum_norm_gradients)
)
mistake(NAME, "backward-all-reduce-then-slice", expect="its own rows of the sum only")(
    (SumsAndCuts, ScatterOut, sum_norm_gradients)
)
mistake(NAME, "scatter-without-sum", expect="the output is wrong")((GatherIn, CutsOnly, sum_norm_gradients))
mistake(NAME, "scatter-backward-own-rows", expect="bring the gradients of all rows")(
    (GatherIn, OwnRowsBackward, sum_norm_gradients)
)


def by_vectors(parameters, group):
    """torch's own flattening."""
    total = group.all_reduce(torch.nn.utils.parameters_to_vector([p.grad for p in parameters]))
    start = 0
    for p in parameters:
        p.grad.copy_(total[start : start + p.numel()].view_as(p))
        start += p.numel()


class ByAllToAll(ScatterOut):
    """Every rank sends each its rows and adds up what it gets: the same bytes in another pattern."""

    @staticmethod
    def forward(ctx, share, group):
        ctx.group = group
        return group.all_to_all(share.contiguous()).unflatten(0, (group.world_size, -1)).sum(0)


alternative(NAME, "all-to-all-and-a-sum")((GatherIn, ByAllToAll, by_vectors))
