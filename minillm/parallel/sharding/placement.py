"""Which part of a whole tensor this rank holds: the one description that all ways of spreading a model share.

    Replicate(copy)                      the whole of it, as other ranks have
    Shard(dim, index, num_shards, copy)  the index-th of equal parts along a dimension, the last one padded with zeros
    FlatShard(start, stop)               elements of the flattened tensor, possibly none               (ZeRO and FSDP)
    Partial(of)                          laid out like `of`, but its gradient is this rank's share of a sum

    Placement(shape, (Shard(0, 1, 2), FlatShard(96, 192)))

        whole [16, 12] ── rows 8 to 16 (tp) ──▶ [8, 12] ── elements 96 to 192 of it (dp) ──▶ [0], for there are just 96

A placement is data without groups: parts outermost first, one for each axis that the tensor is spread over. Of ranks
that hold the same numbers, the one with copy 0 counts them, in norms and in what is saved. The names are those of
torch's DTensor. The collective functions at the end, and `gather` in gather.py, are all that a spread model needs
besides its own mechanism.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minillm.comm import Group


@dataclass(frozen=True)
class Replicate:
    """The whole tensor. copy: 0 on the rank that counts it, among all that hold it."""

    copy: int = 0

    def shape(self, whole: torch.Size) -> torch.Size:
        return whole

    def cut(self, whole: Tensor) -> Tensor:
        return whole

    def put(self, part: Tensor, whole: Tensor) -> None:
        whole.copy_(part)


@dataclass(frozen=True)
class Shard:
    """The index-th of num_shards parts along `dim`, all of ceil(n / num_shards) rows: what a part lacks is zeros.

    copy: where several ranks hold the same part (kv heads), which of them this is.
    """

    dim: int
    index: int
    num_shards: int
    copy: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.num_shards:
            raise ValueError(f"part {self.index} of {self.num_shards} does not exist: index must be below num_shards.")

    def size(self, length: int) -> int:
        """Rows of a part of so many rows, padding included."""
        return -(-length // self.num_shards)

    def real(self, length: int) -> int:
        """Rows of this part that are not padding."""
        size = self.size(length)
        return min(max(length - self.index * size, 0), size)

    def shape(self, whole: torch.Size) -> torch.Size:
        sizes = list(whole)
        sizes[self.dim] = self.size(whole[self.dim])
        return torch.Size(sizes)

    def cut(self, whole: Tensor) -> Tensor:
        own = self._own(whole)
        shape = self.shape(whole.shape)
        if own.shape == shape:
            return own
        part = whole.new_zeros(shape)
        part.narrow(self.dim, 0, own.shape[self.dim]).copy_(own)
        return part

    def put(self, part: Tensor, whole: Tensor) -> None:
        own = self._own(whole)
        own.copy_(part.narrow(self.dim, 0, own.shape[self.dim]))

    def _own(self, whole: Tensor) -> Tensor:
        length = whole.shape[self.dim]
        return whole.narrow(self.dim, min(self.index * self.size(length), length), self.real(length))


@dataclass(frozen=True)
class FlatShard:
    """Elements start to stop of the tensor in row-major order: one dimension, possibly empty."""

    start: int
    stop: int
    copy: int = 0

    @staticmethod
    def of_range(begin: int, end: int, low: int, high: int, copy: int = 0) -> "FlatShard":
        """What elements low to high of a flat tensor hold of the parameter at its elements begin to end."""
        start = min(max(low, begin), end)
        return FlatShard(start - begin, max(start, min(high, end)) - begin, copy)

    def shape(self, whole: torch.Size) -> torch.Size:
        return torch.Size([self.stop - self.start])

    def cut(self, whole: Tensor) -> Tensor:
        return whole.reshape(-1)[self.start : self.stop]

    def put(self, part: Tensor, whole: Tensor) -> None:
        whole.view(-1)[self.start : self.stop] = part


@dataclass(frozen=True)
class Partial:
    """A weight that is laid out like `of`, whose gradient is this rank's share of the sum over the ranks which hold the
    same part (see `sum_partial`): of a norm's weight that saw some of the heads or of the sequence."""

    of: Replicate | Shard = Replicate()

    @property
    def copy(self) -> int:
        return self.of.copy

    def shape(self, whole: torch.Size) -> torch.Size:
        return self.of.shape(whole)

    def cut(self, whole: Tensor) -> Tensor:
        return self.of.cut(whole)

    def put(self, part: Tensor, whole: Tensor) -> None:
        self.of.put(part, whole)


Part = Replicate | Shard | FlatShard | Partial


