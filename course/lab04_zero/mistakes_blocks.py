"""Spoilers of lab 04: hooks that free nothing, blocks that stay, reductions that send twice as much as needed."""

import torch
import torch.nn.functional as F

from course.kit import answers_of
from course.kit.exercises import alternative, mistake

ANSWERS = answers_of("04_zero")

# Stage 2


def _hooks(buckets, group, reduce, full=lambda missing: not missing, rearm=True, free=True, order=list):
    """The reference with its parts exchangeable."""
    shards = [None] * len(buckets)

    def watch(index, bucket):
        missing = set(bucket)

        def ready(parameter):
            missing.discard(parameter)
            if not full(missing):
                return
            gradients = [p.grad.flatten() if p.grad is not None else torch.zeros(p.numel()) for p in order(bucket)]
            flat = torch.cat(gradients)
            if free:
                for p in bucket:
                    p.grad = None
            shards[index] = reduce(F.pad(flat, (0, -len(flat) % group.world_size)))
            if rearm:
                missing.update(bucket)

        for parameter in bucket:
            parameter.register_post_accumulate_grad_hook(ready)

    for index, bucket in enumerate(buckets):
        watch(index, bucket)
    return shards


@mistake("reduce-scatter-hooks", "frees-nothing", expect="free a bucket's gradients")
def keeps_gradients(buckets, group):
    shards = [None] * len(buckets)

    def watch(index, bucket):
        missing = set(bucket)

        def ready(parameter):
            missing.discard(parameter)
            if missing:
                return
            flat = torch.cat([p.grad.flatten() for p in bucket])
            shards[index] = group.reduce_scatter(F.pad(flat, (0, -len(flat) % group.world_size)), op="avg")
            missing.update(bucket)
            if index == len(buckets) - 1:  # the last bucket of backward: only now is anything freed
                for p in (p for other in buckets for p in other):
                    p.grad = None

        for parameter in bucket:
            parameter.register_post_accumulate_grad_hook(ready)

    for index, bucket in enumerate(buckets):
        watch(index, bucket)
    return shards


@mistake("reduce-scatter-hooks", "all-reduce-then-slice", expect="sends half of what an all-reduce does")
def all_reduces(buckets, group):
    def reduce(flat):
        return group.all_reduce(flat, op="avg").chunk(group.world_size)[group.rank].clone()

    return _hooks(buckets, group, reduce)


@mistake("reduce-scatter-hooks", "adds-gradients", expect="it is the sum, 4 times the average")
def sums(buckets, group):
    return _hooks(buckets, group, group.reduce_scatter)


@mistake("reduce-scatter-hooks", "works-once", expect="armed again for the second")
def never_arms_again(buckets, group):
    done = set()

    def full(missing):
        return not missing and id(missing) not in done and not done.add(id(missing))

    return _hooks(buckets, group, lambda flat: group.reduce_scatter(flat, op="avg"), full=full, rearm=False)


@mistake("reduce-scatter-hooks", "first-gradient-fires", expect="before the last gradient of the bucket is there")
def fires_too_early(buckets, group):
    return _hooks(buckets, group, lambda flat: group.reduce_scatter(flat, op="avg"), full=lambda missing: True)


@mistake("reduce-scatter-hooks", "loop-variable", expect="is None: was the bucket never full")
def last_loop_variable(buckets, group):
    shards = [None] * len(buckets)
    for index, bucket in enumerate(buckets):
        missing = set(bucket)

        def ready(parameter, bucket=bucket, missing=missing):
            missing.discard(parameter)
            if missing:
                return
            flat = torch.cat([p.grad.flatten() for p in bucket])
            for p in bucket:
                p.grad = None
            flat = F.pad(flat, (0, -len(flat) % group.world_size))
            shards[index] = group.reduce_scatter(flat, op="avg")  # noqa: B023
            missing.update(bucket)

        for parameter in bucket:
            parameter.register_post_accumulate_grad_hook(ready)
    return shards


