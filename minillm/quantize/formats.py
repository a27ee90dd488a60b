"""How a weight becomes a code of 8 or 4 bits, and what is kept to turn it back.

    weights of one output      w0 w1 w2 … | … … … | … … w(in - 1)        cut along the input into groups
    one scale for each group      scale 0 |   1   |   2                  (and a zero point, if the grid is asymmetric)
    code                       round(w / scale) + zero                   back: (code - zero) · scale

A group is what shares a scale: all inputs of one output ("per channel", group None), or so many in a row. A smaller
group follows outliers better and costs more scales.

    Int      evenly spaced values                                          8 bits per channel, 4 bits in groups
    NF4      16 values, each equally likely under a normal distribution    Dettmers et al. 2023, §3 and appendix E
    Float8   e4m3: 4 bits of exponent, 3 of mantissa, at most 448          Micikevicius et al. 2022

Two codes of 4 bits share a byte, the first in its low half; so four bytes read as a little-endian int32 hold eight
codes in order, which is how `compressed-tensors` stores them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = torch.finfo(FLOAT8).max


class Grid(NamedTuple):
    """What turns codes into weights. scale: [out, groups], float; zero: the code of 0, [out, groups], or None for 0."""

    scale: Tensor
    zero: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "Grid":
        """What a change makes of both."""
        return Grid(*(None if each is None else change(each) for each in self))

    def spread(self, size: int) -> "Grid":
        """One scale and zero point for each of `size` inputs: [out, size]."""
        return self.map(lambda each: each.repeat_interleave(size // each.shape[1], 1))


@dataclass(frozen=True)
class Format(ABC):
    """group: inputs that share a scale; None = all of an output. scale_dtype: in which scales are kept. least: the
    first code."""

    group: int | None = None
    scale_dtype: torch.dtype = torch.bfloat16
    bits: ClassVar[int] = 8
    least: ClassVar[int] = 0
    code_dtype: ClassVar[torch.dtype] = torch.uint8

    def __post_init__(self):
        if self.group is not None and (not isinstance(self.group, int) or self.group < 1):
            raise ValueError(f"group {self.group!r} must be a whole number of at least 1, or None for one per output.")

    def check_size(self, in_features: int, name: str = "the layer") -> None:
        """ValueError if the inputs of a layer cannot be cut into groups, or not into whole bytes."""
        if self.group is not None and in_features % self.group:
            fits = [size for size in (256, 128, 64, 32, 16, 8) if in_features % size == 0]
            advice = f"use {' or '.join(map(str, fits))}" if fits else "use one scale per output"
            raise ValueError(f"group {self.group} does not divide the {in_features} inputs of {name}: {advice}.")
        if self.bits == 4 and in_features % 2:
            raise ValueError(f"{name} has {in_features} inputs, and two codes of 4 bits share a byte: use 8 bits.")

    def grid(self, weight: Tensor) -> Grid:
        """The grid that covers the weights of every group. weight: [out, in], float."""
        scale, zero = self.fit(weight.unflatten(1, (-1, self.group or weight.shape[1])))
        return Grid(scale, zero)

    def nearest(self, weight: Tensor, grid: Grid) -> Tensor:
        """Every weight as the nearest value of its grid, float. weight: [out, in]."""
        wide = grid.spread(weight.shape[1])
        return self.decode(self.encode(weight, wide), wide)

    @abstractmethod
    def fit(self, groups: Tensor) -> tuple[Tensor, Tensor | None]:
        """groups: [out, groups, group] -> scale and zero point, [out, groups]. A group of zeros has the scale 1."""

    @abstractmethod
    def encode(self, weight: Tensor, grid: Grid) -> Tensor:
        """The nearest code of every weight, one to an element; the grid is of the same shape or broadcasts to it."""

    @abstractmethod
    def decode(self, codes: Tensor, grid: Grid) -> Tensor:
        """What `encode`'s codes stand for."""

    def encode_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [..., size], each with a scale of its own -> codes [..., size] and scales [...]."""
        scale, zero = self.fit(rows)
        return self.encode(rows, Grid(scale[..., None], zero)), scale

    def decode_rows(self, codes: Tensor, scale: Tensor) -> Tensor:
        """What `encode_rows` rounded them to, in the scale's dtype."""
        return self.decode(codes, Grid(scale[..., None]))

    def pack(self, codes: Tensor) -> Tensor:
        """[out, in] codes, one to an element -> as they are kept."""
        return codes if self.bits == 8 else pack_halves(codes - self.least)

    def unpack(self, stored: Tensor) -> Tensor:
        return stored if self.bits == 8 else unpack_halves(stored).to(self.code_dtype) + self.least

    def _stored(self, scale: Tensor) -> Tensor:
        """The scale as it will be read back: codes are chosen for the scale that is kept, not for the exact one."""
        return torch.where(scale == 0, 1.0, scale).to(self.scale_dtype).to(scale.dtype)