@dataclass(frozen=True)
class Placement:
    """Where a tensor of `shape` lies: this rank's part along each axis, outermost cut first."""

    shape: torch.Size
    parts: tuple[Part, ...] = ()

    @property
    def part_shape(self) -> torch.Size:
        """Shape of what this rank holds."""
        shape = self.shape
        for part in self.parts:
            shape = part.shape(shape)
        return shape

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all of it."""
        return all(isinstance(part, Replicate) for part in self.parts)

    @property
    def is_counted(self) -> bool:
        """Whether this rank counts its numbers: of several ranks that hold the same ones, exactly one does."""
        return all(part.copy == 0 for part in self.parts)

    def within(self, part: Part) -> "Placement":
        """The placement of a further cut inside what this rank holds."""
        return replace(self, parts=(*self.parts, part))

    def cut(self, whole: Tensor) -> Tensor:
        """whole: [*shape] -> what this rank holds of it, a contiguous copy."""
        if whole.shape != self.shape:
            raise ValueError(f"a tensor of shape {list(whole.shape)} is not the whole one of {list(self.shape)}.")
        for part in self.parts:
            whole = part.cut(whole)
        return whole.clone(memory_format=torch.contiguous_format)


def join(pieces: Sequence[tuple[Placement, Tensor]]) -> Tensor:
    """All ranks' parts of one tensor, each with its placement -> the whole. If several pieces cover the same region the
    last one wins; regions that no piece covers are zero."""
    first, tensor = pieces[0]
    if not first.parts:
        return pieces[-1][1]
    inside: dict[Part, list[tuple[Placement, Tensor]]] = {}
    for placement, piece in pieces:
        own, *others = placement.parts
        inner = Placement(own.shape(placement.shape), tuple(others))
        own = own.of if isinstance(own, Partial) else own
        inside.setdefault(replace(own, copy=0), []).append((inner, piece))
    whole = tensor.new_zeros(first.shape)
    for part, held in inside.items():
        part.put(join(held), whole)
    return whole


# Collectives: every rank of the group calls them, and those of its parts that other ranks share go by the same names.


@torch.no_grad()
def sum_partial(gradients: Mapping[str, Tensor], placements: Mapping[str, Placement], group: Group) -> None:
    """Completes, in place, the gradients whose placement says `Partial`: one all-reduce over `group` for all of them,
    in which each of several parts (kv heads) has a slot of its own. Works on slices of gradients as well."""
    chosen = [(gradient, part.of) for name, gradient in gradients.items() if (part := _partial(placements[name]))]
    if not chosen or group.world_size == 1:
        return
    slots = []
    for gradient, of in chosen:
        slot = gradient.new_zeros((getattr(of, "num_shards", 1), gradient.numel()))
        slot[getattr(of, "index", 0)] = gradient.reshape(-1)
        slots.append(slot)
    summed = group.all_reduce(torch.cat([slot.view(-1) for slot in slots])).split([slot.numel() for slot in slots])
    for (gradient, of), slot, flat in zip(chosen, slots, summed, strict=True):
        gradient.copy_(flat.view_as(slot)[getattr(of, "index", 0)].view_as(gradient))


@torch.no_grad()
def global_norm(
    gradients: Mapping[Any, Tensor],
    placements: Mapping[Any, Placement] | None = None,
    group: Group | None = None,
    norm_type: float = 2.0,
) -> Tensor:
    """The norm of the whole model's gradient, after `sum_partial`: a float64 scalar on the group's device, the same on
    all of its ranks; one all-reduce of 8 bytes and no wait for the device.

    group: all ranks that hold parts of the model; None: this process holds all of it.
    norm_type: p of (Σ |g|^p)^(1/p), above 0; math.inf for the largest |g|.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} must be above 0: 2.0, 1.0 or math.inf.")
    counted = [g for name, g in gradients.items() if placements is None or placements[name].is_counted]
    counted = [g for g in counted if g.numel()]
    device = group.device if group else counted[0].device if counted else torch.device("cpu")
    norms = []
    with torch._C.DisableTorchFunctionSubclass():  # a ShardedGradient is what this norm is for
        for (_, dtype), alike in _by_kind(counted).items():
            wide = torch.promote_types(dtype, torch.float32)
            norms += [norm.to(device).double() for norm in torch._foreach_norm(alike, norm_type, dtype=wide)]
    each = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=device)
    if math.isinf(norm_type):
        largest = each.max()
        return group.all_reduce(largest, "max") if group else largest
    total = each.pow(norm_type).sum()
    return (group.all_reduce(total) if group else total).pow(1 / norm_type)


@torch.no_grad()
def clip_(gradients: Iterable[Tensor], norm: Tensor, max_norm: float | None) -> None:
    """Scales all gradients by max_norm / norm if that is below 1; their directions stay (Pascanu et al. 2013).
    The factor stays on the device: nothing waits for it."""
    if max_norm is not None:
        scale_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))


@torch.no_grad()
def clip_grad_norm_(
    gradients: Mapping[Any, Tensor],
    placements: Mapping[Any, Placement],
    group: Group,
    max_norm: float | None,
    loss_scale: float,
    norm_type: float,
) -> Tensor:
    """The whole model's `global_norm` / loss_scale; all gradients are divided by loss_scale and clipped to max_norm."""
    norm = global_norm(gradients, placements, group, norm_type) / loss_scale
    clip = torch.ones_like(norm) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if max_norm is not None or loss_scale != 1.0:
        scale_(gradients.values(), clip / loss_scale)
    return norm


def scale_(gradients: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiplies all gradients by a scalar, in one call for each device and dtype."""
    for (device, dtype), alike in _by_kind(gradients).items():
        wide = torch.promote_types(dtype, torch.float32)  # a 16-bit factor would round every gradient once more
        torch._foreach_mul_(alike, factor.to(device, wide) if isinstance(factor, Tensor) else factor)


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of those parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _partial(placement: Placement) -> Partial | None:
    return next((part for part in placement.parts if isinstance(part, Partial)), None)


def _by_kind(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return kinds
