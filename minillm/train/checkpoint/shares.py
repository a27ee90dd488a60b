"""Who writes what: everything once, and what k ranks hold by each of them to 1/k.

    a weight on 4 replicas       [ rank 0 | rank 1 | rank 2 | rank 3 ]     each writes a FlatShard of it
    a small one                  [ rank 2 ]                                one of them does, in turn
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

from minillm.parallel.placement import FlatShard, Partial, Placement, Replicate
from minillm.parallel.runs import Runs, runs_of
from minillm.train.checkpoint.checksum import crc32
from minillm.train.checkpoint.manifest import SavedPart, SavedTensor
from minillm.train.checkpoint.state import Held

SPLIT_FROM = 1 << 14  # elements; parts below it are written by one of their holders, in turn

Owned = tuple[str, Placement]  # of a tensor's name: which part of it
Catalogue = list[tuple[Owned, bool]]  # all parts that a rank has, and whether it counts them


@dataclass(frozen=True)
class Piece:
    """What one rank writes of a tensor: content: [elements] on the CPU, the runs of `placement` one after the other."""

    name: str
    placement: Placement
    content: Tensor


@dataclass(frozen=True)
class Share:
    """What this rank writes of a tensor, whatever its numbers. cut: of the part that it holds, None for all of it;
    runs: of `placement`, None where it has no padding to leave out."""

    name: str
    placement: Placement
    cut: FlatShard | None
    runs: Runs | None

    def of(self, state: Held) -> Piece:
        flat = state[self.name][0].reshape(-1)
        flat = flat.narrow(0, self.cut.start, self.cut.stop - self.cut.start) if self.cut else flat
        if self.runs:
            at = zip(self.runs.part.tolist(), self.runs.length.tolist(), strict=True)
            flat = torch.cat([flat[start : start + length] for start, length in at])
        return Piece(self.name, self.placement, flat)


def catalogue_of(placements: Mapping[str, Placement]) -> Catalogue:
    return [((name, _bare(placement)), placement.is_counted) for name, placement in placements.items()]


def shares_of(catalogues: Sequence[Catalogue], rank: int) -> list[Share]:
    """catalogues: of all ranks. What of all that this rank has is its to write."""
    found, turn = [], 0
    for (name, placement), ranks in holders(catalogues).items():
        cut, numel = None, placement.part_shape.numel()
        if len(ranks) > 1 and numel >= SPLIT_FROM:
            writers = ranks
        else:
            writers = [ranks[turn % len(ranks)]]
            turn += len(ranks) > 1
        if rank not in writers:
            continue
        if len(writers) > 1:
            index = writers.index(rank)
            cut = FlatShard(numel * index // len(writers), numel * (index + 1) // len(writers))
            placement = placement.within(cut)
        runs = runs_of(placement)
        if runs.numel:
            is_padded = runs.numel < placement.part_shape.numel()
            found.append(Share(name, placement, cut, runs if is_padded else None))
    return found


def holders(catalogues: Sequence[Catalogue]) -> dict[Owned, list[int]]:
    """By part, the ranks that have it. Where copies of a tensor are cut in different ways, only the parts of the copy
    that counts: the ends of a pipeline shard a tied embedding each for itself."""
    counted = {owned for theirs in catalogues for owned, is_counted in theirs if is_counted}
    found: dict[Owned, list[int]] = {}
    for rank, theirs in enumerate(catalogues):
        for owned, _ in theirs:
            if owned in counted:
                found.setdefault(owned, []).append(rank)
    return found


def write_parts(path: Path, rank: int, pieces: Sequence[Piece]) -> list[list[Any]]:
    """The rank's file, on the disk when this returns; name, dtype and `SavedPart` of each piece, as a manifest has
    them."""
    found, offset = [], 0
    with path.open("wb") as file:
        for piece in pieces:
            data = memoryview(piece.content.view(torch.uint8).numpy())
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
