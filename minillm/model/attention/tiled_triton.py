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

from minillm.model.attention import tiled_kernels
from minillm.model.attention.causal import as_autocast
from minillm.model.attention.tiled import row_products
from minillm.model.kernels import TILE_BYTES, UNLIMITED, check_kernel, factors, triton


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
    q, k, v = as_autocast(q, k, v)
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
    tiled_kernels.forward[grid](q, k, v, out, lse, *places, head_dim**-0.5, window, queries, k.shape[2], heads, **sizes)
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
    tiled_kernels.backward_keys[triton.cdiv(keys, sizes["COLUMNS"]), batch * k.shape[1]](
        *given, dk, dv, *shared, **sizes
    )
    sizes["ADD"] = add_to_dq
    tiled_kernels.backward_queries[triton.cdiv(queries, sizes["ROWS"]), batch * heads](*given, dq, *shared, **sizes)


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
