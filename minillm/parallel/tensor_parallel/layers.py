"""Tensor parallelism: a column layer, then a row layer, and one all-reduce (Shoeybi et al. 2019, Megatron-LM, §3).

    y = f(x A) B          A by columns, B by rows:          y = Σ over ranks of f(x A_r) B_r

               ┌ x A_0 ─ f ─ h_0 B_0 ┐                      f acts on single columns, so between the two products
    x ─ enter ─┤                     ├─ leave (Σ) ─ y       nobody has to know what the others have
               └ x A_1 ─ f ─ h_1 B_1 ┘

In a block the attention's heads and the hidden layer of the MLP are such columns: two all-reduces forward (`leave`) and
two backward (`enter`), each of [batch, seq, hidden]. `regions.py` has the two ends, `sequence.py` their other form,
`splits.py` says who holds what, `vocab.py` splits embedding, head and loss.
"""

import functools
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from minillm.comm import Group
from minillm.model import ModelConfig, Transformer
from minillm.model.transformer import initial
from minillm.parallel.pipeline_parallel.split_backward import weight_gradient
from minillm.parallel.tensor_parallel.plan import Split, check_split, join, split_of, sum_partial
from minillm.parallel.tensor_parallel.regions import Region, region_of
from minillm.parallel.tensor_parallel.vocab import (
    VocabParallelEmbedding,
    gather_logits,
    linear_vocab_parallel_cross_entropy_sums,
    vocab_parallel_cross_entropy,
)

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "Split",
    "VocabParallelEmbedding",
    "column_linears",
    "gather_logits",
    "initialize_parallel",
    "join",
    "row_linear",
    "split_of",
    "sum_partial",
    "tensor_parallel",
    "vocab_parallel_cross_entropy",
]


class _ParallelLinear(nn.Module):
    """A part of nn.Linear. Alone it draws the whole as nn.Linear does and keeps its part: seed all ranks alike.

    sequence: [batch, seq / t, ...] outside the parallel region instead of [batch, seq, ...].
    """

    dim: int  # of the weight, that is cut

    def __init__(
        self,
        inputs: int,
        outputs: int,
        group: Group,
        bias: bool = False,
        *,
        sequence: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        whole = nn.Linear(inputs, outputs, bias, device or group.device, dtype)
        self._take(whole, Split(self.dim, group.rank, group.world_size), region_of(group, sequence))

    @classmethod
    def cut(cls, whole: nn.Linear, split: Split, region: Region) -> "_ParallelLinear":
        """This rank's part of a linear layer."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._take(whole, split, region)
        return layer

    def _take(self, whole: nn.Linear, split: Split, region: Region) -> None:
        bias_split = split if self.dim == 0 else Split()
        self.weight = nn.Parameter(split.cut(whole.weight.detach()), requires_grad=whole.weight.requires_grad)
        self.bias = None
        if whole.bias is not None:
            self.bias = nn.Parameter(bias_split.cut(whole.bias.detach()), requires_grad=whole.bias.requires_grad)
        self.region = region


class ColumnParallelLinear(_ParallelLinear):
    """[..., inputs] -> [..., outputs / world_size], rounded up: this rank's outputs. Begins a parallel region.

    Several of them that read the same input share one all-reduce backward: `together`.
    """

    dim = 0

    def forward(self, x: Tensor) -> Tensor:
        return together(x, self)[0]


class RowParallelLinear(_ParallelLinear):
    """[..., inputs / world_size] -> [..., outputs], summed over the ranks. Ends a parallel region. bias: whole."""

    dim = 1

    def forward(self, x: Tensor) -> Tensor:
        return row_linear(x, self.weight, self.bias, self.region)


def together(x: Tensor, *layers: ColumnParallelLinear) -> tuple[Tensor, ...]:
    """What several column layers make of one input (`model.transformer.each`), as one parallel region's beginning."""
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    return column_linears(x, weights, biases, layers[0].region)


def column_linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], region: Region
) -> tuple[Tensor, ...]:
    """x @ weightᵀ + bias for each: the beginning of a region. weights: [this rank's outputs, inputs].

    Backward begins to sum x's gradient over the ranks and works out the weights' gradients meanwhile.
    """
    return _ColumnLinears.apply(x, region, len(weights), *weights, *biases)


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, region: Region) -> Tensor:
    """Σ over ranks of x @ weightᵀ, + bias: the end of a region. weight: [outputs, this rank's inputs]."""
    y = _RowLinear.apply(x, weight, region)
    return y if bias is None else y + bias


class _ColumnLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, region, count, *parameters):
        ctx.region, ctx.count = region, count
        weights, biases = parameters[:count], parameters[count:]
        x = _as_computed(x)
        entered = region.enter(x)
        ctx.save_for_backward(region.keep(x, entered), *parameters)
        return tuple(F.linear(entered, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        saved, *parameters = ctx.saved_tensors
        needs_x, _, _, *needed = ctx.needs_input_grad
        kept = ctx.region.kept(saved) if any(needed[: ctx.count]) else None
        dx = _input_gradient(gradients, parameters[: ctx.count]) if needs_x else None
        sum_of_dx = ctx.region.enter_backward(dx) if needs_x else None
        x = kept.wait() if kept else None
        found = [
            None if not need else _bias_gradient(p, dy) if place >= ctx.count else _weight_gradient(p, dy, x)
            for place, (p, dy, need) in enumerate(zip(parameters, gradients * 2, needed, strict=True))
        ]
        return sum_of_dx.wait() if needs_x else None, None, None, *found


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, region):
        ctx.region = region
        x = _as_computed(x)
        ctx.save_for_backward(x, weight)
        y = F.linear(x, weight)
        if torch._C._len_torch_dispatch_stack():  # somebody keeps the product (selective recomputation): sum a copy
            y = y.clone()
        return region.leave(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dy = ctx.region.leave_backward(dy)
        dx = _input_gradient([dy], [weight]) if ctx.needs_input_grad[0] else None
        return dx, _weight_gradient(weight, dy, x) if ctx.needs_input_grad[1] else None, None


def _as_computed(x: Tensor) -> Tensor:
    """x in the dtype that autocast computes in."""
    device = x.device.type
    cast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device)) if cast else x


