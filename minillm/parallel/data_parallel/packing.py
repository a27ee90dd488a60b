"""Which parameters share a bucket."""

import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Named = Iterable[tuple[str, nn.Parameter]]


@dataclass(eq=False)
class Bucket:
    """Whole parameters of one dtype, one after the other in one flat tensor.

    offsets, strides: where each begins and how it lies; numel: their elements; padded: rounded up to a multiple of what
    `assign` was told. hook_state: what a communication hook remembers from step to step (the error it still owes).
    """

    names: list[str]
    parameters: list[nn.Parameter]
    offsets: list[int]
    strides: list[tuple[int, ...]]
    numel: int
    padded: int
    hook_state: dict[str, Any] = field(default_factory=dict)

    def empty(self) -> Tensor:
        """A flat tensor for this bucket: [padded]; only the padding is initialised, to zeros."""
        flat = self.parameters[0].detach().new_empty(self.padded)
        flat[self.numel :] = 0
        return flat

    def views(self, flat: Tensor) -> list[Tensor]:
        """flat: [padded] -> one view per parameter, in its shape and its strides (fused optimizers rely on both)."""
        columns = zip(self.parameters, self.strides, self.offsets, strict=True)
        return [flat.as_strided(p.shape, strides, flat.storage_offset() + offset) for p, strides, offset in columns]


def assign(
    named_parameters: Named,
    cap_bytes: float,
    first_cap_bytes: float | None = None,
    multiple_of: int = 1,
    gradient_groups: Mapping[str, Hashable] | None = None,
) -> list[Bucket]:
    """Pack whole parameters, the last one first, since its gradient is ready first. As torch does, a bucket is closed
    by the parameter that fills it: it holds at least its cap, except the last of each dtype.

    first_cap_bytes: cap of the first bucket of each dtype; multiple_of: pad each bucket to a multiple of this many
    elements; gradient_groups: by name, the group that reduces a parameter, the same for all of a bucket. Frozen
    parameters are left out, a tied one is packed once.
    """
    trainable = {p: name for name, p in named_parameters if p.requires_grad}
    closed: list[list[nn.Parameter]] = []
    filling: dict[tuple, list[nn.Parameter]] = {}
    room: dict[tuple, float] = {}  # bytes until the bucket being filled is closed
    for p, name in reversed(trainable.items()):
        kind = p.dtype, (gradient_groups or {}).get(name)
        filling.setdefault(kind, []).append(p)
        room[kind] = room.get(kind, first_cap_bytes or cap_bytes) - p.nbytes
        if room[kind] <= 0:
            closed.append(filling.pop(kind))
            room[kind] = cap_bytes
    return [_bucket(trainable, members, multiple_of) for members in [*closed, *filling.values()]]


def _bucket(names: dict[nn.Parameter, str], members: Sequence[nn.Parameter], multiple_of: int) -> Bucket:
    ends = list(itertools.accumulate((p.numel() for p in members), initial=0))
    padded = math.ceil(ends[-1] / multiple_of) * multiple_of
    strides = [torch.empty_like(p, device="meta").stride() for p in members]  # the parameter's own, without gaps
    return Bucket([names[p] for p in members], list(members), ends[:-1], strides, ends[-1], padded)