@dataclass(frozen=True)
class Int(Format):
    """Evenly spaced values. symmetric: 0 lies in the middle of the codes; else a zero point shifts them to the range of
    each group, which must contain 0."""

    bits: int = 8
    symmetric: bool = True
    code_dtype: ClassVar[torch.dtype] = torch.int8

    def __post_init__(self):
        super().__post_init__()
        if self.bits not in (4, 8):
            raise ValueError(f"bits {self.bits} is not supported: integers have 4 or 8.")

    @property
    def least(self) -> int:
        return -(1 << (self.bits - 1))

    @property
    def most(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def fit(self, groups: Tensor) -> tuple[Tensor, Tensor | None]:
        steps = self.most - self.least
        if self.symmetric:
            return self._stored(2 * groups.abs().amax(-1) / steps), None
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = self._stored((high - low) / steps)
        zero = (self.least - torch.round(low / scale)).clamp(self.least, self.most)
        return scale, zero

    def encode(self, weight: Tensor, grid: Grid) -> Tensor:
        codes = torch.round(weight / grid.scale)
        if grid.zero is not None:
            codes = codes + grid.zero
        return codes.clamp(self.least, self.most).to(torch.int8)

    def decode(self, codes: Tensor, grid: Grid) -> Tensor:
        codes = codes.to(grid.scale.dtype)
        return (codes if grid.zero is None else codes - grid.zero) * grid.scale


@dataclass(frozen=True)
class NF4(Format):
    """16 levels that a normal distribution fills equally, scaled by the largest weight of each group.

    double: the scales are codes of 8 bits themselves, in blocks that share a scale (`DoubleScales`).
    """

    group: int | None = 64
    scale_dtype: torch.dtype = torch.float32
    double: bool = True
    bits: ClassVar[int] = 4

    def fit(self, groups: Tensor) -> tuple[Tensor, Tensor | None]:
        return self._stored(groups.abs().amax(-1)), None

    def encode(self, weight: Tensor, grid: Grid) -> Tensor:
        levels = torch.tensor(NF4_LEVELS, dtype=weight.dtype, device=weight.device)
        between = (levels[:-1] + levels[1:]) / 2
        return torch.bucketize((weight / grid.scale).contiguous(), between).to(torch.uint8)

    def decode(self, codes: Tensor, grid: Grid) -> Tensor:
        levels = torch.tensor(NF4_LEVELS, dtype=grid.scale.dtype, device=codes.device)
        return levels[codes.int()] * grid.scale


@dataclass(frozen=True)
class Float8(Format):
    """e4m3, scaled so that a group's largest weight is the largest number. Kept as uint8, which no cast changes."""

    def fit(self, groups: Tensor) -> tuple[Tensor, Tensor | None]:
        return self._stored(groups.abs().amax(-1) / FLOAT8_MAX), None

    def encode(self, weight: Tensor, grid: Grid) -> Tensor:
        return (weight / grid.scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8).view(torch.uint8)

    def decode(self, codes: Tensor, grid: Grid) -> Tensor:
        return codes.view(FLOAT8).to(grid.scale.dtype) * grid.scale


class DoubleScales(NamedTuple):
    """Scales as codes of 8 bits: mean + e4m3 · largest of its block (Dettmers et al. 2023, §3, "double quantization").

    codes: [out, groups], uint8; largest: one for each block of 256, float32; mean: [], float32. Where codes are a part
    of a layer's, the blocks are still the whole layer's, in which codes[0, 0] has the number `first`, and the output
    after it `stride` more; None = as many as there are groups.
    """

    codes: Tensor
    largest: Tensor
    mean: Tensor
    first: int = 0
    stride: int | None = None

    BLOCK = 256

    @classmethod
    def of(cls, scale: Tensor) -> "DoubleScales":
        """scale: [out, groups]."""
        flat, mean = scale.float().flatten(), scale.float().mean()
        blocks = torch.nn.functional.pad(flat - mean, (0, -len(flat) % cls.BLOCK)).view(-1, cls.BLOCK)
        format = Float8(scale_dtype=torch.float32)
        grid = format.grid(blocks)
        codes = format.encode(blocks, grid).flatten()[: len(flat)].view_as(scale)
        return cls(codes, grid.scale[:, 0], mean)

    def scale(self) -> Tensor:
        """[out, groups], float32."""
        (outputs, groups), device = self.codes.shape, self.codes.device
        starts = self.first + (self.stride or groups) * torch.arange(outputs, device=device)
        blocks = (starts[:, None] + torch.arange(groups, device=device)) // self.BLOCK
        return self.codes.view(FLOAT8).float() * self.largest[blocks] + self.mean


def pack_halves(codes: Tensor) -> Tensor:
    """[..., n] codes of 0 .. 15 -> [..., n / 2] bytes, the first of two in the low half."""
    codes = codes.to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack_halves(packed: Tensor) -> Tensor:
    """[..., n / 2] bytes -> [..., n] codes of 0 .. 15."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
