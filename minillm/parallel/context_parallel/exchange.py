"""Attention over a cut sequence by one exchange before and one after it.

    Ulysses    [heads, seq / N] ── all-to-all ──▶ [heads / N, seq], ordinary attention, and back: bytes fall with N
    gather     all keys and values on every rank by one all-gather, queries stay: more bytes, but for any mask
    hybrid     Ulysses in a node, a ring across nodes: UlyssesAttention(node, inside=RingAttention(across))

Jacobs et al. 2023 (DeepSpeed Ulysses); Llama Team 2024, §3.3.2 (all-gather); Fang and Zhao 2024 (hybrid).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from minillm.comm import Group
from minillm.model.attention import sdpa
from minillm.model.attention.tiled import TILE, tiled, tiled_with_lse
from minillm.model.attention.tiled_triton import tiled_triton, tiled_triton_with_lse
from minillm.model.kernels import has_kernel
from minillm.parallel.context_parallel.order import ContextAttention, local_numbers, local_positions


class UlyssesAttention(ContextAttention):
    """An attention function for this rank's positions, a contiguous part; between the exchanges `inside` sees the whole
    sequence of the group with heads / world_size heads. kv heads that do not suffice are repeated.

    inside: attention over what the group holds: `tiled` by default, or a `RingAttention` over other groups.
    """

    def __init__(
        self,
        group: Group,
        *,
        inside: Callable[..., Tensor] | None = None,
        tile: int = TILE,
        segments: Tensor | None = None,
    ) -> None:
        super().__init__(group, "contiguous", segments)
        self.inside, self.tile = inside, tile

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, window: int | None, segments: Tensor | None
    ) -> Tensor:
        n, heads, kv_heads = self.group.world_size, q.shape[1], k.shape[1]
        check_ulysses(heads, kv_heads, n)
        if kv_heads % n:
            k, v = (x.repeat_interleave(n // kv_heads, dim=1) for x in (k, v))
        q, k, v = (_Exchange.apply(x, self.group, _to_heads, _to_sequence) for x in (q, k, v))
        how = {"window": window, "segments": segments}
        if self.inside is None:
            out = whole_attention(q, k, v, **how, tile=self.tile)
        elif isinstance(self.inside, ContextAttention):
            of_group = self.inside.positions_on(q.shape[2] * self._outside, q.device)
            out = self.inside(q, k, v, layer=layer, positions=of_group, **how)
        else:
            out = self.inside(q, k, v, layer=layer, positions=None, **how)
        return _Exchange.apply(out, self.group, _to_sequence, _to_heads)

    @property
    def _outside(self) -> int:
        """Groups such as this one among which `inside` has cut the sequence."""
        return self.inside.world_size if isinstance(self.inside, ContextAttention) else 1

    @property
    def world_size(self) -> int:
        return self.group.world_size * self._outside

    def sum(self, x: Tensor) -> Tensor:
        x = super().sum(x)
        return self.inside.sum(x) if isinstance(self.inside, ContextAttention) else x

    def positions(self, seq: int) -> Tensor:
        of_group = self.inside.positions(seq) if isinstance(self.inside, ContextAttention) else torch.arange(seq)
        return of_group[local_positions(len(of_group), self.group.rank, self.group.world_size, self.order)]


class GatherAttention(ContextAttention):
    """An attention function for this rank's positions: K and V of all ranks are gathered, their gradients reduced."""

    def __init__(self, group: Group, *, tile: int = TILE, segments: Tensor | None = None) -> None:
        super().__init__(group, "zigzag", segments)
        self.tile = tile

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, window: int | None, segments: Tensor | None
    ) -> Tensor:
        n, seq = self.group.world_size, self.group.world_size * q.shape[2]
        places = self.places_on(seq, q.device)
        keys, values = _GatherSequence.apply(torch.stack((k, v)), self.group, places)
        mine = places[0].view(n, -1)[self.group.rank]
        of_mine = None if segments is None else segments[..., mine]
        if has_kernel(q):
            documents = {"segments": of_mine, "key_segments": segments}
            everywhere = torch.arange(seq, device=q.device)
            how = {"positions": mine, "key_positions": everywhere, "window": window} | documents
            return tiled_triton_with_lse(q, keys, values, **how)[0]
        return tiled_with_lse(
            q,
            keys,
            values,
            positions=local_numbers(seq, self.group.rank, n, self.order),
            key_positions=range(seq),
            window=window,
            segments=of_mine,
            key_segments=segments,
            tile=self.tile,
        )[0]


def whole_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None, segments: Tensor | None, tile: int
) -> Tensor:
    """Of a whole sequence: torch's fused kernel where it needs no mask, else the tiles, on a GPU as a kernel."""
    if not has_kernel(q):
        return tiled(q, k, v, window=window, segments=segments, tile=tile)
    if window is None and segments is None:
        return sdpa(q, k, v)
    return tiled_triton(q, k, v, window=window, segments=segments)


def check_ulysses(heads: int, kv_heads: int, world_size: int) -> None:
    """ValueError unless so many ranks can exchange heads for sequence."""
    if heads % world_size:
        raise ValueError(
            f"{heads} heads do not divide over {world_size} ranks of Ulysses attention: use a number of ranks that "
            "divides them, or ring attention."
        )
    if kv_heads % world_size and world_size % kv_heads:
        raise ValueError(
            f"{kv_heads} kv heads neither divide over {world_size} ranks of Ulysses attention nor the ranks over them: "
            "use a number of ranks that divides them or is a multiple of them, or ring attention."
        )


def _to_heads(x: Tensor, group: Group) -> Tensor:
    """[batch, heads, seq / n, d] -> [batch, heads / n, seq, d]."""
    parts = x.unflatten(1, (group.world_size, -1)).movedim(1, 0).contiguous()  # [n, batch, heads / n, seq / n, d]
    return group.all_to_all(parts).movedim(0, 2).flatten(2, 3)


def _to_sequence(x: Tensor, group: Group) -> Tensor:
    """[batch, heads / n, seq, d] -> [batch, heads, seq / n, d]."""
    parts = x.unflatten(2, (group.world_size, -1)).movedim(2, 0).contiguous()
    return group.all_to_all(parts).movedim(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """there, back: `_to_heads` and `_to_sequence`, or the other way round; backward goes back."""

    @staticmethod
    def forward(ctx, x, group, there, back):
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return ctx.back(dy, ctx.group), None, None, None


class _GatherSequence(torch.autograd.Function):
    """x: [2, batch, kv_heads, seq / n, d] -> [2, batch, kv_heads, seq, d]; backward sums over the ranks."""

    @staticmethod
    def forward(ctx, x, group, places):
        ctx.group, ctx.places = group, places
        rows = group.all_gather(x[None].contiguous())  # [n, 2, batch, kv_heads, seq / n, d]
        return rows.movedim(0, 3).flatten(3, 4).index_select(3, places[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        rows = dy.index_select(3, ctx.places[0]).unflatten(3, (ctx.group.world_size, -1)).movedim(3, 0).contiguous()
        return ctx.group.reduce_scatter(rows)[0], None, None
