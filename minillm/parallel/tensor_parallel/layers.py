"""Column and row layers: y = f(x A) B on t ranks, with one all-reduce (Shoeybi et al. 2019, Megatron-LM, §3).

    y = f(x A) B          A by columns, B by rows:          y = Σ over ranks of f(x A_r) B_r

                 ┌ x A_0 ─ f ─ h_0 B_0 ┐                    f acts on single columns, so between the two products
    x ─ copy_to ─┤                     ├─ reduce_from ─ y   no rank needs what the others have
                 └ x A_1 ─ f ─ h_1 B_1 ┘

In a block the attention's heads and the hidden layer of the MLP are such columns: two all-reduces forward and two
backward, each of [batch, seq, hidden]. Column layers that read one input (q, k and v; gate and up) are fused: their
input's gradient is summed once for all of them, and travels while the gradients of their weights are computed.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from minillm.comm import Group
from minillm.parallel.sharding.placement import Part, Placement, Replicate, Shard
from minillm.parallel.split_backward import weight_gradient
from minillm.parallel.tensor_parallel.regions import Region

Factors = Sequence[Tensor | nn.Module]  # weights, or frozen quantized layers that have one when it is needed
Tensors = Sequence[Tensor | None]


class _ParallelLinear(nn.Module):
    """A part of nn.Linear. Alone it draws the whole as nn.Linear does and keeps its part: seed all ranks alike.

    sequence: [batch, seq / t, ...] outside the parallel region instead of [batch, seq, ...]. how: dtype, device.
    """

    dim: int  # of the weight, that is cut

    def __init__(
        self, inputs: int, outputs: int, group: Group, bias: bool = False, *, sequence: bool = False, **how: Any
    ) -> None:
        super().__init__()
        self._take(nn.Linear(inputs, outputs, bias, **{"device": group.device, **how}), Region(group, sequence))

    @classmethod
    def cut(cls, whole: nn.Linear, region: Region, part: Part | None = None) -> "_ParallelLinear":
        """This rank's part of a linear layer; by default its equal share, padded with zeros."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._take(whole, region, part)
        return layer

    def _take(self, whole: nn.Linear, region: Region, part: Part | None = None) -> None:
        part = part or Shard(self.dim, region.group.rank, region.group.world_size)
        self.weight = cut_parameter(whole.weight, part)
        self.bias = None if whole.bias is None else cut_parameter(whole.bias, part if self.dim == 0 else Replicate())
        self.region = region


class ColumnParallelLinear(_ParallelLinear):
    """[..., inputs] -> [..., outputs / world_size], rounded up: this rank's outputs. Begins a parallel region."""

    dim = 0

    def forward(self, x: Tensor) -> Tensor:
        return fused_column_linears(x, self)[0]


class RowParallelLinear(_ParallelLinear):
    """[..., inputs / world_size] -> [..., outputs], summed over the ranks. Ends a parallel region. bias: whole."""

    dim = 1

    def forward(self, x: Tensor) -> Tensor:
        y = _RowLinear.apply(x, self.weight, self.region)
        return y if self.bias is None else y + self.bias


def cut_parameter(whole: nn.Parameter, part: Part) -> nn.Parameter:
    """A new parameter with this rank's part of the whole one's values; frozen if that is."""
    return nn.Parameter(Placement(whole.shape, (part,)).cut(whole.detach()), requires_grad=whole.requires_grad)


def fused_column_linears(x: Tensor, *layers: ColumnParallelLinear) -> tuple[Tensor, ...]:
    """What several column layers make of one input, as one beginning of a parallel region."""
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    return column_linears(x, weights, biases, layers[0].region)


def column_linears(
    x: Tensor, weights: Factors, biases: Tensors, region: Region, masks: Tensors = ()
) -> tuple[Tensor, ...]:
    """x @ weightᵀ + bias for each: the beginning of a region. weights: [this rank's outputs, inputs]; of a quantized
    layer worked out whenever it is needed, and not kept. masks: what x, as it is inside the region, is multiplied with
    before each product; None = nothing.

    Backward begins to sum x's gradient over the ranks and works out the weights' gradients meanwhile.
    """
    return _ColumnLinears.apply(x, region, len(weights), *weights, *biases, *(masks or [None] * len(weights)))


