"""Exact attention in tiles: the score matrix is never stored, forward or backward (FlashAttention-2, Dao 2023).

              keys  k0  k1  k2  k3        a tile is `tile` queries × `tile` keys
    queries q0      ##                    one row of tiles at a time: scores, running maximum m and sum l,
            q1      ##  ##                output so far; a larger maximum rescales what is there (online softmax,
            q2      ##  ##  ##            Milakov and Gimelshein 2018)
            q3      ##  ##  ##  ##        tiles that no query may see are not computed

What forward keeps is the output and one number per query, the log-sum-exp m + log l. Backward computes each tile's
probabilities again from it: p = exp(score - lse). So memory grows with the length, not with its square, for about 1.25
times the multiplications of an attention that stores its scores. `merge` joins two outputs of the same queries over
different keys by the same rule, which is what lets keys come from other ranks.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from minillm.model.attention.causal import as_autocast

TILE = 128


def tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layer: int = 0,
    positions: Tensor | None = None,
    window: int | None = None,
    key_positions: Tensor | None = None,
    segments: Tensor | None = None,
    tile: int = TILE,
) -> Tensor:
    """As `attention.dense`, in tiles. q: [batch, heads, queries, head_dim]; k, v: [batch, kv_heads, keys, head_dim].

    A query that sees no key at all gets zeros. tile: queries and keys of a tile, any number from 1.
    """
    return tiled_with_lse(
        q, k, v, positions=positions, window=window, key_positions=key_positions, segments=segments, tile=tile
    )[0]


def tiled_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    positions: Tensor | Sequence[int] | None = None,
    window: int | None = None,
    key_positions: Tensor | Sequence[int] | None = None,
    segments: Tensor | None = None,
    key_segments: Tensor | None = None,
    tile: int = TILE,
) -> tuple[Tensor, Tensor]:
    """(output, lse): lse [batch, heads, queries], the log-sum-exp of each query's scores, -inf where it sees no key.

    The gradient of lse is not defined here: it is for `merge`, outside of autograd.
    """
    if tile < 1:
        raise ValueError(f"tile={tile} must be at least 1 query and key, for example {TILE}.")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads do not divide over {k.shape[1]} kv heads: use a multiple of them.")
    if segments is not None and key_segments is None and q.shape[2] != k.shape[2]:
        raise ValueError(f"{q.shape[2]} queries but {k.shape[2]} keys have segments: pass key_segments as well.")
    sight = Sight(q, k, positions, key_positions, window, segments, key_segments, tile)
    return _Tiled.apply(*as_autocast(q, k, v), sight)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two outputs of the same queries over different keys, with their log-sum-exps -> over all of these keys."""
    total = torch.logaddexp(lse, other_lse)
    reference = total.masked_fill(total == float("-inf"), 0)
    weights = [(each - reference).exp()[..., None].to(out.dtype) for each in (lse, other_lse)]
    return out * weights[0] + other * weights[1], total