def _input_gradient(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Σ dy @ weight, contiguous."""
    dx = None
    for dy, weight in zip(gradients, weights, strict=True):
        rows, weight = _rows(dy), weight.to(dy.dtype)
        dx = rows @ weight if dx is None else dx.addmm_(rows, weight)
    return dx.view(*gradients[0].shape[:-1], -1)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _weight_gradient(weight: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    return weight_gradient(weight, lambda: (_rows(dy).T @ _rows(x)).to(weight.dtype))


def _bias_gradient(bias: Tensor, dy: Tensor) -> Tensor | None:
    return weight_gradient(bias, lambda: _rows(dy).sum(0).to(bias.dtype))


def tensor_parallel(
    module: nn.Module, config: ModelConfig, group: Group, *, sequence: bool = False, regather: bool = True
) -> nn.Module:
    """Cuts a Transformer, or a pipeline's part of one, into this rank's part of it, in place; returns it.

    module: anything with some of Transformer's `embedding`, `blocks`, `norm`, `head`, whole and the same on every rank
    (or on "meta"). Names stay, so does requires_grad; parameters are new, so make optimizers afterwards.
    forward computes what it did, the same on every rank; `logits` gives this rank's words (`gather_logits`). What
    travels between a pipeline's parts is [batch, seq / module.sequence_shards, hidden].
    sequence, regather: see `sequence.py`. ValueError for heads that do not divide (`splits.check_split`).
    """
    check_split(config, group.world_size)
    if any(isinstance(each, (_ParallelLinear, VocabParallelEmbedding)) for each in module.modules()):
        raise ValueError("this module is tensor parallel already: cut a whole one.")
    region = region_of(group, sequence, regather)

    def split(name: str) -> Split:
        return split_of(config, name, group.rank, group.world_size, sequence)

    blocks = getattr(module, "blocks", ())
    for block in blocks.values() if isinstance(blocks, nn.ModuleDict) else blocks:
        for layer, columns, row in (
            (block.attention, ("q_proj", "k_proj", "v_proj"), "o_proj"),
            (block.mlp, ("gate_proj", "up_proj"), "down_proj"),
        ):
            for name in columns:
                setattr(layer, name, ColumnParallelLinear.cut(getattr(layer, name), split(f"{name}.weight"), region))
            setattr(layer, row, RowParallelLinear.cut(getattr(layer, row), split(f"{row}.weight"), region))
            layer.together = together
    if getattr(module, "embedding", None) is not None:
        module.embedding = VocabParallelEmbedding.cut(module.embedding, split("embedding.weight"), region)
    if getattr(module, "head", None) is not None:
        module.head = ColumnParallelLinear.cut(module.head, split("head.weight"), region)
    whole_vocabulary = {"region": region, "vocab_size": config.vocab_size}
    module.head_loss = partial(linear_vocab_parallel_cross_entropy_sums, **whole_vocabulary)
    module.head_logits = partial(vocab_parallel_logits, **whole_vocabulary)
    module.draw = partial(initial_part, group=group)
    module.sequence_shards = group.world_size if sequence else 1
    return module


def vocab_parallel_logits(x: Tensor, head: Tensor, *, region: Region, vocab_size: int) -> Tensor:
    """x: [batch, seq, hidden] or [batch, seq / t, hidden] -> [batch, seq, vocab / world_size], padding at -inf."""
    (logits,) = column_linears(x, [head], [None], region)
    real = Split(0, region.group.rank, region.group.world_size).real(vocab_size)
    padding = torch.arange(logits.shape[-1], device=logits.device) >= real
    return logits.masked_fill(padding, float("-inf")) if real < logits.shape[-1] else logits


def initial_part(config: ModelConfig, name: str, shape: Sequence[int], seed: int, *, group: Group) -> Tensor:
    """This rank's part of `initial(config, name, ...)`, which is asked for the whole, whatever `shape` says."""
    whole = initial(config, name, whole_shapes(config)[name], seed)
    return split_of(config, name, group.rank, group.world_size).cut(whole)


@functools.lru_cache(1)
def whole_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Shapes of the whole model's parameters by name."""
    return {name: parameter.shape for name, parameter in Transformer(config, device="meta").named_parameters()}


@torch.no_grad()
def initialize_parallel(module: nn.Module, config: ModelConfig, group: Group, seed: int = 0) -> nn.Module:
    """Sets every parameter of a tensor-parallel module to its part of the single process's initial value."""
    for name, parameter in module.named_parameters():
        parameter.copy_(initial_part(config, name, parameter.shape, seed, group=group))
    return module
