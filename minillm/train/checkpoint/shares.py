"""Who writes what: everything once, and what k ranks hold by each of them to 1/k.

    a weight on 4 replicas       [ rank 0 | rank 1 | rank 2 | rank 3 ]     each writes a FlatShard of it
    a small one                  [ rank 2 ]                                the one with the least to write so far
    a tensor-parallel slice      [ rank 1 ]                                who has it alone

All ranks work it out from the same catalogues, so nobody has to be told. A rank's share is one file.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minillm.parallel.sharding.placement import FlatShard, Partial, Placement, Replicate
from minillm.train.checkpoint.checksum import crc32
from minillm.train.checkpoint.manifest import SavedPart, SavedTensor
from minillm.train.checkpoint.runs import Runs, runs_of

SPLIT_FROM = 1 << 20  # elements; parts below it are written by one of their holders

Owned = tuple[str, Placement]  # of a tensor's name: which part of it
Catalogue = list[tuple[Owned, bool]]  # all parts that a rank has, and whether it counts them


@dataclass(frozen=True)
class Piece:
    """What one rank writes of a tensor: content: of any shape, its elements the runs of `placement` one after the
    other."""

    name: str
    placement: Placement
    content: Tensor


@dataclass(frozen=True)
class Share:
    """What this rank writes of a tensor, whatever its values. cut: which of the part that it holds, None for all of it;
    runs: those of `placement`, None where there is no padding to leave out."""

    name: str
    placement: Placement
    cut: FlatShard | None
    runs: Runs | None

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """This rank's share of its part, as a view unless padding is left out."""
        part = tensors[self.name]
        if self.cut:
            part = part.reshape(-1).narrow(0, self.cut.start, self.cut.stop - self.cut.start)
        if self.runs:
            flat, at = part.reshape(-1), zip(self.runs.part.tolist(), self.runs.length.tolist(), strict=True)
            part = torch.cat([flat[start : start + length] for start, length in at])
        return part


def catalogue_of(placements: Mapping[str, Placement]) -> Catalogue:
    return [((name, _bare(placement)), placement.is_counted) for name, placement in placements.items()]


def shares_of(catalogues: Sequence[Catalogue], rank: int) -> list[Share]:
    """What this rank writes of the tensors that it holds. catalogues: of all ranks."""
    found, written = [], [0] * len(catalogues)  # elements by rank
    parts = [
        (placement.part_shape.numel(), name, placement, ranks)
        for (name, placement), ranks in holders(catalogues).items()
    ]
    for numel, name, placement, ranks in sorted(parts, key=lambda part: -part[0]):  # small ones even out the large
        writers = ranks if numel >= SPLIT_FROM else [min(ranks, key=written.__getitem__)]
        for index, writer in enumerate(writers):
            cut = FlatShard(numel * index // len(writers), numel * (index + 1) // len(writers))
            written[writer] += cut.stop - cut.start
            if writer == rank:
                found += _share(name, placement, cut if len(writers) > 1 else None)
    return found


def _share(name: str, placement: Placement, cut: FlatShard | None) -> list[Share]:
    """None if there is nothing but padding in it."""
    placement = placement.within(cut) if cut else placement
    runs = runs_of(placement)
    is_padded = runs.numel < placement.part_shape.numel()
    return [Share(name, placement, cut, runs if is_padded else None)] if runs.numel else []


def holders(catalogues: Sequence[Catalogue]) -> dict[Owned, list[int]]:
    """For each part, the ranks that hold it. Where copies of a tensor are cut differently, only the parts of the copy
    that counts: both ends of a pipeline shard a tied embedding, each in its own way."""
    counted = {owned for theirs in catalogues for owned, is_counted in theirs if is_counted}
    found: dict[Owned, list[int]] = {}
    for rank, theirs in enumerate(catalogues):
        for owned, _ in theirs:
            if owned in counted:
                found.setdefault(owned, []).append(rank)
    return found


def write_parts(path: Path, rank: int, pieces: Sequence[Piece]) -> list[list[Any]]:
    """Writes the rank's file to the disk. Returns name, dtype and `SavedPart` of each piece, as in a manifest."""
    found, offset = [], 0
    with path.open("wb") as file:
        for piece in pieces:
            data = memoryview(piece.content.reshape(-1).view(torch.uint8).numpy())
            saved = SavedPart(rank, offset, len(data), crc32(data), piece.placement)
            file.write(data)
            offset += len(data)
            found.append([piece.name, SavedTensor(piece.content.dtype, piece.placement.shape, (saved,)).to_json()])
        file.flush()
        os.fsync(file.fileno())
    return found


def _bare(placement: Placement) -> Placement:
    """Equal for ranks that hold the same numbers: without copies."""
    parts = [part.of if isinstance(part, Partial) else part for part in placement.parts]
    return Placement(placement.shape, tuple(replace(p, copy=0) for p in parts if not isinstance(p, Replicate)))
