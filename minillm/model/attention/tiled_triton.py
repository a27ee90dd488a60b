"""`model.attention.tiled` as Triton kernels: forward, and backward without atomic additions (Dao 2023, §3.1 and §3.2).

    forward      one program per (tile of queries, head)       loops over the keys; keeps output and log-sum-exp
    backward     one program per (tile of keys, kv head)       loops over the queries that see them: dK, dV
                 one program per (tile of queries, head)       loops over the keys that they see: dQ

Two passes over the scores in backward, each of which owns what it writes: dK and dV of a kv head are summed in its
program over all of its query heads, so results do not depend on the order of programs. Positions and documents come as
arrays, as a sequence that is cut over ranks needs: a tile that no query of it may see is left out by comparing the
smallest and largest position of both. On the CPU only in Triton's interpreter: set TRITON_INTERPRET=1 before Python
starts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from minillm.model.attention.tiled import row_products
from minillm.model.kernels import TILE_BYTES, UNLIMITED, check_kernel, factors, kernel, tl, triton

_kernel = kernel("window", "queries", "keys")


def tiled_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layer: int = 0,
    positions: Tensor | None = None,
    window: int | None = None,
    key_positions: Tensor | None = None,
    segments: Tensor | None = None,
    key_segments: Tensor | None = None,
) -> Tensor:
    """As `tiled.tiled`, with gradients. q: [batch, heads, queries, head_dim]; k, v: [batch, kv_heads, keys, head_dim].

    positions, key_positions: [seq] or [batch, seq]; segments, key_segments: [batch, seq]. ValueError without triton,
    off the GPU without its interpreter, for other dtypes than `kernels.DTYPES` and shapes that do not fit each other.
    """
    return tiled_triton_with_lse(
        q,
        k,
        v,
        positions=positions,
        window=window,
        key_positions=key_positions,
        segments=segments,
        key_segments=key_segments,
    )[0]


def tiled_triton_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    positions: Tensor | None = None,
    window: int | None = None,
    key_positions: Tensor | None = None,
    segments: Tensor | None = None,
    key_segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(output, lse) as `tiled.tiled_with_lse`; lse: [batch, heads, queries], float32, without a gradient."""
    _check(q, k, v)
    positions = torch.arange(q.shape[2], device=q.device) if positions is None else positions
    key_positions = positions if key_positions is None else key_positions
    if key_positions.shape[-1] != k.shape[2]:
        raise ValueError(f"{k.shape[2]} keys but {key_positions.shape[-1]} key positions: pass key_positions.")
    if segments is not None and key_segments is None:
        if q.shape[2] != k.shape[2]:
            raise ValueError(f"{q.shape[2]} queries but {k.shape[2]} keys have segments: pass key_segments as well.")
        key_segments = segments
    places = places_of(q, positions, key_positions, segments, key_segments)
    return _TiledTriton.apply(q, k, v, places, UNLIMITED if window is None else window)


class _TiledTriton(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, places, window):
        q, k, v = (x.contiguous() for x in (q, k, v))
        out, lse = forward_kernel(q, k, v, places, window, None, q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.places, ctx.window = places, window
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, _):
        q, k, v, out, lse = ctx.saved_tensors
        delta, gradients = row_products(d_out, out).float(), [torch.empty_like(x) for x in (q, k, v)]
        backward_kernels(q, k, v, d_out, lse, delta, *gradients, ctx.places, ctx.window)
        return *gradients, None, None


# One block of keys, outside of autograd; all tensors but d_out are contiguous.


def places_of(
    q: Tensor, positions: Tensor, key_positions: Tensor, segments: Tensor | None, key_segments: Tensor | None
) -> list[Tensor]:
    """Where queries and keys stand, and in which documents, as the kernels take it: int32 [batch, seq] each."""
    if segments is None:
        segments, key_segments = torch.zeros_like(positions), torch.zeros_like(key_positions)
    return [_rows(x, q.shape[0], q.device) for x in (positions, key_positions, segments, key_segments)]


