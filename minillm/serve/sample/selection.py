"""Which tokens of a whole vocabulary top-k or top-p keeps, without sorting it: the smallest weight kept decides.

    every weight ──▶ a sample, sorted ──▶ two weights between which the last one lies ──▶ only what lies there, sorted

Selection by sampling (Floyd and Rivest 1975, https://doi.org/10.1145/360680.360691), in operations that never ask
the host: whether the sample told the truth is known afterwards, and is part of the answer.
"""

from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

SAMPLE = 2048  # weights of it, about
MARGIN = 3  # half the search window around the sampled cut-off, in standard deviations
PIECE = 256  # weights that are summed in float32
SMALLEST = torch.finfo(torch.float32).tiny


class LastKept(NamedTuple):
    """Where a row is cut: the least weight that is kept and the last place at which an equal one is kept, and whether
    that is certain; [rows, 1] each."""

    weight: Tensor
    place: Tensor
    certain: Tensor

    def where(self, condition: Tensor, other: "LastKept") -> "LastKept":
        return LastKept(*(torch.where(condition, mine, its) for mine, its in zip(self, other, strict=True)))


def last_kept(weights: Tensor, limit: Tensor, whole: Tensor, *, counted: bool) -> LastKept:
    """The smallest weight inside top-p (counted: inside top-k) of each row. Ties go to the lower index.

    weights: [rows, width], width a multiple of PIECE. limit: [rows, 1], float64, the sum (counted: the number) that the
    kept weights reach. whole: [rows, 1], float64, the sum (counted: the number) of all.

    It lies between the two weights if those above do not reach the limit and with those between they do. How far is it
    from the sample's estimate? Counted in the sample's weights, the standard deviation is at most half the root of
    their number, because what is not kept is no larger than the last one kept; once the sum at the estimate is known,
    it is the root of the distance that is left.
    """
    (rows, width), device = weights.shape, weights.device
    step = max(1, width // SAMPLE)
    sample = weights[:, step // 2 :: step]
    size = sample.shape[1]
    most = 2 * MARGIN * (2 + (2 * size**0.5) ** 0.5)  # of the sample's weights between the two, see below
    room = -(-int((2 + most) * step) // PIECE) * PIECE
    if step == 1 or 2 * room > width:
        return _last_of_sorted(weights, limit, counted)
    sample, rest = sample.sort(dim=1, descending=True).values, whole - limit
    left = _masses(sample, counted).flip(1).cumsum(1).flip(1) * (width / size)  # the sum from here on, by estimate
    kept = (left > rest).sum(-1, keepdim=True)  # of the sample
    pivot = sample.gather(1, (kept - 1).clamp(min=0))
    left += whole - sum_above(weights, pivot, counted) - left.gather(1, (sample > pivot).sum(-1, keepdim=True))
    estimate, kept = kept, (left > rest).sum(-1, keepdim=True)
    margin = (MARGIN * (2 + (kept - estimate).abs().sqrt())).long()
    upper = sample.gather(1, (kept - 1 - margin).clamp(min=0)).masked_fill(kept <= margin, inf)
    lower = sample.gather(1, (kept + margin).clamp(max=size - 1)).masked_fill(kept + margin >= size, 0)
    above = _above(weights, upper)
    between = torch.ge(weights, lower.clamp(min=SMALLEST), out=torch.empty_like(weights)).sub_(above).bool()
    found = torch.nonzero_static(between.flatten(), size=rows * room, fill_value=rows * width)[:, 0]
    ends = torch.searchsorted(found, width * torch.arange(rows + 1, device=device))[:, None]
    number, count = torch.arange(room, device=device), ends.diff(dim=0)
    places = found[(ends[:-1] + number).clamp(max=len(found) - 1)].clamp(max=rows * width - 1)
    inner = weights.flatten()[places] * (number < count)
    limit = limit - row_sum(above if counted else above.mul_(weights))
    last = _last_of_sorted(inner, limit, counted)
    place = places.gather(1, last.place) - width * torch.arange(rows, device=device)[:, None]
    certain = last.certain & (limit > 0) & (count <= room) & (ends[1:] < len(found))
    return LastKept(last.weight, place, certain)


def _last_of_sorted(weights: Tensor, limit: Tensor, counted: bool) -> LastKept:
    """The same by sorting all; certain if the limit is reached."""
    weights, places = weights.sort(dim=1, descending=True, stable=True)
    sums = _masses(weights, counted).cumsum(1)
    last = torch.searchsorted(sums, limit).clamp(max=weights.shape[1] - 1)
    return LastKept(weights.gather(1, last), places.gather(1, last), sums[:, -1:] >= limit)


def _masses(weights: Tensor, counted: bool) -> Tensor:
    return (weights > 0).double() if counted else weights.double()


def _above(weights: Tensor, bound: Tensor) -> Tensor:
    """1.0 where a weight is larger than the bound, else 0.0: a CPU compares faster to numbers than to truth values."""
    return torch.gt(weights, bound, out=torch.empty_like(weights))


def sum_above(weights: Tensor, bound: Tensor, counted: bool) -> Tensor:
    """The sum (counted: the number) of the weights that are larger than the bound, [rows, 1], float64."""
    above = _above(weights, bound)
    return row_sum(above if counted else above.mul_(weights))


def row_sum(weights: Tensor) -> Tensor:
    """[rows, 1], float64, of weights [rows, multiple of PIECE]; in two levels, since float64 is slow."""
    return weights.unflatten(1, (-1, PIECE)).sum(-1).double().sum(-1, keepdim=True)
