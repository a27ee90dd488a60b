"""Backward in two halves: the input gradient now, the weight gradients later.

    forward    y = x Wᵀ
    backward   dx = dy W       urgent: the stage before waits for it          (I)
               dW = dyᵀ x      nobody waits for it: only the optimizer will   (W)

Both halves cost a product of the same size, so putting dW off frees half of a backward to fill a pipeline's bubble with
(Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2). What is kept meanwhile are x and dy of each layer, and
nothing of the first half is computed again.

    store = Deferred()
    with deferred(store):
        loss.backward()        # input gradients, and those of weights that are no matrices (norms, biases)
    store.run()                # the rest, added to .grad as backward would: hooks on parameters fire
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_store: Deferred | None = None  # of this process: on a GPU, backward runs in a thread of its own


class Deferred:
    """Weight gradients that are put off, in the order in which backward came to them."""

    def __init__(self) -> None:
        self._queue: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, weight: Tensor, compute: Callable[[], Tensor]) -> None:
        self._queue.append((weight, compute))

    def run(self) -> None:
        """Compute them all and add them to `.grad`, each as soon as it is there. A second run finds nothing to do.

        This is one backward of its own, whose graph is one node per weight: the gradients pass through autograd's
        accumulation, so hooks there (BucketedDDP's, ZeroOptimizer's) run for each of them, and at the end.
        """
        queue, self._queue = self._queue, []
        with torch.enable_grad():  # the last one made is the first one that autograd runs
            ends = [_Later.apply(weight, compute) for weight, compute in reversed(queue)]
        if ends:
            torch.autograd.backward(ends)


@contextlib.contextmanager
def deferred(store: Deferred) -> Iterator[Deferred]:
    """Weight gradients of a backward inside go to `store`.

    autograd calls the post-accumulate hooks of such a weight all the same, with what its `.grad` was before. Gradients
    must therefore not be reduced in this half: put it under `no_sync`.
    """
    global _store
    before, _store = _store, store
    try:
        yield store
    finally:
        _store = before


def weight_gradient(weight: Tensor, compute: Callable[[], Tensor]) -> Tensor | None:
    """To be returned by a custom function's backward as the gradient of `weight`: compute(), now or, inside `deferred`,
    later. compute must hold all it needs: tensors saved for backward are gone by then."""
    if _store is None or not weight.is_leaf:
        return compute()
    _store.add(weight, compute)
    return None


def split_linears(module: nn.Module) -> nn.Module:
    """The module with a SplitLinear in place of every plain nn.Linear; parameters, names and results stay the same.

    Layers inside are replaced in place. Only a module that is itself an nn.Linear is returned as a new one.
    """
    if type(module) is nn.Linear:
        return SplitLinear.like(module)
    found = {child for child in module.modules() if type(child) is nn.Linear}
    replaced = {linear: SplitLinear.like(linear) for linear in found}
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child in replaced:
                parent._modules[name] = replaced[child]
    return module


class SplitLinear(nn.Linear):
    """nn.Linear whose weight gradient can be put off."""

    @classmethod
    def like(cls, linear: nn.Linear) -> SplitLinear:
        """A layer with the parameters and the hooks of `linear`: the same objects, not copies."""
        layer = cls.__new__(cls)
        layer.__dict__.update(linear.__dict__)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        return split_linear(x, self.weight, self.bias)


def split_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x: [..., inputs], weight: [outputs, inputs], bias: [outputs] -> [..., outputs]."""
    if not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype
        cast, device = None, x.device.type
        if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
            cast = torch.get_autocast_dtype(device)
            x, bias = x.to(cast), None if bias is None else bias.to(cast)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.cast = cast
        with torch.autocast(device, enabled=False) if cast else contextlib.nullcontext():
            return F.linear(x, weight.to(cast) if cast else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        dx = dw = db = None
        if wants_x:
            dx = (dy @ (weight.to(ctx.cast) if ctx.cast else weight)).to(ctx.dtypes[0])
        if wants_weight:
            dtype = weight.dtype
            dw = weight_gradient(weight, lambda: (dy.flatten(0, -2).T @ x.flatten(0, -2)).to(dtype))
        if wants_bias:
            db = dy.flatten(0, -2).sum(0).to(ctx.dtypes[1])
        return dx, dw, db


class _Later(torch.autograd.Function):
    """A scalar that depends on `weight` only in that its backward computes the gradient that was put off."""

    @staticmethod
    def forward(ctx, weight, compute):
        ctx.compute = compute
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx, _):
        compute, ctx.compute = ctx.compute, None
        return compute(), None