def forward_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    places: list[Tensor],
    window: int,
    before: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(output, lse). before: those over other keys, which these are added to, in place. dtype: of a new output."""
    out, lse = before or (torch.empty_like(q, dtype=dtype), q.new_empty(q.shape[:-1], dtype=torch.float32))
    (batch, heads, queries, head_dim), sizes = q.shape, _sizes(q, k)
    grid = (triton.cdiv(queries, sizes["ROWS"]), batch * heads)
    sizes["ADD"] = before is not None
    _forward[grid](q, k, v, out, lse, *places, head_dim**-0.5, window, queries, k.shape[2], heads, **sizes)
    return out, lse


def backward_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    places: list[Tensor],
    window: int,
    add_to_dq: bool = False,
) -> None:
    """Writes dk and dv, and writes dq or adds to it, each in its own dtype. lse, delta: over all keys, float32."""
    (batch, heads, queries, head_dim), keys, sizes = q.shape, k.shape[2], _sizes(q, k)
    shared = (*places, head_dim**-0.5, window, queries, keys, heads)
    given = (q, k, v, d_out.contiguous(), lse, delta)
    _backward_keys[triton.cdiv(keys, sizes["COLUMNS"]), batch * k.shape[1]](*given, dk, dv, *shared, **sizes)
    sizes["ADD"] = add_to_dq
    _backward_queries[triton.cdiv(queries, sizes["ROWS"]), batch * heads](*given, dq, *shared, **sizes)


@_kernel
def _load(x, row, size, head_dim, dim, FACTORS: tl.constexpr):
    """[rows, DIMS] of a [size, head_dim] matrix, zeros outside."""
    mask = (row < size)[:, None] & (dim < head_dim)[None, :]
    return tl.load(x + row.to(tl.int64)[:, None] * head_dim + dim[None, :], mask=mask, other=0.0).to(FACTORS)


@_kernel
def _seen(q_at, k_at, q_document, k_document, window, row, queries, column, keys):
    """[rows, columns]: which queries of a tile see which keys."""
    distance = q_at[:, None] - k_at[None, :]
    same = q_document[:, None] == k_document[None, :]
    return (distance >= 0) & (distance < window) & same & (row < queries)[:, None] & (column < keys)[None, :]


@_kernel
def _touch(q_at, k_at, row, queries, column, keys, window):
    """Whether some query of a tile may see some key of another, by the ends of both."""
    last = tl.max(tl.where(row < queries, q_at, -1))
    first = tl.min(tl.where(row < queries, q_at, 2147483647))
    key_first = tl.min(tl.where(column < keys, k_at, 2147483647))
    key_last = tl.max(tl.where(column < keys, k_at, -1))
    return (key_first <= last) & (first - key_last < window)


@_kernel
def _forward(
    q,  # [batch, heads, queries, head_dim], contiguous, as all below
    k,  # [batch, kv_heads, keys, head_dim]
    v,
    out,
    lse,  # [batch, heads, queries]
    positions,  # [batch, queries], int32
    key_positions,  # [batch, keys]
    documents,  # [batch, queries]
    key_documents,  # [batch, keys]
    scale,
    window,
    queries,
    keys,
    heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FACTORS: tl.constexpr,
    ADD: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    batch, kv_head = head // heads, head // GROUP
    row, dim = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIMS)
    q_at = tl.load(positions + batch * queries + row, mask=row < queries, other=0)
    q_document = tl.load(documents + batch * queries + row, mask=row < queries, other=0)
    some = _load(q + head * queries * HEAD_DIM, row, queries, HEAD_DIM, dim, FACTORS)
    place = (head * queries + row)[:, None] * HEAD_DIM + dim[None, :]
    inside = (row < queries)[:, None] & (dim < HEAD_DIM)[None, :]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total, values = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, DIMS), tl.float32)
    if ADD:  # the result over other keys counts as one key with that log-sum-exp as its score
        top = tl.load(lse + head * queries + row, mask=row < queries, other=float("-inf"))
        total = tl.where(top == float("-inf"), 0.0, 1.0)
        values = tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
    for start in range(0, keys, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        k_at = tl.load(key_positions + batch * keys + column, mask=column < keys, other=0)
        if _touch(q_at, k_at, row, queries, column, keys, window):
            k_document = tl.load(key_documents + batch * keys + column, mask=column < keys, other=0)
            block = _load(k + kv_head * keys * HEAD_DIM, column, keys, HEAD_DIM, dim, FACTORS)
            scores = tl.dot(some, tl.trans(block), input_precision="ieee") * scale
            seen = _seen(q_at, k_at, q_document, k_document, window, row, queries, column, keys)
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            pivot = tl.where(higher == float("-inf"), 0.0, higher)
            p, shrink = tl.exp(scores - pivot[:, None]), tl.exp(top - pivot)
            total = total * shrink + tl.sum(p, 1)
            block = _load(v + kv_head * keys * HEAD_DIM, column, keys, HEAD_DIM, dim, FACTORS)
            values = values * shrink[:, None] + tl.dot(p.to(FACTORS), block, input_precision="ieee")
            top = higher
    total = tl.where(total == 0.0, 1.0, total)  # a query that sees nothing: output 0, lse -inf
    tl.store(out + place, values / total[:, None], mask=inside)
    tl.store(lse + head * queries + row, top + tl.log(total), mask=row < queries)


@_kernel
def _probabilities(some, block, seen, own, scale):
    """exp(score - lse), 0 where a key is not seen. own: [rows], lse."""
    scores = tl.dot(some, tl.trans(block), input_precision="ieee") * scale
    return tl.where(seen, tl.exp(scores - tl.where(own == float("-inf"), 0.0, own)[:, None]), 0.0)


@_kernel
def _backward_keys(
    q,
    k,
    v,
    d_out,
    lse,
    delta,  # [batch, heads, queries]: Σ d_out · out
    dk,
    dv,
    positions,
    key_positions,
    documents,
    key_documents,
    scale,
    window,
    queries,
    keys,
    heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FACTORS: tl.constexpr,
):
    kv_head = tl.program_id(1).to(tl.int64)
    batch = kv_head // (heads // GROUP)
    column, dim = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DIMS)
    k_at = tl.load(key_positions + batch * keys + column, mask=column < keys, other=0)
    k_document = tl.load(key_documents + batch * keys + column, mask=column < keys, other=0)
    block = _load(k + kv_head * keys * HEAD_DIM, column, keys, HEAD_DIM, dim, FACTORS)
    value = _load(v + kv_head * keys * HEAD_DIM, column, keys, HEAD_DIM, dim, FACTORS)
    sum_k, sum_v = tl.zeros((COLUMNS, DIMS), tl.float32), tl.zeros((COLUMNS, DIMS), tl.float32)
    for start in range(0, queries, ROWS):
        row = start + tl.arange(0, ROWS)
        q_at = tl.load(positions + batch * queries + row, mask=row < queries, other=0)
        if _touch(q_at, k_at, row, queries, column, keys, window):
            q_document = tl.load(documents + batch * queries + row, mask=row < queries, other=0)
            seen = _seen(q_at, k_at, q_document, k_document, window, row, queries, column, keys)
            for member in range(GROUP):
                head = kv_head * GROUP + member
                some = _load(q + head * queries * HEAD_DIM, row, queries, HEAD_DIM, dim, FACTORS)
                d_rows = _load(d_out + head * queries * HEAD_DIM, row, queries, HEAD_DIM, dim, FACTORS)
                own = tl.load(lse + head * queries + row, mask=row < queries, other=0.0)
                p = _probabilities(some, block, seen, own, scale)
                sum_v += tl.dot(tl.trans(p.to(FACTORS)), d_rows, input_precision="ieee")
                dp = tl.dot(d_rows, tl.trans(value), input_precision="ieee")
                of_row = tl.load(delta + head * queries + row, mask=row < queries, other=0.0)
                ds = p * (dp - of_row[:, None]) * scale
                sum_k += tl.dot(tl.trans(ds.to(FACTORS)), some, input_precision="ieee")
    place = (kv_head * keys + column)[:, None] * HEAD_DIM + dim[None, :]
    mask = (column < keys)[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(dk + place, sum_k, mask=mask)
    tl.store(dv + place, sum_v, mask=mask)


@_kernel
def _backward_queries(
    q,
    k,
    v,
    d_out,
    lse,
    delta,
    dq,
    positions,
    key_positions,
    documents,
    key_documents,
    scale,
    window,
    queries,
    keys,
    heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FACTORS: tl.constexpr,
    ADD: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    batch, kv_head = head // heads, head // GROUP
    row, dim = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIMS)
    q_at = tl.load(positions + batch * queries + row, mask=row < queries, other=0)
    q_document = tl.load(documents + batch * queries + row, mask=row < queries, other=0)
    some = _load(q + head * queries * HEAD_DIM, row, queries, HEAD_DIM, dim, FACTORS)
    d_rows = _load(d_out + head * queries * HEAD_DIM, row, queries, HEAD_DIM, dim, FACTORS)
    own = tl.load(lse + head * queries + row, mask=row < queries, other=0.0)
    of_row = tl.load(delta + head * queries + row, mask=row < queries, other=0.0)
    place = (head * queries + row)[:, None] * HEAD_DIM + dim[None, :]
    inside = (row < queries)[:, None] & (dim < HEAD_DIM)[None, :]
    total = tl.zeros((ROWS, DIMS), tl.float32)
    if ADD:
        total = tl.load(dq + place, mask=inside, other=0.0).to(tl.float32)
    for start in range(0, keys, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        k_at = tl.load(key_positions + batch * keys + column, mask=column < keys, other=0)
        if _touch(q_at, k_at, row, queries, column, keys, window):
            k_document = tl.load(key_documents + batch * keys + column, mask=column < keys, other=0)
            seen = _seen(q_at, k_at, q_document, k_document, window, row, queries, column, keys)
            block = _load(k + kv_head * keys * HEAD_DIM, column, keys, HEAD_DIM, dim, FACTORS)
            value = _load(v + kv_head * keys * HEAD_DIM, column, keys, HEAD_DIM, dim, FACTORS)
            p = _probabilities(some, block, seen, own, scale)
            dp = tl.dot(d_rows, tl.trans(value), input_precision="ieee")
            ds = p * (dp - of_row[:, None]) * scale
            total += tl.dot(ds.to(FACTORS), block, input_precision="ieee")
    tl.store(dq + place, total, mask=inside)


def _sizes(q: Tensor, k: Tensor) -> dict:
    """Constants of the kernels: tiles of at most 64 rows, smaller ones for wide heads."""
    head_dim, group = q.shape[3], q.shape[1] // k.shape[1]
    dims = max(16, triton.next_power_of_2(head_dim))  # tl.dot takes 16 or more
    tile = min(64, max(16, TILE_BYTES // (dims * q.element_size())))
    sizes = {"GROUP": group, "HEAD_DIM": head_dim, "DIMS": dims, "ROWS": tile, "COLUMNS": tile}
    return sizes | {"FACTORS": factors(q.dtype)}


def _rows(x: Tensor, batch: int, device: torch.device) -> Tensor:
    """[seq] or [batch, seq] -> int32 [batch, seq], contiguous."""
    return x.to(device, torch.int32).expand(batch, x.shape[-1]).contiguous()


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_kernel("tiled_triton", "attention=tiled", queries=q, keys=k, values=v)
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads do not divide over {k.shape[1]} kv heads: use a multiple of them.")
