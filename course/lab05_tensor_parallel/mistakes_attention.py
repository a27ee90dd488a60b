"""Spoilers of lab 05: kv heads on the wrong ranks, all-reduces that hide nothing."""

import torch

from course.kit import answers_of
from course.kit.exercises import alternative, mistake

ANSWERS = answers_of("05_tensor_parallel")

# Attention


def kv_like_queries(num_heads, num_kv_heads, rank, world_size):
    """Cuts kv heads as it cuts query heads: nothing is left for some ranks when there are fewer than ranks."""
    queries, _ = ANSWERS.local_heads(num_heads, num_kv_heads, rank, world_size)
    return queries, range(rank * num_kv_heads // world_size, (rank + 1) * num_kv_heads // world_size)


def all_kv_heads(num_heads, num_kv_heads, rank, world_size):
    return ANSWERS.local_heads(num_heads, num_kv_heads, rank, world_size)[0], range(num_kv_heads)


def enters_three_times(x, shards, attend, group):
    q, k, v, o = shards
    return ANSWERS.Leave.apply(attend(*(ANSWERS.Enter.apply(x, group) @ w.T for w in (q, k, v))) @ o.T, group)


def values_outside(x, shards, attend, group):
    q, k, v, o = shards
    inside = ANSWERS.Enter.apply(x, group)
    return ANSWERS.Leave.apply(attend(inside @ q.T, inside @ k.T, x @ v.T) @ o.T, group)


def leaves_twice(x, shards, attend, group):
    return ANSWERS.Leave.apply(ANSWERS.attention(x, shards, attend, group), group)


mistake("parallel-attention", "kv-cut-like-queries", expect=r"kv head \d is not on that rank")(
    (kv_like_queries, ANSWERS.attention)
)
mistake("parallel-attention", "all-kv-heads-everywhere", expect="memory for nothing")((all_kv_heads, ANSWERS.attention))
mistake("parallel-attention", "one-enter-each", expect="backward called 3 all_reduce")(
    (ANSWERS.local_heads, enters_three_times)
)
mistake("parallel-attention", "v-without-enter", expect="gradient of x is wrong")((ANSWERS.local_heads, values_outside))
mistake("parallel-attention", "leaves-twice", expect="the output is wrong")((ANSWERS.local_heads, leaves_twice))


def fused(x, shards, attend, group):
    """q, k and v as one product."""
    q, k, v, o = shards
    parts = (ANSWERS.Enter.apply(x, group) @ torch.cat((q, k, v)).T).split([len(q), len(k), len(v)], dim=1)
    return ANSWERS.Leave.apply(attend(*parts) @ o.T, group)


alternative("parallel-attention", "qkv-in-one")((ANSWERS.local_heads, fused))

# The overlapped input gradient


def _backward(steps):
    def backward(ctx, gradient):
        return (*steps(ctx, gradient, *ctx.saved_tensors), None)

    return staticmethod(backward)


def _blocking(ctx, gradient, x, weight):
    return ctx.group.all_reduce(gradient @ weight), gradient.T @ x


def _weight_first(ctx, gradient, x, weight):
    dw = gradient.T @ x
    dx = gradient @ weight
    handle = ctx.group.all_reduce(dx, async_op=True)
    handle.wait()
    return dx, dw


def _waits_at_once(ctx, gradient, x, weight):
    dx = ctx.group.all_reduce(gradient @ weight, async_op=True).wait()
    return dx, gradient.T @ x


def _reduces_the_weight(ctx, gradient, x, weight):
    dx = gradient @ weight
    handle = ctx.group.all_reduce(dx, async_op=True)
    dw = ctx.group.all_reduce(gradient.T @ x)
    handle.wait()
    return dx, dw


def _keeps_dx(ctx, gradient, x, weight):
    return gradient @ weight, gradient.T @ x


def _two_halves(ctx, gradient, x, weight):
    """dX worked out in two halves of the tokens, then sent as one."""
    middle = len(gradient) // 2
    dx = torch.cat([gradient[:middle] @ weight, gradient[middle:] @ weight])
    handle = ctx.group.all_reduce(dx, async_op=True)
    dw = gradient.T @ x
    handle.wait()
    return dx, dw


@mistake("overlapped-input-gradient", "blocks", expect="async_op=True returns a handle at once")
class Blocks(ANSWERS.ColumnLinear):
    backward = _backward(_blocking)


@mistake("overlapped-input-gradient", "weight-first", expect="nothing left to compute beside it")
class WeightFirst(ANSWERS.ColumnLinear):
    backward = _backward(_weight_first)


@mistake("overlapped-input-gradient", "waits-at-once", expect="compute dW before the wait")
class WaitsAtOnce(ANSWERS.ColumnLinear):
    backward = _backward(_waits_at_once)


@mistake("overlapped-input-gradient", "reduces-the-weight", expect="it stays on this rank, unreduced")
class ReducesTheWeight(ANSWERS.ColumnLinear):
    backward = _backward(_reduces_the_weight)


@mistake("overlapped-input-gradient", "no-reduction", expect="this rank's share alone")
class KeepsDX(ANSWERS.ColumnLinear):
    backward = _backward(_keeps_dx)


@mistake("overlapped-input-gradient", "gathers-the-output", expect="which stay here")
class GathersTheOutput(ANSWERS.ColumnLinear):
    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        group.all_gather(x @ weight.T)
        return x @ weight.T


@mistake("overlapped-input-gradient", "computes-dw-again", expect="is computed 2 times")
class ComputesTwice(ANSWERS.ColumnLinear):
    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        x_gradient = gradient @ weight
        handle = ctx.group.all_reduce(x_gradient, async_op=True)
        gradient.T @ x  # hides the all-reduce and is thrown away
        handle.wait()
        return x_gradient, gradient.T @ x, None


@alternative("overlapped-input-gradient", "dx-in-two-halves")
class TwoHalves(ANSWERS.ColumnLinear):
    backward = _backward(_two_halves)