@mistake("reduce-scatter-hooks", "hooks-one-parameter", expect="'NoneType' object has no attribute 'flatten'")
def hooks_the_first(buckets, group):
    shards = [None] * len(buckets)
    for index, bucket in enumerate(buckets):

        def ready(parameter, index=index, bucket=bucket):
            flat = torch.cat([p.grad.flatten() for p in bucket])
            for p in bucket:
                p.grad = None
            shards[index] = group.reduce_scatter(F.pad(flat, (0, -len(flat) % group.world_size)), op="avg")

        bucket[0].register_post_accumulate_grad_hook(ready)
    return shards


@mistake("reduce-scatter-hooks", "adds-to-the-last-shard", expect="gradients of earlier passes are still in it")
def accumulates(buckets, group):
    kept = {}

    def reduce(flat):
        kept[len(flat)] = kept.get(len(flat), 0) + group.reduce_scatter(flat, op="avg")
        return kept[len(flat)]

    return _hooks(buckets, group, reduce)


@alternative("reduce-scatter-hooks", "counts-and-a-flat-buffer")
def with_a_buffer(buckets, group):
    n, shards = group.world_size, [None] * len(buckets)
    counts = [0] * len(buckets)
    sizes = [sum(p.numel() for p in bucket) for bucket in buckets]
    buffers = [torch.zeros(size + -size % n) for size in sizes]
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


@alternative("reduce-scatter-hooks", "all-to-all-and-a-sum")
def by_all_to_all(buckets, group):
    return _hooks(buckets, group, lambda flat: group.all_to_all(flat).view(group.world_size, -1).mean(0))


# Stage 3


@mistake("gather-compute-free", "keeps-the-gathered-block", expect="5 of 5 blocks lie there whole")
class KeepsTheBlock(ANSWERS.GatheredBlock):
    @staticmethod
    def forward(ctx, x, shard, compute, group):
        weights = group.all_gather(shard)
        ctx.save_for_backward(x, weights)
        ctx.compute, ctx.group = compute, group
        return compute(x, weights)

    @staticmethod
    def backward(ctx, output_gradient):
        x, weights = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            output = ctx.compute(x, weights)
        dx, dw = torch.autograd.grad(output, (x, weights), output_gradient)
        return dx, ctx.group.reduce_scatter(dw, op="avg"), None, None


def _backward(reduce):
    """The reference's backward with another way to reduce the gradient."""

    def backward(ctx, output_gradient):
        x, shard = ctx.saved_tensors
        with torch.enable_grad():
            x, weights = x.detach().requires_grad_(), ctx.group.all_gather(shard).requires_grad_()
            output = ctx.compute(x, weights)
        dx, dw = torch.autograd.grad(output, (x, weights), output_gradient)
        return dx, reduce(dw, ctx.group), None, None

    return staticmethod(backward)


@mistake("gather-compute-free", "all-reduce-then-slice", expect="two all-gathers and one reduce-scatter")
class AllReducesTheBlock(ANSWERS.GatheredBlock):
    backward = _backward(lambda dw, group: group.all_reduce(dw, op="avg").chunk(group.world_size)[group.rank].clone())


@mistake("gather-compute-free", "adds-gradients", expect="it is the sum, 4 times the average")
class SumsTheBlock(ANSWERS.GatheredBlock):
    backward = _backward(lambda dw, group: group.reduce_scatter(dw))


@mistake("gather-compute-free", "no-reduction", expect="nothing was reduced")
class OwnSlice(ANSWERS.GatheredBlock):
    backward = _backward(lambda dw, group: dw.chunk(group.world_size)[group.rank].clone())


@mistake("gather-compute-free", "reduces-activations", expect="the gradient of x is wrong")
class ReducesX(ANSWERS.GatheredBlock):
    @staticmethod
    def backward(ctx, output_gradient):
        dx, *rest = ANSWERS.GatheredBlock.backward(ctx, output_gradient)
        return ctx.group.all_reduce(dx, op="avg"), *rest


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