class _ColumnLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, region, count, *given):
        ctx.region, ctx.count = region, count
        weights, biases, masks = given[:count], given[count : 2 * count], given[2 * count :]
        x = _as_computed(x)
        begun = region.begin(x)
        ctx.layers = [None if isinstance(weight, Tensor) else weight for weight in weights]
        kept = [weight if isinstance(weight, Tensor) else None for weight in weights]
        ctx.save_for_backward(region.to_save(x, begun), *kept, *biases, *masks)
        return tuple(
            F.linear(_masked(begun, mask), _values(weight, begun), bias)
            for weight, bias, mask in zip(weights, biases, masks, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        saved, *given = ctx.saved_tensors
        weights, biases, masks = given[: ctx.count], given[ctx.count : 2 * ctx.count], given[2 * ctx.count :]
        weights = [weight if layer is None else layer for weight, layer in zip(weights, ctx.layers, strict=True)]
        needs_x, _, _, *needed = ctx.needs_input_grad
        weights_needed, biases_needed = needed[: ctx.count], needed[ctx.count : 2 * ctx.count]
        restoring = ctx.region.restore(saved) if any(weights_needed) else None
        dx = ctx.region.begin_backward(_input_gradient(gradients, weights, masks)) if needs_x else None
        x = restoring.wait() if restoring else None
        weight_gradients = [
            _weight_gradient(weight, dy, x, mask) if need else None
            for weight, dy, mask, need in zip(weights, gradients, masks, weights_needed, strict=True)
        ]
        bias_gradients = [
            _bias_gradient(bias, dy) if need else None
            for bias, dy, need in zip(biases, gradients, biases_needed, strict=True)
        ]
        return dx.wait() if dx else None, None, None, *weight_gradients, *bias_gradients, *[None] * ctx.count


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, region):
        ctx.region = region
        x = _as_computed(x)
        ctx.save_for_backward(x, weight)
        y = F.linear(x, weight)
        return region.end(y.clone() if products_are_kept() else y)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dy = ctx.region.end_backward(dy)
        dx = _input_gradient([dy], [weight], [None]) if ctx.needs_input_grad[0] else None
        return dx, _weight_gradient(weight, dy, x) if ctx.needs_input_grad[1] else None, None


def products_are_kept() -> bool:
    """Whether selective recomputation (ours or torch's) keeps results, which summing in place would change. Other
    dispatch modes, such as a memory tracker's, only look."""
    return any(
        getattr(mode, "keep", None) or type(mode).__name__ in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
        for mode in _get_current_dispatch_mode_stack()
    )


def _as_computed(x: Tensor) -> Tensor:
    """x in the dtype that autocast computes in."""
    device = x.device.type
    cast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device)) if cast else x


def _input_gradient(gradients: Sequence[Tensor], weights: Factors, masks: Tensors) -> Tensor:
    """Σ mask · (dy @ weight), contiguous."""
    dx = None
    for dy, weight, mask in zip(gradients, weights, masks, strict=True):
        rows, weight = _rows(dy), _values(weight, dy)
        if mask is None:
            dx = rows @ weight if dx is None else dx.addmm_(rows, weight)
        else:
            masked = (rows @ weight).mul_(_rows(mask))
            dx = masked if dx is None else dx.add_(masked)
    return dx.view(*gradients[0].shape[:-1], dx.shape[-1])


def _values(weight: Tensor | nn.Module, like: Tensor) -> Tensor:
    """A weight, or what a layer's codes stand for now, in the dtype of what it is multiplied with."""
    return (weight if isinstance(weight, Tensor) else weight.weight).to(like.dtype)


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x * mask.to(x.dtype)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _weight_gradient(weight: Tensor, dy: Tensor, x: Tensor, mask: Tensor | None = None) -> Tensor | None:
    return weight_gradient(weight, lambda: (_rows(dy).T @ _rows(_masked(x, mask))).to(weight.dtype))


def _bias_gradient(bias: Tensor, dy: Tensor) -> Tensor | None:
    return weight_gradient(bias, lambda: _rows(dy).sum(0).to(bias.dtype))