class Sight:
    """Which keys a tile of queries may see: its own and earlier positions, within the window, of the same document.

    Positions and segments as in `attention.visible`. The first and last position of every tile say which tiles no query
    sees. Positions that the caller knows are best passed as ascending numbers, or None: a tensor has to be read, for
    which the host waits on a GPU.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor | Sequence[int] | None,
        key_positions: Tensor | Sequence[int] | None,
        window: int | None,
        segments: Tensor | None,
        key_segments: Tensor | None,
        tile: int,
    ) -> None:
        if positions is None:
            positions = range(q.shape[2])
        if key_positions is None:
            key_positions = positions
        self.positions, self.key_positions = _tensor(positions, q.device), _tensor(key_positions, q.device)
        if self.key_positions.shape[-1] != k.shape[2]:
            said = self.key_positions.shape[-1]
            raise ValueError(f"{k.shape[2]} keys but {said} key positions: pass key_positions.")
        self.window, self.segments = window, segments
        self.key_segments = segments if key_segments is None else key_segments
        self.rows = [slice(start, min(start + tile, q.shape[2])) for start in range(0, q.shape[2], tile)]
        self.columns = [slice(start, min(start + tile, k.shape[2])) for start in range(0, k.shape[2], tile)]
        self._row_spans = _spans(positions, self.rows)
        self._column_spans = _spans(key_positions, self.columns)

    def within(self, segments: Tensor, key_segments: Tensor) -> "Sight":
        """The same positions, with these segments."""
        found = copy.copy(self)
        found.segments, found.key_segments = segments, key_segments
        return found

    def seen(self) -> list[tuple[int, int]]:
        """(row of tiles, column of tiles) in which some position is visible, row by row."""
        return [(i, j) for i in range(len(self.rows)) for j in range(len(self.columns)) if self._touches(i, j)]

    def _touches(self, i: int, j: int) -> bool:
        (first, last), (key_first, key_last) = self._row_spans[i], self._column_spans[j]
        return key_first <= last and (self.window is None or first - key_last < self.window)

    def mask(self, i: int, j: int) -> Tensor | None:
        """[1 or batch, 1, 1, rows, columns], True where a query sees a key; None where all do."""
        (first, last), (key_first, key_last) = self._row_spans[i], self._column_spans[j]
        inside = key_last <= first and (self.window is None or last - key_first < self.window)
        if inside and self.segments is None:
            return None
        rows, columns = self.rows[i], self.columns[j]
        distance = self.positions[..., rows, None] - self.key_positions[..., None, columns]
        mask = distance >= 0
        if self.window is not None:
            mask &= distance < self.window
        if self.segments is not None:
            mask = mask & (self.segments[..., rows, None] == self.key_segments[..., None, columns])
        return mask[:, None, None] if mask.dim() == 3 else mask[None, None, None]


def _tensor(positions: Tensor | Sequence[int], device: torch.device) -> Tensor:
    if isinstance(positions, range):
        return torch.arange(positions.start, positions.stop, positions.step, device=device)
    return positions if isinstance(positions, Tensor) else torch.tensor(positions, dtype=torch.int64).to(device)


def _spans(positions: Tensor | Sequence[int], parts: list[slice]) -> list[tuple[int, int]]:
    """Smallest and largest position of each part."""
    if not isinstance(positions, Tensor):
        return [(positions[part.start], positions[part.stop - 1]) for part in parts]
    if not parts or not positions.numel():
        return [(0, -1)] * len(parts)
    ends = [torch.stack((positions[..., part].min(), positions[..., part].max())) for part in parts]
    return [(low, high) for low, high in torch.stack(ends).tolist()]


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sight):
        out, lse = forward_tiles(q, k, v, sight)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.sight = sight
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, _):
        q, k, v, out, lse = ctx.saved_tensors
        delta = row_products(d_out, out)
        return *backward_tiles(q, k, v, lse, d_out, delta, ctx.sight), None


def forward_tiles(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    """Output [batch, heads, queries, head_dim] and log-sum-exp [batch, heads, queries]."""
    groups, exact = q.shape[1] // k.shape[1], torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(q.shape)
    lse = q.new_full(q.shape[:-1], float("-inf"), dtype=exact)
    columns_of: dict[int, list[int]] = {}
    for i, j in sight.seen():
        columns_of.setdefault(i, []).append(j)
    for i, columns in columns_of.items():
        rows = sight.rows[i]
        queries = _fold(q[:, :, rows], groups)
        top = queries.new_full((*queries.shape[:-1], 1), float("-inf"), dtype=exact)
        total, values = torch.zeros_like(top), torch.zeros_like(queries, dtype=exact)
        for j in columns:
            keys = sight.columns[j]
            scores = _scores(queries, k[:, :, keys], sight.mask(i, j), groups)
            higher = torch.maximum(top, scores.amax(-1, keepdim=True))
            reference = higher.masked_fill(higher == float("-inf"), 0)  # rows that have seen nothing yet
            p = scores.sub_(reference).exp_()
            shrink = (top - reference).exp_()
            total = total * shrink + p.sum(-1, keepdim=True)
            values = values * shrink + p.to(v.dtype) @ v[:, :, keys]
            top = higher
        out[:, :, rows] = _unfold((values / total.clamp(min=torch.finfo(exact).tiny)).to(q.dtype), groups)
        lse[:, :, rows] = _unfold(top + total.log(), groups)[..., 0]
    return out, lse


def backward_tiles(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, d_out: Tensor, delta: Tensor, sight: Sight
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, tile by tile; delta: `row_products` of d_out and the output over *all* keys, as lse is.

    With P = exp(S - lse): dV = Pᵀ dO, dP = dO Vᵀ, dS = P ∘ (dP - delta), dQ = dS K, dK = dSᵀ Q (scaled).
    """
    groups, exact = q.shape[1] // k.shape[1], torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros_like(x, dtype=exact) for x in (q, k, v))
    for i, j in sight.seen():
        rows, keys = sight.rows[i], sight.columns[j]
        queries, d_rows = _fold(q[:, :, rows], groups), _fold(d_out[:, :, rows], groups)
        own = _fold(lse[:, :, rows, None], groups)
        scores = _scores(queries, k[:, :, keys], sight.mask(i, j), groups)
        p = scores.sub_(own.masked_fill(own == float("-inf"), 0)).exp_()
        dv[:, :, keys] += p.to(q.dtype).mT @ d_rows
        ds = (d_rows @ v[:, :, keys].mT).to(exact)
        ds = ds.sub_(_fold(delta[:, :, rows, None], groups)).mul_(p).mul_(q.shape[-1] ** -0.5).to(q.dtype)
        dq[:, :, rows] += _unfold(ds @ k[:, :, keys], groups)
        dk[:, :, keys] += ds.mT @ queries
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def row_products(a: Tensor, b: Tensor) -> Tensor:
    """Σ a · b over the last dimension, in at least float32: [..., head_dim] twice -> [...]."""
    exact = torch.promote_types(a.dtype, torch.float32)
    return (a.to(exact) * b.to(exact)).sum(-1)


def _scores(queries: Tensor, keys: Tensor, mask: Tensor | None, groups: int) -> Tensor:
    """queries: [batch, kv_heads, groups · rows, head_dim] -> scaled scores [..., groups · rows, columns]."""
    scores = (queries @ keys.mT).to(torch.promote_types(queries.dtype, torch.float32)).mul_(queries.shape[-1] ** -0.5)
    if mask is not None:
        scores.unflatten(2, (groups, -1)).masked_fill_(~mask, float("-inf"))
    return scores


def _fold(x: Tensor, groups: int) -> Tensor:
    """[batch, heads, rows, n] -> [batch, kv_heads, groups · rows, n]: query heads of one kv head under each other."""
    return x.unflatten(1, (-1, groups)).flatten(2, 3)


def _unfold(x: Tensor, groups: int) -> Tensor:
    return x.unflatten(2, (groups, -1)).flatten(1, 2)
