"""Adapters beside layers that are cut over tensor-parallel ranks: cut as their layer is, without messages of their own.

    column layer   W, B by rows; A whole       A reads the region's input beside W: one more column layer, so that its
                                               input's gradient joins the sum over ranks that W's needs anyway
    row layer      W, A by columns; B whole    B A x is a share, as W x is: it joins the sum that ends the region

A whole matrix has only a share of its gradient on each rank: A of a column layer hears of this rank's outputs, B of a
row layer of this rank's inputs. So it is `Partial`, and `placement.sum_partial` adds the shares up once a step. A cut
one has all of its gradient, but B of key and value heads that several ranks hold, which is Partial as their weight is.
All of this holds with sequence parallelism, too, since A and B stand inside the region, where every rank has all
positions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.adapters.lora import LoraConfig, LoraLinear, base_name, is_adapter
from minillm.model import ModelConfig
from minillm.parallel.sharding.placement import Part, Partial, Replicate
from minillm.parallel.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, column_linears
from minillm.parallel.tensor_parallel.plan import part_of
from minillm.parallel.tensor_parallel.regions import end


class LoraColumnParallel(LoraLinear):
    def forward(self, x: Tensor) -> Tensor:
        return adapted_column_linears(x, self)[0]


class LoraRowParallel(LoraLinear):
    def forward(self, x: Tensor) -> Tensor:
        if not self.is_added:
            return self.base(x)
        y = end(F.linear(x, self.base.weight) + self.update(x), self.base.region)
        return y if self.base.bias is None else y + self.base.bias


def adapted_column_linears(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """`fused_column_linears` of layers of which some have adapters."""
    bases = [layer.base if isinstance(layer, LoraColumnParallel) else layer for layer in layers]
    adapted = [layer for layer in layers if isinstance(layer, LoraColumnParallel) and layer.is_added]
    weights = [*(base.weight for base in bases), *(layer.lora_A for layer in adapted)]
    biases = [*(base.bias for base in bases), *(None for _ in adapted)]
    products = column_linears(x, weights, biases, bases[0].region)
    lowered = dict(zip(adapted, products[len(bases) :], strict=True))
    outputs = zip(layers, products, strict=False)
    return tuple(y + layer.raised(lowered[layer]) if layer in lowered else y for layer, y in outputs)


def adapted(base: nn.Module, config: LoraConfig, dtype: torch.dtype, device: torch.device) -> LoraLinear:
    """The form for this layer. ValueError for dropout beside a column layer, whose input W and A share."""
    if isinstance(base, (ColumnParallelLinear, RowParallelLinear)) and config.dropout:
        raise ValueError(f"dropout {config.dropout} has no form for tensor-parallel layers: leave one of the two out.")
    if isinstance(base, ColumnParallelLinear):
        return LoraColumnParallel(base, config, dtype, device)
    if isinstance(base, RowParallelLinear):
        return LoraRowParallel(base, config, dtype, device)
    return LoraLinear(base, config, dtype, device)


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
