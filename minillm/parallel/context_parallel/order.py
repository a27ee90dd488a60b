"""Which positions of a sequence a rank holds.

    16 positions, 4 ranks      rank 0        rank 1        rank 2        rank 3
    contiguous                 0  1  2  3    4  5  6  7    8  9 10 11   12 13 14 15
    zigzag                     0  1 14 15    2  3 12 13    4  5 10 11    6  7  8  9

Under a causal mask the query at position p sees p + 1 keys. Contiguous parts give rank r (2r + 1) / N² of all pairs, so
the last rank computes 2N - 1 times as much as the first, and all others wait for it. In zigzag order each rank has one
early and one late part of 2N parts, and all ranks the same number of pairs.
"""

import functools

import torch
from torch import Tensor

from minillm.comm import Group
from minillm.model.attention import as_autocast

ORDERS = ("contiguous", "zigzag")


def local_positions(seq: int, rank: int, world_size: int, order: str = "zigzag") -> Tensor:
    """[seq / world_size] positions of a rank, ascending. ValueError: seq does not divide (zigzag: over 2 · ranks)."""
    return torch.tensor(local_numbers(seq, rank, world_size, order), dtype=torch.int64)


@functools.lru_cache(64)
def local_numbers(seq: int, rank: int, world_size: int, order: str = "zigzag") -> tuple[int, ...]:
    """`local_positions` as Python numbers, known to the host whatever device tensors are on."""
    if order not in ORDERS:
        raise ValueError(f"order={order!r} must be one of {', '.join(ORDERS)}.")
    parts = world_size if order == "contiguous" or world_size == 1 else 2 * world_size
    if seq % parts:
        raise ValueError(
            f"a sequence of {seq} positions does not divide into {parts} parts for {world_size} ranks in {order} "
            f"order: pad it to {-(-seq // parts) * parts}."
        )
    size, chosen = seq // parts, [rank] if parts == world_size else [rank, parts - 1 - rank]
    return tuple(place for piece in chosen for place in range(piece * size, (piece + 1) * size))


class ContextAttention:
    """What the attention functions of a cut sequence share: which positions this rank holds, and checks of them.

    group: the ranks that the sequence is cut over, in `order`. segments: [batch, seq], the whole sequence's documents,
    the same on every rank; None: one document. They can also be given with a call, as for `attention.dense`.
    """

    group: Group
    order: str
    segments: Tensor | None

    def __init__(self, group: Group, order: str, segments: Tensor | None) -> None:
        self.group, self.order, self.segments = group, order, segments
        self._positions: dict[tuple[int, torch.device], Tensor] = {}
        self._places: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layer: int = 0,
        positions: Tensor | None = None,
        window: int | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """q, k, v: [batch, heads or kv_heads, seq / world_size, head_dim], of this rank's positions. positions: checked
        for their number only: which rank holds what follows from `order`."""
        self.check_positions(q, positions)
        segments = self.documents(segments, self.world_size * q.shape[2])
        return self.attend(*as_autocast(q, k, v), layer, window, segments)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, window: int | None, segments: Tensor | None
    ) -> Tensor:
        """What a variant does with them. segments: of the whole sequence."""
        raise NotImplementedError

    def positions_on(self, seq: int, device: torch.device) -> Tensor:
        """`positions`, worked out and copied to the device once: the copy would hold up the host in every layer."""
        key = seq, torch.device(device)
        if key not in self._positions:
            self._positions[key] = self.positions(seq).to(device)
        return self._positions[key]

    def places_on(self, seq: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where the group's parts of a sequence, one after the other, lie in it; and the inverse. Copied once, too."""
        key, n = (seq, device), self.group.world_size
        if key not in self._places:
            places = torch.cat([local_positions(seq, rank, n, self.order) for rank in range(n)])
            self._places[key] = places.to(device), places.argsort().to(device)
        return self._places[key]

    @property
    def world_size(self) -> int:
        """Ranks that hold a part of a sequence."""
        return self.group.world_size

    def sum(self, x: Tensor) -> Tensor:
        """Sums x, in place, over the ranks that hold the other parts of the same sequences."""
        return self.group.all_reduce(x)

    def whole(self, x: Tensor) -> Tensor:
        """x: [batch, part, ...] of this rank -> [batch, seq, ...] of all ranks, without a gradient."""
        seq = x.shape[1] * self.world_size
        found = x.new_zeros(len(x), seq, *x.shape[2:])
        return self.sum(found.index_copy_(1, self.positions_on(seq, x.device), x))

    def own(self, x: Tensor) -> Tensor:
        """x: [batch, seq, ...] -> [batch, part, ...], at the positions of this rank."""
        return x.index_select(1, self.positions_on(x.shape[1], x.device))

    def positions(self, seq: int) -> Tensor:
        """[seq / world_size] positions of a sequence of `seq` that this rank holds, in the order in which it does."""
        return local_positions(seq, self.group.rank, self.group.world_size, self.order)

    def check_positions(self, q: Tensor, positions: Tensor | None) -> None:
        """ValueError unless there is a position for every query: RoPE has turned the keys by them."""
        if positions is None and self.world_size > 1:
            raise ValueError(
                f"positions None would turn this rank's {q.shape[2]} queries as if they began the sequence: pass the "
                "positions that this rank holds (attention.positions(seq)) to the model and to its attention."
            )
        if positions is not None and positions.shape[-1] != q.shape[2]:
            raise ValueError(f"{q.shape[2]} queries but {positions.shape[-1]} positions: pass this rank's positions.")

    def documents(self, segments: Tensor | None, seq: int) -> Tensor | None:
        """[batch, seq] documents of the whole sequence, of which padding at its end belongs to the last."""
        segments = self.segments if segments is None else segments
        if segments is None or segments.shape[-1] == seq:
            return segments
        if not seq < segments.shape[-1] * self.world_size <= seq * self.world_size:
            raise ValueError(
                f"segments of {segments.shape[-1]} positions for a sequence of {seq}: pass those of the whole sequence "
                "to every rank, not of its own part."
            )
        return segments[..., torch.arange(seq, device=segments.device).clamp(max=segments.shape[-1] - 1)]
