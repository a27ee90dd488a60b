"""Spoilers of lab 04: hooks that free nothing, blocks that stay, reductions that send twice as much as needed."""

import torch

from course.kit import answers_of
from course.kit.exercises import alternative, mistake

ANSWERS = answers_of("04_zero")

# Stage 2


mistake(
    "reduce-scatter-hooks",
    "frees-nothing",
    {
        "            for p in bucket:\n                p.grad = None\n": "",
        "missing.update(bucket)": (
            "if index == len(buckets) - 1:  # the last bucket of backward: only now is anything "
            "freed\n"
            "                for p in sum(buckets, []):\n"
            "                    p.grad = None\n"
            "            missing.update(bucket)"
        ),
    },
    expect="free a bucket's gradients",
)
mistake(
    "reduce-scatter-hooks",
    "all-reduce-then-slice",
    {
        'group.reduce_scatter(flat, op="avg")': (
            'group.all_reduce(flat, op="avg").chunk(group.world_size)[group.rank].clone()'
        )
    },
    expect="sends half of what an all-reduce does",
)
mistake("reduce-scatter-hooks", "adds-gradients", {', op="avg"': ""}, expect="it is the sum, 4 times the average")
mistake(
    "reduce-scatter-hooks",
    "works-once",
    {"missing.update(bucket)  # for the next backward": "missing.add(None)  # never empty again"},
    expect="armed again for the second",
)
mistake(
    "reduce-scatter-hooks",
    "first-gradient-fires",
    {
        "            if missing:\n                return\n": "",
        "p.grad.flatten()": "torch.zeros(p.numel()) if p.grad is None else p.grad.flatten()",
    },
    expect="before the last gradient of the bucket is there",
)
mistake(
    "reduce-scatter-hooks",
    "loop-variable",
    {"watch(index, bucket):": "watch(_, bucket):"},
    expect="is None: was the bucket never full",
)
mistake(
    "reduce-scatter-hooks",
    "hooks-one-parameter",
    {
        "            if missing:\n                return\n": "",
        "for parameter in bucket:": "for parameter in bucket[:1]:",
    },
    expect="'NoneType' object has no attribute 'flatten'",
)
mistake(
    "reduce-scatter-hooks",
    "adds-to-the-last-shard",
    {
        "shards[index] = group": "mine = group",
        "missing.update(bucket)": (
            "shards[index] = mine if shards[index] is None else shards[index] + mine\n"
            "            missing.update(bucket)"
        ),
    },
    expect="gradients of earlier passes are still in it",
)


mistake(
    "reduce-scatter-hooks",
    "fires-at-the-second",
    {"            if missing:\n": "            if len(bucket) - len(missing) != 2:  # a weight and a bias\n"},
    expect="'NoneType' object has no attribute 'flatten'",
)
mistake(
    "reduce-scatter-hooks",
    "a-buffer-of-float32",
    {
        "flat = torch.cat([p.grad.flatten() for p in bucket])": (
            "flat = torch.zeros(sum(p.numel() for p in bucket))\n"
            "            torch.cat([p.grad.flatten() for p in bucket], out=flat)"
        )
    },
    expect="float64",
)


@alternative("reduce-scatter-hooks", "counts-and-a-flat-buffer")
def with_a_buffer(buckets, group):
    n, shards = group.world_size, [None] * len(buckets)
    counts = [0] * len(buckets)
    sizes = [sum(p.numel() for p in bucket) for bucket in buckets]
    buffers = [bucket[0].new_zeros(size + -size % n) for size, bucket in zip(sizes, buckets, strict=True)]
    for index, bucket in enumerate(buckets):
        start = 0
        for parameter in bucket:
            view = buffers[index][start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()

            def ready(parameter, view=view, index=index):
                view.copy_(parameter.grad)
                parameter.grad = None
                counts[index] += 1
                if counts[index] == len(buckets[index]):
                    counts[index] = 0
                    shards[index] = group.reduce_scatter(buffers[index]) / group.world_size

            parameter.register_post_accumulate_grad_hook(ready)
    return shards


alternative(
    "reduce-scatter-hooks",
    "all-to-all-and-a-sum",
    {'group.reduce_scatter(flat, op="avg")': "group.all_to_all(flat).view(group.world_size, -1).mean(0)"},
)


# Stage 3

mistake(
    "gather-compute-free",
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


mistake(
    "gather-compute-free",
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
mistake(
    "gather-compute-free",
    "all-reduce-then-slice",
    {
        'ctx.group.reduce_scatter(gradient, op="avg")': (
            'ctx.group.all_reduce(gradient, op="avg").chunk(ctx.group.world_size)[ctx.group.rank].clone()'
        )
    },
    expect="two all-gathers and one reduce-scatter",
)
mistake("gather-compute-free", "adds-gradients", {', op="avg"': ""}, expect="it is the sum, 4 times the average")
mistake(
    "gather-compute-free",
    "no-reduction",
    {'ctx.group.reduce_scatter(gradient, op="avg")': "gradient.chunk(ctx.group.world_size)[ctx.group.rank].clone()"},
    expect="nothing was reduced",
)
mistake(
    "gather-compute-free",
    "reduces-activations",
    {"return x_gradient,": 'return ctx.group.all_reduce(x_gradient, op="avg"),'},
    expect="the gradient of x is wrong",
)


@alternative("gather-compute-free", "empties-the-storage")
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


@alternative("gather-compute-free", "backward-instead-of-grad")
class CallsBackward(ANSWERS.GatheredBlock):
    @staticmethod
    def backward(ctx, output_gradient):
        x, shard = ctx.saved_tensors
        with torch.enable_grad():
            x, weights = x.detach().requires_grad_(), ctx.group.all_gather(shard).requires_grad_()
            ctx.compute(x, weights).backward(output_gradient)
        return x.grad, ctx.group.reduce_scatter(weights.grad, op="avg"), None, None


@alternative("gather-compute-free", "torch-checkpoint-of-a-gather")
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
