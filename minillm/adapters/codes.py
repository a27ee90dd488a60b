"""Codes over tensor-parallel ranks as a base that is trained through (QLoRA, Dettmers et al. 2023).

    column layer   QuantizedColumn: its input's gradient is summed over the ranks, as `ColumnParallelLinear` does it
    row layer      QuantizedRow, as in inference: a sum of shares has each share's gradient

Only codes are kept for backward, which works the weights out once more.
"""

from torch import Tensor, nn

from minillm.parallel.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, column_linears
from minillm.parallel.tensor_parallel.quantized import QuantizedRow
from minillm.parallel.tensor_parallel.regions import Region
from minillm.quantize.linear import QuantizedLinear


class QuantizedColumn(nn.Module):
    """[..., inputs] -> [..., outputs / world_size], beginning a region: in place of a `ColumnParallelLinear` in
    training. It takes over the layer's bias, whose name stays what it was."""

    def __init__(self, layer: QuantizedLinear, region: Region) -> None:
        super().__init__()
        self.bias, layer.bias = layer.bias, None
        self.layer, self.region = layer, region

    @property
    def weight(self) -> Tensor:
        """What this rank's codes stand for."""
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return column_linears(x, [self.layer], [self.bias], self.region)[0]


def quantized_part(layer: QuantizedLinear, cut: nn.Module) -> nn.Module:
    """What stands for a layer that is trained through, given its codes: of `cut`, which may be cut over ranks."""
    if isinstance(cut, ColumnParallelLinear):
        return QuantizedColumn(layer, cut.region)
    return QuantizedRow(layer, cut.region) if isinstance(cut, RowParallelLinear) else layer
