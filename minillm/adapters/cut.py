"""Adapters that are served over ranks: each rank keeps what belongs to its part of the base.

    column layer   B by rows, as its weight; A whole       nothing is sent: A reads what the layer reads
    row layer      A by columns, as its weight; B whole    B A x is a share, and joins the sum that ends the region

So a step sends as many bytes with adapters as without. A stage keeps those of its own layers.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from minillm.adapters.peft_folder import sizes_of_layers
from minillm.comm import Group
from minillm.model import ModelConfig, Transformer
from minillm.parallel.tensor_parallel.layers import RowParallelLinear
from minillm.parallel.tensor_parallel.plan import part_of
from minillm.parallel.tensor_parallel.quantized import QuantizedRow, shard_of

Pair = tuple[Tensor, Tensor]  # A, [rank, in], and B, [out, rank]


@dataclass(frozen=True)
class Cut:
    """config: of the whole model. group: the ranks that share the layers. layers: those that this rank has."""

    config: ModelConfig
    group: Group
    layers: Collection[int]

    def sizes(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of the whole layers that can have an adapter."""
        return sizes_of_layers(Transformer(self.config, device="meta"))

    def parts(self, matrices: Mapping[str, Pair]) -> dict[str, Pair]:
        """This rank's part of each pair, of all layers, so that every rank counts the same bytes."""
        return {name: self._part(name, *pair) for name, pair in matrices.items()}

    def has(self, name: str) -> bool:
        """Whether a layer is this rank's, by its name, as "blocks.3.mlp.up_proj"."""
        return int(name.split(".")[1]) in self.layers

    def _part(self, name: str, a: Tensor, b: Tensor) -> Pair:
        part = shard_of(part_of(self.config, f"{name}.weight", self.group.rank, self.group.world_size))
        dim = getattr(part, "dim", None)  # a router is whole everywhere
        return part.cut(a) if dim == 1 else a, part.cut(b) if dim == 0 else b


class RoutedRow(nn.Module):
    """In place of a row layer that is cut over ranks: [..., inputs / world_size] -> [..., outputs], summed.

    add: (name, share, x) -> share and what the adapters of this step's tokens make of x, `Routes.add`.
    """

    def __init__(
        self, layer: RowParallelLinear | QuantizedRow, add: Callable[[str, Tensor, Tensor], Tensor], name: str
    ):
        super().__init__()
        self.layer, self.add, self.name = layer, add, name

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        share = layer.layer(x) if isinstance(layer, QuantizedRow) else F.linear(x, layer.weight)
        y = layer.region.end(self.add(self.name, share, x))
        bias = getattr(layer, "bias", None)
        return y if bias is None else y + bias
