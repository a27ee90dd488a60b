"""Which positions of a sequence a rank holds.

    16 positions, 4 ranks      rank 0        rank 1        rank 2        rank 3
    contiguous                 0  1  2  3    4  5  6  7    8  9 10 11   12 13 14 15
    zigzag                     0  1 14 15    2  3 12 13    4  5 10 11    6  7  8  9

Under a causal mask the query at position p sees p + 1 keys. Contiguous parts give rank r (2r + 1) / N² of all pairs, so
the last rank computes 2N - 1 times as much as the first, and everybody waits for it. In zigzag order each rank has one
early and one late part of 2N parts, and all ranks the same number of pairs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

ORDERS = ("contiguous", "zigzag")


def local_positions(seq: int, rank: int, world_size: int, order: str = "zigzag") -> Tensor:
    """[seq / world_size] positions of a rank, ascending. ValueError: seq does not divide (zigzag: over 2 · ranks)."""
    if order not in ORDERS:
        raise ValueError(f"order={order!r} must be one of {', '.join(ORDERS)}.")
    parts = world_size if order == "contiguous" or world_size == 1 else 2 * world_size
    if seq % parts:
        raise ValueError(
            f"a sequence of {seq} positions does not divide into {parts} parts for {world_size} ranks in {order} "
            f"order: pad it to {-(-seq // parts) * parts}."
        )
    pieces = torch.arange(seq).view(parts, -1)
    chosen = [rank] if parts == world_size else [rank, parts - 1 - rank]
    return pieces[chosen].flatten()


def cut_sequence(x: Tensor, rank: int, world_size: int, order: str = "zigzag", dim: int = 1) -> Tensor:
    """This rank's positions of x along `dim`."""
    return x.index_select(dim, local_positions(x.shape[dim], rank, world_size, order).to(x.device))


def join_sequence(parts: Sequence[Tensor], order: str = "zigzag", dim: int = 1) -> Tensor:
    """The ranks' parts, in rank order -> the whole sequence."""
    seq = sum(part.shape[dim] for part in parts)
    places = torch.cat([local_positions(seq, rank, len(parts), order) for rank in range(len(parts))])
    return torch.cat(list(parts), dim).index_select(dim, places.argsort().to(parts[0].device))
