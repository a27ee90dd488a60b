"""Attention as a function the model is given: softmax(q kᵀ / √head_dim + mask) v.

Everything else in a block looks at one token at a time, so this function is the one place where tokens meet, and the
one thing that changes when a sequence is spread over ranks (ring attention) or keys live in a cache (decoding, paging).
To replace it, write a callable with the signature of `AttentionFunction` and pass it to the forward pass:

    model(tokens, positions, attention=cache)
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (q, k_pool, v_pool) of a layer of a paged cache -> like q


class AttentionFunction(Protocol):
    """q: [batch, heads, seq, head_dim]; k, v: [batch, kv_heads, seq, head_dim] -> like q. Keys are already rotated.

    layer: index of the block that calls (a cache keeps keys per layer).
    positions: [seq] or [batch, seq], where the tokens stand; None = 0 .. seq - 1.
    window: see `ModelConfig.sliding_window`.
    options: soft_cap, if the model has an `attention_soft_cap`; else nothing, so a function for other models can do
    without.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, positions: Tensor | None, window: int | None, **options
    ) -> Tensor: ...


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layer: int = 0,
    positions: Tensor | None = None,
    window: int | None = None,
    key_positions: Tensor | None = None,
    segments: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Causal attention by torch's fused kernel: the score matrix is never stored. The default.

    key_positions: positions of k and v when they are not those of q. segments: [batch, seq], which packed document a
    token belongs to; tokens see their own document only (`functools.partial(sdpa, segments=...)`).
    soft_cap: as in `dense`, which then does the work: the fused kernel has none.
    """
    if soft_cap is not None:
        place = {"positions": positions, "key_positions": key_positions, "segments": segments}
        return dense(q, k, v, layer=layer, window=window, soft_cap=soft_cap, **place)
    grouped = q.shape[1] != k.shape[1]
    seq = q.shape[2]
    if positions is None and key_positions is None and segments is None and (window is None or window >= seq):
        return F.scaled_dot_product_attention(q, k, v, is_causal=seq > 1, enable_gqa=grouped)
    mask = visible(positions, key_positions, q, k, window=window, segments=segments)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def as_autocast(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Under `torch.autocast` all in its dtype, as torch's fused kernel takes them: RoPE leaves queries and keys in
    float32 there, beside values in 16 bits. Of float64, or without autocast, as they are."""
    kind = inputs[0].device.type
    if not torch.is_autocast_enabled(kind):
        return inputs
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in inputs)


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layer: int = 0,
    positions: Tensor | None = None,
    window: int | None = None,
    key_positions: Tensor | None = None,
    segments: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """The same by two matrix products, [batch, heads, seq, seq] scores in memory: the one to read and to count.

    soft_cap: scores become soft_cap · tanh(scores / soft_cap) (Gemma 2, https://arxiv.org/abs/2408.00118, §2).
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    mask = visible(positions, key_positions, q, k, window=window, segments=segments)
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1) @ v


def visible(
    positions: Tensor | None,
    key_positions: Tensor | None,
    q: Tensor,
    k: Tensor,
    *,
    window: int | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """Which keys a query may see: its own and earlier ones, within the window, of its own document.

    Positions as in `AttentionFunction`; without key_positions the keys stand where the queries stand.
    Returns a boolean mask [1 or batch, 1, queries, keys].
    """
    if positions is None:
        positions = torch.arange(q.shape[2], device=q.device)
    if key_positions is None:
        key_positions = positions
    if k.shape[2] != key_positions.shape[-1]:
        raise ValueError(f"{k.shape[2]} keys but {key_positions.shape[-1]} key positions: pass key_positions.")
    distance = positions[..., :, None] - key_positions[..., None, :]
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    if segments is not None:
        mask = mask & (segments[..., :, None] == segments[..., None, :])
    return mask[:, None] if mask.dim() == 3 else mask[None, None]
