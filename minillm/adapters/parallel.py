"""Adapters beside layers that are cut over tensor-parallel ranks: cut as their layer is, without messages of their own.

    column layer   W, B by rows; A whole       A reads the region's input beside W: one more column layer, so that its
                                               input's gradient joins the sum over ranks that W's needs anyway
    row layer      W, A by columns; B whole    B A x is a share, as W x is: it joins the sum that ends the region

A whole matrix has only a share of its gradient on each rank: A of a column layer hears of this rank's outputs, B of a
row layer of this rank's inputs. So it is `Partial`, and `placement.sum_partial` adds the shares up once a step. A cut
one has all of its gradient, but B of key and value heads that several ranks hold, which is Partial as their weight is.
All of this holds with sequence parallelism, too, since A and B stand inside the region, where every rank has all
positions. Layers whose weights are NF4 codes are cut in the same way. Dropout before A has one mask on all ranks in a
column layer and a part of it on each in a row layer, whose inputs are cut.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.adapters.codes import QuantizedColumn
from minillm.adapters.dropout import Rows, mask_of
from minillm.adapters.lora import LoraConfig, LoraLinear, base_name, is_adapter
from minillm.model import ModelConfig
from minillm.parallel.sharding.placement import Part, Partial, Replicate
from minillm.parallel.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, column_linears
from minillm.parallel.tensor_parallel.plan import part_of
from minillm.parallel.tensor_parallel.quantized import QuantizedRow
from minillm.parallel.tensor_parallel.regions import end


class LoraColumnParallel(LoraLinear):
    def forward(self, x: Tensor) -> Tensor:
        return adapted_column_linears(x, self)[0]

    def mask(self, x: Tensor) -> Tensor | None:
        """Of dropout, for x as it is inside the region; None = there is no dropout."""
        if not (self.training and self.dropout):
            return None
        region = self.base.region
        seq = x.shape[1] * (region.group.world_size if region.sequence else 1)
        return mask_of(_with_keys(self), self.key, self.dropout, x, seq)


class LoraRowParallel(LoraLinear):
    def forward(self, x: Tensor) -> Tensor:
        if not self.is_added:
            return self.base(x)
        if isinstance(self.base, QuantizedRow):
            return end(self.base.layer(x) + self.update(x), self.base.region)
        y = end(F.linear(x, self.base.weight) + self.update(x), self.base.region)
        return y if self.base.bias is None else y + self.base.bias

    def dropped(self, x: Tensor) -> Tensor:
        if not (self.training and self.dropout):
            return x
        first = self.base.region.group.rank * x.shape[-1]
        return x * mask_of(_with_keys(self), self.key, self.dropout, x, x.shape[1], first)


def adapted_column_linears(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """`fused_column_linears` of layers of which some have adapters, and some, or all, are quantized."""
    bases = [layer.base if isinstance(layer, LoraColumnParallel) else layer for layer in layers]
    adapted = [layer for layer in layers if isinstance(layer, LoraColumnParallel) and layer.is_added]
    frozen = [base.layer if isinstance(base, QuantizedColumn) else base.weight for base in bases]
    weights = [*frozen, *(layer.lora_A for layer in adapted)]
    biases = [*(base.bias for base in bases), *(None for _ in adapted)]
    masks = [*(None for _ in bases), *(layer.mask(x) for layer in adapted)]
    products = column_linears(x, weights, biases, bases[0].region, masks)
    lowered = dict(zip(adapted, products[len(bases) :], strict=True))
    outputs = zip(layers, products, strict=False)
    return tuple(y + layer.raised(lowered[layer]) if layer in lowered else y for layer, y in outputs)


def adapted(
    base: nn.Module, config: LoraConfig, dtype: torch.dtype, device: torch.device, name: str, rows: Rows
) -> LoraLinear:
    """The form for this layer."""
    form = LoraLinear
    if isinstance(base, ColumnParallelLinear):
        form = LoraColumnParallel
    elif isinstance(base, RowParallelLinear):
        form = LoraRowParallel
    return form(base, config, dtype, device, name, rows)


def part_of_adapted(config: ModelConfig, name: str, rank: int, world_size: int, sequence: bool = False) -> Part:
    """`plan.part_of` for the parameters of a model with adapters."""
    of_base = part_of(config, base_name(name), rank, world_size, sequence)
    if not is_adapter(name):
        return of_base
    cut = of_base.of if isinstance(of_base, Partial) else of_base
    follows = "lora_B" if cut.dim == 0 else "lora_A"  # the matrix on the side that is cut
    if name.endswith(follows):
        return of_base
    return Partial(Replicate(copy=rank)) if world_size > 1 else Replicate()


def _with_keys(layer: LoraLinear) -> Rows:
    if layer.rows.keys is None:
        raise ValueError(
            f"dropout {layer.dropout} over tensor-parallel ranks needs to know the rows of the pass, so that all ranks "
            "drop the same: make it inside `numbered(model, keys)`."
        )
    return layer.rows
