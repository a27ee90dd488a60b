"""Spoilers of lab 04: gathered blocks that stay, whole gradients that are kept, blocks that are computed too often."""

import torch

from course.kit import answers_of
from course.kit.exercises import KnownAnswers

ANSWERS = answers_of("04_zero")


gather_compute_free = KnownAnswers("gather-compute-free")

gather_compute_free.mistake(
    "keeps-the-gathered-block",
    {
        "ctx.save_for_backward(x, shard)": (
            "weights = group.all_gather(shard)\n        ctx.save_for_backward(x, weights)"
        ),
        "compute(x, group.all_gather(shard))": "compute(x, weights)",
        "x, shard = ctx": "x, weights = ctx",
        "ctx.group.all_gather(shard)": "weights.detach()",
    },
    expect="5 of 5 blocks lie there whole",
)


gather_compute_free.mistake(
    "keeps-a-hidden-copy",
    {
        "ctx.save_for_backward(x, shard)": (
            "weights = group.all_gather(shard)\n        ctx.save_for_backward(x, weights.clone())"
        ),
        "compute(x, group.all_gather(shard))": "compute(x, weights)",
        "x, shard = ctx": "x, weights = ctx",
        "ctx.group.all_gather(shard)": "weights.clone()",
    },
    expect="their weights stay somewhere",
)
gather_compute_free.mistake(
    "last-block-stays",
    {
        "return compute(x, group.all_gather(shard))": (
            "group.last = group.all_gather(shard)\n        return compute(x, group.last)"
        )
    },
    expect="is still there when all have computed",
)
gather_compute_free.mistake(
    "keeps-whole-gradients",
    {
        'return x_gradient, ctx.group.reduce_scatter(gradient, op="avg")': (
            'ctx.whole = gradient\n        return x_gradient, ctx.group.reduce_scatter(gradient, op="avg")'
        )
    },
    expect="what goes into it",
)
gather_compute_free.mistake(
    "computes-once-per-gradient",
    {
        "            output = ctx.compute(x, weights)": (
            "            ctx.compute(x, weights)\n            output = ctx.compute(x, weights)"
        )
    },
    expect="once in forward, once in backward",
)
gather_compute_free.mistake(
    "relies-on-the-input-needing-a-gradient",
    {"x, weights = x.detach().requires_grad_(), ": "weights = "},
    expect="does not require grad|appears to not have been used",
)
gather_compute_free.mistake(
    "all-reduce-then-slice",
    {
        'ctx.group.reduce_scatter(gradient, op="avg")': (
            'ctx.group.all_reduce(gradient, op="avg").chunk(ctx.group.world_size)[ctx.group.rank].clone()'
        )
    },
    expect="two all-gathers and one reduce-scatter",
)
gather_compute_free.mistake("adds-gradients", {', op="avg"': ""}, expect="it is the sum, 4 times the average")
gather_compute_free.mistake(
    "no-reduction",
    {'ctx.group.reduce_scatter(gradient, op="avg")': "gradient.chunk(ctx.group.world_size)[ctx.group.rank].clone()"},
    expect="nothing was reduced",
)
gather_compute_free.mistake(
    "reduces-activations",
    {"return x_gradient,": 'return ctx.group.all_reduce(x_gradient, op="avg"),'},
    expect="the gradient of x is wrong",
)


@gather_compute_free.alternative("empties-the-storage")
class EmptiesTheStorage(torch.autograd.Function):
    """Keeps the tensor, frees its memory: how FSDP does it."""

    @staticmethod
    def forward(ctx, x, shard, compute, group):
        weights = group.all_gather(shard)
        output = compute(x, weights)
        ctx.size = weights.untyped_storage().nbytes()
        weights.untyped_storage().resize_(0)
        ctx.x, ctx.weights, ctx.shard, ctx.compute, ctx.group = x, weights, shard, compute, group
        return output

    @staticmethod
    def backward(ctx, output_gradient):
        ctx.weights.untyped_storage().resize_(ctx.size)
        ctx.group.all_gather(ctx.shard.detach(), out=ctx.weights)
        x, weights = ctx.x.detach().requires_grad_(), ctx.weights.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.compute(x, weights)
        dx, dw = torch.autograd.grad(output, (x, weights), output_gradient)
        del output
        ctx.weights.untyped_storage().resize_(0)
        return dx, ctx.group.reduce_scatter(dw) / ctx.group.world_size, None, None


@gather_compute_free.alternative("backward-instead-of-grad")
class CallsBackward(ANSWERS.GatheredBlock):
    @staticmethod
    def backward(ctx, output_gradient):
        x, shard = ctx.saved_tensors
        with torch.enable_grad():
            x, weights = x.detach().requires_grad_(), ctx.group.all_gather(shard).requires_grad_()
            ctx.compute(x, weights).backward(output_gradient)
        return x.grad, ctx.group.reduce_scatter(weights.grad, op="avg"), None, None


@gather_compute_free.alternative("functional-vjp")
class ByVjp(ANSWERS.GatheredBlock):
    @staticmethod
    def backward(ctx, output_gradient):
        x, shard = ctx.saved_tensors
        _, vjp = torch.func.vjp(ctx.compute, x.detach(), ctx.group.all_gather(shard.detach()))
        dx, dw = vjp(output_gradient)
        return dx, ctx.group.reduce_scatter(dw, op="avg"), None, None


@gather_compute_free.alternative("torch-checkpoint-of-a-gather")
class ByCheckpoint:
    """A gather that autograd knows, under torch's checkpointing: the second gather is the recomputation."""

    @staticmethod
    def apply(x, shard, compute, group):
        from torch.utils.checkpoint import checkpoint

        return checkpoint(lambda x, shard: compute(x, Gather.apply(shard, group)), x, shard, use_reentrant=False)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, group):
        ctx.group = group
        return group.all_gather(shard)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.group.reduce_scatter(gradient, op="avg"), None
