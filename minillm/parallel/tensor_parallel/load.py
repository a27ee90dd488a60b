"""`load_part(folder, group)`: this rank's part of the model in a Hugging Face folder, read without the other ranks'.

    stored tensor ──▶ the rows or columns that plan.py gives this rank, and no others ──▶ its parameter

The bytes that a rank reads are those of its parameters. Quantized layers in compressed-tensors' layout are read in
parts, too, where a part begins at a word; others (GPTQ's and AWQ's layouts) are read whole, one after the other.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.model import ModelConfig, Transformer
from minillm.model.hf import weights
from minillm.model.hf.families import Piece
from minillm.model.hf.load import open_folder, stored_dtype
from minillm.parallel.pipeline_parallel.stages import ModelPart
from minillm.parallel.sharding.placement import Part, Partial, Replicate, Shard
from minillm.parallel.tensor_parallel.parallelize import tensor_parallel
from minillm.parallel.tensor_parallel.plan import check_heads, part_of
from minillm.parallel.tensor_parallel.quantized import check_divides, cut_codes, part_of_codes, put_quantized
from minillm.quantize.folder import Layout, module_of
from minillm.quantize.hub import HubLayout
from minillm.quantize.linear import QuantizedLinear


class LoadedPart(NamedTuple):
    """model: cut by `tensor_parallel`. bytes_read: of tensors, as they are stored."""

    model: Transformer | ModelPart
    bytes_read: int


@torch.no_grad()
def load_part(
    folder: str | Path,
    group: Group,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    max_seq_len: int | None = None,
    take: Callable[[Transformer], ModelPart] | None = None,
    whole_experts: bool = False,
) -> LoadedPart:
    """Every rank of the group calls it. take: the layers of the whole model, on "meta", that are this group's, nothing
    else of the folder is read; None = all. whole_experts: of `tensor_parallel`. Other options as of `load_hf`.

    ValueError as there, and for heads or quantized layers that do not divide over the ranks.
    """
    folder = Path(folder)
    config, stored, held, layout, quantized = open_folder(folder, max_seq_len)
    check_heads(config, group.world_size)
    model = Transformer(config, device="meta", dtype=dtype or stored_dtype(folder))
    whole = dict(model.named_parameters())
    model = model if take is None else take(model)
    names = {name for name, _ in model.named_parameters()}
    held = {stored_name: pieces for stored_name, pieces in held.items() if pieces[0].name in names}
    tensor_parallel(model, config, group, whole_experts=whole_experts)
    device = torch.device(group.device if device is None else device)
    bytes_read = 0
    parts: dict[str, QuantizedLinear] = {}
    for name in quantized.keys() & held.keys():
        read = _read_codes(name, held[name], whole, layout, stored, config, group, device)
        parts |= read[0]
        bytes_read += read[1]
    cut = {name: model.get_submodule(name) for name in parts}
    for name in parts:
        model.set_submodule(name, nn.Identity())
    model.to_empty(device=device)
    for name, layer in cut.items():
        model.set_submodule(name, layer)
    put_quantized(model, parts)
    named = dict(model.named_parameters())
    for parameter in named.values():
        parameter.zero_()  # what the last rank lacks is zeros
    for file, tensors in weights.one_by_one(stored):
        for name in tensors:
            start, tensor = 0, file.get_slice(name)
            for piece in () if name in quantized else held.get(name, ()):
                shape = piece.of(whole).shape
                part = part_of(config, piece.name, group.rank, group.world_size, whole_experts=whole_experts)
                if whole_experts and piece.index:  # one expert's matrix, which is this rank's or is not read
                    own = _own(part, config.moe.num_experts)
                    here = Piece(piece.name, (piece.index[0] - own.start, *piece.index[1:]))
                    part = Replicate()
                    if piece.index[0] in own:
                        bytes_read += _copy(tensor, start, shape, part, 0, here.of(named))
                else:
                    bytes_read += _copy(tensor, start, shape, part, len(piece.index), piece.of(named))
                start += shape[0]
    return LoadedPart(model, bytes_read)


def _copy(tensor, start: int, shape: torch.Size, part: Part, skipped: int, target: Tensor) -> int:
    """Copies a part of the rows from `start` on, which are a parameter of that shape; returns the bytes that it read.

    skipped: dimensions of the parameter before those of the shape, see `Piece`.
    """
    part = part.of if isinstance(part, Partial) else part
    ranges = [slice(start, start + shape[0]), *(slice(0, size) for size in shape[1:])]
    if not isinstance(part, Replicate):
        dim = part.dim - skipped
        own = _own(part, shape[dim])
        target = target.narrow(dim, 0, len(own))
        ranges[dim] = slice(ranges[dim].start + own.start, ranges[dim].start + own.stop)
    if not target.numel():
        return 0
    value = tensor[tuple(ranges)]
    target.copy_(value)
    return value.nbytes


def _own(part: Shard, length: int) -> range:
    """Of so many rows, those of this part."""
    first = min(part.index * part.size(length), length)
    return range(first, first + part.real(length))


def _read_codes(
    stored_name: str,
    pieces: list[Piece],
    whole: dict[str, Tensor],
    layout: Layout | HubLayout,
    stored: weights.Stored,
    config: ModelConfig,
    group: Group,
    device: torch.device,
) -> tuple[dict[str, QuantizedLinear], int]:
    """(this rank's parts of the layers that are stored as one tensor, their outputs after each other; bytes read)."""
    found: dict[str, QuantizedLinear] = {}
    start, bytes_read = 0, 0
    shapes = [piece.of(whole).shape for piece in pieces]
    outputs, inputs = sum(rows for rows, _ in shapes), shapes[0][1]
    for piece, (count, _) in zip(pieces, shapes, strict=True):
        name = module_of(piece)
        part = part_of_codes(config, name, layout.format, layout.quantizes_inputs, group)
        check_divides(name, (count, inputs), layout.format, part)
        own = _own(part, count if part.dim == 0 else inputs)
        rows = range(start + own.start, start + own.stop) if part.dim == 0 else range(start, start + count)
        window = Window(stored, rows, own if part.dim == 1 else range(inputs), (outputs, inputs))
        if isinstance(layout, Layout) and window.fits(layout, stored_name):
            codes, grid = layout.read(stored_name, [len(rows), len(window.columns)], window)
        else:
            window = Window(stored, range(outputs), range(inputs), (outputs, inputs))
            codes, grid = layout.read(stored_name, [outputs, inputs], window)
            of_piece = grid.map(lambda each, own=slice(start, start + count): each[own])
            codes, grid = cut_codes(codes[start : start + count], of_piece, part)
        bytes_read += window.bytes_read
        codes, grid = codes.to(device), grid.map(lambda each: each.to(device))
        bias_name = f"{name}.bias"
        bias = torch.empty(len(codes), dtype=whole[bias_name].dtype, device=device) if bias_name in whole else None
        found[name] = QuantizedLinear(layout.format, layout.format.pack(codes), grid, bias, layout.quantizes_inputs)
        start += count
    return found, bytes_read


class Window:
    """`stored` as a layout reads it, of which each tensor shows what belongs to rows and columns of the layer: of
    [outputs / a, inputs / b] the same share; of one with a single column, such as a scale for each output, that one."""

    def __init__(self, stored: weights.Stored, rows: range, columns: range, shape: tuple[int, int]) -> None:
        self.stored, self.rows, self.columns, self.shape, self.bytes_read = stored, rows, columns, shape, 0

    def __getitem__(self, name: str) -> "Window":
        return self

    def fits(self, layout: Layout, weight: str) -> bool:
        """Whether the part begins and ends at a number of each of the layer's tensors."""
        shapes = layout.shapes(weight, list(self.shape))
        return all(self._ranges(shape) is not None for name, shape in shapes.items() if not name.endswith("_shape"))

    def get_tensor(self, name: str) -> Tensor:
        tensor = self.stored[name].get_slice(name)
        value = tensor[self._ranges(tensor.get_shape())]
        self.bytes_read += value.nbytes
        return value

    def _ranges(self, shape: list[int]) -> tuple[slice, ...] | None:
        ranges, columns = [], range(self.shape[1]) if shape[1] == 1 else self.columns
        for size, length, own in zip(shape, self.shape, (self.rows, columns), strict=True):
            if own.start * size % length or own.stop * size % length:
                return None
            ranges.append(slice(own.start * size // length, own.stop * size // length))
        return tuple(ranges)
