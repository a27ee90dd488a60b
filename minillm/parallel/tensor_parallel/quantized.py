"""Quantized layers under tensor parallelism: codes are cut as the weights are that they stand for.

    column layer   rows of codes, scales and zero points; nothing is sent, as in `ColumnParallelLinear`'s forward pass
    row layer      whole groups of columns; the shares are summed, as `RowParallelLinear` does it

Codes are never rounded anew, so the ranks' weights together are those of the whole layer, to the bit.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.model import ModelConfig, Transformer
from minillm.model.transformer import apply_linears
from minillm.parallel.sharding.placement import Partial, Shard
from minillm.parallel.tensor_parallel.layers import RowParallelLinear, fused_column_linears, products_are_kept
from minillm.parallel.tensor_parallel.parallelize import tensor_parallel
from minillm.parallel.tensor_parallel.plan import part_of
from minillm.parallel.tensor_parallel.regions import Region, end
from minillm.quantize.formats import DoubleScales, Format, Grid
from minillm.quantize.in_place import quantized_layers
from minillm.quantize.joined import join_layers
from minillm.quantize.kernels import DEQUANTIZE
from minillm.quantize.linear import QuantizedLinear


class QuantizedRow(nn.Module):
    """[..., inputs / world_size] -> [..., outputs], summed over the ranks: in place of a `RowParallelLinear`."""

    def __init__(self, layer: QuantizedLinear, region: Region) -> None:
        super().__init__()
        self.layer, self.region = layer, region

    @property
    def weight(self) -> Tensor:
        """What this rank's codes stand for."""
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return end(y.clone() if products_are_kept() else y, self.region)


@torch.no_grad()
def cut_quantized(model: Transformer, group: Group, *, whole_experts: bool = False) -> Transformer:
    """`tensor_parallel`, in place, of a model of which some layers may be quantized. ValueError for layers that cannot
    be cut without rounding anew; nothing is changed then."""
    layers, config = quantized_layers(model), model.config
    parts = {name: cut_layer(name, layer, config, group) for name, layer in layers.items()}
    for name, layer in layers.items():
        model.set_submodule(name, nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta"))
    tensor_parallel(model, config, group, whole_experts=whole_experts)
    put_quantized(model, parts)
    return model


def part_of_codes(config: ModelConfig, name: str, format: Format, quantizes_inputs: bool, group: Group) -> Shard:
    """Which part of the codes of layer `name`, [outputs, inputs], this rank holds."""
    if ".experts." in name:
        raise ValueError(f"{name} is an expert in codes, which is not cut over ranks: use a folder in 16 bits.")
    part = shard_of(part_of(config, f"{name}.weight", group.rank, group.world_size))
    if part.dim == 1 and quantizes_inputs:
        raise ValueError(f"{name} rounds whole rows of inputs, of which a rank has a part: quantize weights alone.")
    return part


def shard_of(part: Shard | Partial) -> Shard:
    """How a layer's weight is cut, whatever becomes of its gradient."""
    return part.of if isinstance(part, Partial) else part


def check_divides(name: str, shape: tuple[int, int], format: Format, part: Shard) -> None:
    """ValueError unless the codes make equal parts, of whole groups. shape: of the whole layer, [outputs, inputs]."""
    unit = 1 if part.dim == 0 else format.group or format.bits // 4
    if shape[part.dim] % (unit * part.num_shards):
        what = "outputs" if part.dim == 0 else f"inputs in groups of {unit}"
        raise ValueError(
            f"{name} is quantized and has {shape[part.dim]} {what}, which do not divide over {part.num_shards} ranks: "
            "use fewer ranks or smaller groups."
        )


def cut_codes(codes: Tensor, grid: Grid, part: Shard) -> tuple[Tensor, Grid]:
    """This rank's part of codes [outputs, inputs] and of their grid; a scale for each output stays as it is where
    columns are cut."""
    cut = [
        each if part.dim == 1 and each.shape[1] == 1 else part.cut(each).clone() for each in grid if each is not None
    ]
    return part.cut(codes).clone(), Grid(*cut)


def put_quantized(model: Transformer, parts: Mapping[str, QuantizedLinear]) -> None:
    """Puts this rank's codes in place of layers that `tensor_parallel` has cut."""
    for name, layer in parts.items():
        cut = model.get_submodule(name)
        model.set_submodule(name, QuantizedRow(layer, cut.region) if isinstance(cut, RowParallelLinear) else layer)
    for module in model.modules():
        is_cut = getattr(module, "linears", None) is fused_column_linears
        if is_cut and any(isinstance(each, QuantizedLinear) for each in module.children()):
            module.linears = apply_linears
    join_layers(model)


def cut_layer(name: str, layer: QuantizedLinear, config: ModelConfig, group: Group) -> QuantizedLinear:
    """This rank's part of layer `name` of the whole model. ValueError if it cannot be cut without rounding anew."""
    part = part_of_codes(config, name, layer.format, layer.quantizes_inputs, group)
    check_divides(name, (layer.out_features, layer.in_features), layer.format, part)
    if layer.doubled is None:
        codes, grid = cut_codes(layer.unpacked(), layer.grid, part)
    else:
        codes, grid = part.cut(layer.unpacked()).clone(), cut_doubled(layer.doubled, part)
    bias = None if layer.bias is None else part.cut(layer.bias.detach()).clone()
    cut = QuantizedLinear(layer.format, layer.format.pack(codes), grid, bias, layer.quantizes_inputs)
    if layer.kernel == DEQUANTIZE:
        cut.use(DEQUANTIZE)
    return cut


def cut_doubled(scales: DoubleScales, part: Shard) -> DoubleScales:
    """This rank's part of a whole layer's scales. It keeps the scales of all blocks, 4 bytes for 16,384 weights each,
    since its own codes begin anywhere in one."""
    length, groups = scales.codes.shape[part.dim], scales.codes.shape[1]
    first = part.index * part.size(length) * (groups if part.dim == 0 else 1)
    return DoubleScales(part.cut(scales.codes).clone(), scales.largest, scales.mean, first, groups)
