"""Where the elements of a part lie in the whole tensor: the byte arithmetic of placements, for files.

    whole  . . a b . . c d . . e f . .      a Shard along columns takes a run of elements from every row
    part   a b c d e f                      Runs(whole=[2, 6, 10], part=[0, 2, 4], length=[2, 2, 2])

Flattened in row-major order, every cut that a placement can make keeps the order of elements, so a part is an ascending
list of runs, and what two parts of one tensor share is the overlap of two such lists. Padding is in no run.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from minillm.parallel.sharding.placement import FlatShard, Part, Partial, Placement, Shard


@dataclass(frozen=True)
class Runs:
    """[runs] each, in elements: whole[i] + k of the flattened whole is part[i] + k of the flattened part, for k below
    length[i], which is never 0. All three ascend without overlap."""

    whole: np.ndarray
    part: np.ndarray
    length: np.ndarray

    @property
    def numel(self) -> int:
        """Elements in all runs: those of the part, without padding."""
        return int(self.length.sum())

    @property
    def packed(self) -> np.ndarray:
        """[runs] Where each run begins if the runs are stored one after the other."""
        return np.cumsum(self.length) - self.length


def runs_of(placement: Placement) -> Runs:
    """The runs of what this rank holds."""
    shape, found = placement.shape, _runs([0], [0], [placement.shape.numel()])
    for part in placement.parts:
        cut = _cut(part, shape)
        outer, inner, at, length = _overlap(found.part, found.length, cut.whole, cut.length)
        whole = found.whole[outer] + at - found.part[outer]
        found = _runs(whole, cut.part[inner] + at - cut.whole[inner], length)
        shape = part.shape(shape)
    return found


def shared(mine: Runs, stored: Runs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What two parts of one tensor have in common: [n] elements from the start of the stored part's packed runs, [n]
    elements from the start of mine, [n] lengths."""
    outer, inner, at, length = _overlap(mine.whole, mine.length, stored.whole, stored.length)
    return stored.packed[inner] + at - stored.whole[inner], mine.part[outer] + at - mine.whole[outer], length


def _cut(part: Part, shape: torch.Size) -> Runs:
    """The runs that one cut takes from a tensor of this shape."""
    part = part.of if isinstance(part, Partial) else part
    if isinstance(part, FlatShard):
        return _runs([part.start], [0], [part.stop - part.start])
    if not isinstance(part, Shard):
        return _runs([0], [0], [shape.numel()])
    rows, length = np.arange(math.prod(shape[: part.dim]), dtype=np.int64), shape[part.dim]
    size, each = part.size(length), math.prod(shape[part.dim + 1 :])
    whole = (rows * length + part.index * size) * each
    return _runs(whole, rows * size * each, np.full(len(rows), part.real(length) * each))


def _runs(whole: np.ndarray | list, part: np.ndarray | list, length: np.ndarray | list) -> Runs:
    """Without empty runs, and neighbours that lie side by side in both made one."""
    whole, part, length = (np.asarray(each, dtype=np.int64) for each in (whole, part, length))
    whole, part, length = whole[length > 0], part[length > 0], length[length > 0]
    if len(whole) < 2:
        return Runs(whole, part, length)
    goes_on = (whole[:-1] + length[:-1] == whole[1:]) & (part[:-1] + length[:-1] == part[1:])
    first = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    return Runs(whole[first], part[first], np.add.reduceat(length, first))


def _overlap(a: np.ndarray, a_length: np.ndarray, b: np.ndarray, b_length: np.ndarray) -> tuple[np.ndarray, ...]:
    """Of two ascending lists of intervals: which of a, which of b, start and length of all that they share."""
    first = np.searchsorted(b + b_length, a, side="right")
    count = np.maximum(np.searchsorted(b, a + a_length, side="left") - first, 0)
    of_a = np.repeat(np.arange(len(a)), count)
    of_b = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    start = np.maximum(a[of_a], b[of_b])
    return of_a, of_b, start, np.minimum((a + a_length)[of_a], (b + b_length)[of_b]) - start
