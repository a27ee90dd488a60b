"""A row's token in one launch: one program walks the row's weights, however many are kept, and never sorts.

    weights ──▶ the least weight that top-k keeps, by halving the range of float32 ──▶ the same for top-p ──▶ min-p
            ──▶ the sum of what is kept ──▶ where the running sum passes the random number's share of it

The weights are in [0, 1], where float32 has 2³⁰ values in order of their bits: 30 walks find the least one. Of equals
at the cut, the lowest ids are kept. It is what `batch.py` computes on a CPU by selection, in as many launches as that
has operations (some 160 with top-p). On the CPU only in Triton's interpreter: set TRITON_INTERPRET=1 before Python
starts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.model.kernels import kernel, tl, triton

_kernel = kernel("width")
BLOCK = 4096  # weights that a program reads at once


def can_sample_rows(weights: Tensor) -> bool:
    return triton is not None and (weights.is_cuda or triton.knobs.runtime.interpret)


def sample_rows(weights: Tensor, limits: Tensor) -> Tensor:
    """[rows], int64. weights: [rows, width], float32 in [0, 1]; one of 0 is never chosen. limits: [4, rows, 1] or
    [4, rows], float64: random number, top-k (infinite: all), top-p, min-p."""
    ids = torch.empty(len(weights), dtype=torch.int64, device=weights.device)
    weights, limits = weights.contiguous(), limits.reshape(4, -1).contiguous()
    block = min(BLOCK, triton.next_power_of_2(weights.shape[1]))
    choose_in_row[(len(weights),)](weights, limits, ids, len(weights), weights.shape[1], block)
    return ids


@_kernel
def choose_in_row(
    weights,  # [rows, width], contiguous
    limits,  # [4, rows], float64
    ids,  # [rows]
    rows,
    width,
    BLOCK: tl.constexpr,
):
    row, place = tl.program_id(0), tl.arange(0, BLOCK)
    uniform, top_k = tl.load(limits + row), tl.load(limits + rows + row)
    top_p, min_p = tl.load(limits + 2 * rows + row), tl.load(limits + 3 * rows + row).to(tl.float32)
    mine = weights + row.to(tl.int64) * width
    bits, least, equals = row * 0, min_p * 0, uniform * 0  # kept: weights above `least`, and so many equal to it
    if top_k < width:
        bits = bits_of_last_kept(mine, width, top_k, bits, True, BLOCK)
        least = bits.to(tl.float32, bitcast=True)
        equals = top_k - sum_from(mine, width, least, False, True, BLOCK)
    if top_p < 1:
        limit = top_p * (sum_from(mine, width, least, False, False, BLOCK) + equals * least)
        bits = bits_of_last_kept(mine, width, limit, bits, False, BLOCK)
        of_p = bits.to(tl.float32, bitcast=True)
        missing = limit - sum_from(mine, width, of_p, False, False, BLOCK)
        needed = tl.maximum(tl.ceil(missing / tl.maximum(of_p, 1e-38)), 1.0)
        equals = tl.where(of_p > least, needed, tl.minimum(needed, equals))
        least = of_p
    equals = tl.where(min_p > least, equals * 0 + width, equals)
    least = tl.maximum(min_p, least)

    total, before, seen, last = uniform * 0, uniform * 0, uniform * 0, row * 0 - 1
    for start in range(0, width, BLOCK):
        weight = tl.load(mine + start + place, mask=start + place < width, other=0)
        kept, seen = is_kept(weight, least, equals, seen)
        total += tl.sum(tl.where(kept, weight, 0).to(tl.float64), 0)
        last = tl.maximum(last, tl.max(tl.where(kept, start + place, -1), 0))
    target, found, seen = uniform * total, row * 0 + width, uniform * 0
    for start in range(0, width, BLOCK):
        weight = tl.load(mine + start + place, mask=start + place < width, other=0)
        kept, seen = is_kept(weight, least, equals, seen)
        share = tl.where(kept, weight, 0).to(tl.float64)
        passed = kept & (before + tl.cumsum(share, 0) > target)
        found = tl.minimum(found, tl.min(tl.where(passed, start + place, width), 0))
        before += tl.sum(share, 0)
    tl.store(ids + row, tl.maximum(tl.minimum(found, last), 0).to(tl.int64))


@_kernel
def is_kept(weight, least, equals, seen):
    """Of a block of weights; seen: those equal to `least` before it. Returns also how many there are now."""
    same = (weight == least) & (weight > 0)
    rank = seen + tl.cumsum(same.to(tl.float64), 0)
    return (weight > least) | (same & (rank <= equals)), seen + tl.sum(same.to(tl.float64), 0)


@_kernel
def sum_from(mine, width, bound, INCLUSIVE: tl.constexpr, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """The sum (counted: the number) of the weights above a bound, or from it on."""
    place, total = tl.arange(0, BLOCK), bound.to(tl.float64) * 0
    for start in range(0, width, BLOCK):
        weight = tl.load(mine + start + place, mask=start + place < width, other=-1)
        if INCLUSIVE:
            taken = weight >= bound
        else:
            taken = weight > bound
        if COUNTED:
            total += tl.sum(taken.to(tl.float64), 0)
        else:
            total += tl.sum(tl.where(taken, weight, 0).to(tl.float64), 0)
    return total


@_kernel
def bits_of_last_kept(mine, width, limit, low, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """The bits of the largest value from which on the weights reach the limit. low: bits of one that does."""
    high = low * 0 + 0x3F800001  # those of 1, and one more
    for _ in range(30):
        middle = (low + high) // 2
        reached = sum_from(mine, width, middle.to(tl.float32, bitcast=True), True, COUNTED, BLOCK) >= limit
        low, high = tl.where(reached, middle, low), tl.where(reached, high, middle)
    return low
