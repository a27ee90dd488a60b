"""Paged attention one block after the other: what a kernel does, to read and to test. Slow."""

import math

import torch
from torch import Tensor

from minillm.model.paged.quantized import read_rows


def block_by_block(
    q, k_pool, v_pool, block_table, query_lens, context_lens, *, window: int | None, soft_cap: float | None = None
) -> Tensor:
    """A `Backend` with a running maximum and sum.

    Softmax over blocks (Milakov & Gimelshein 2018): when a block raises the maximum from m to m', what was summed so
    far is multiplied by exp(m - m').
    """
    parts = zip(q.split(list(query_lens)), block_table, context_lens, strict=True)
    return torch.cat([_one_sequence(x, k_pool, v_pool, *sizes, window, soft_cap) for x, *sizes in parts])


def _one_sequence(q, k_pool, v_pool, table: Tensor, context: int, window: int | None, soft_cap: float | None):
    queries, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_pool.shape
    group = heads // kv_heads
    rows = q.view(queries, kv_heads, group, head_dim).permute(1, 2, 0, 3).to(wide(q)) / math.sqrt(head_dim)
    largest = rows.new_full((kv_heads, group, queries, 1), float("-inf"))
    total, weighted = torch.zeros_like(largest), torch.zeros_like(rows)
    first = 0 if window is None else max(0, context - queries - window + 1)  # what no query sees may be gone
    for index in range(first // block_size, -(-context // block_size)):
        start, end = index * block_size, min((index + 1) * block_size, context)
        mask = reachable(context - queries, queries, start, end, window, q.device)
        slots = table[index] * block_size + torch.arange(end - start, device=q.device)
        keys, values = (read_rows(pool, slots, rows.dtype) for pool in (k_pool, v_pool))
        scores = torch.einsum("hgqd,khd->hgqk", rows, keys)
        scores = scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(~mask, float("-inf"))
        higher = torch.maximum(largest, scores.amax(-1, keepdim=True))
        pivot = higher.masked_fill(higher.isinf(), 0)  # nothing seen yet: exp(-inf - 0) = 0, not nan
        weights, shrink = (scores - pivot).exp(), (largest - pivot).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        weighted = weighted * shrink + torch.einsum("hgqk,khd->hgqd", weights, values)
        largest = higher
    return (weighted / total).permute(2, 0, 1, 3).reshape(queries, heads, head_dim).to(q.dtype)


def reachable(first: int, queries: int, start: int, end: int, window: int | None, device) -> Tensor:
    """[queries, end - start]: may the query at first + i see the key at start + j?"""
    distance = torch.arange(first, first + queries, device=device)[:, None] - torch.arange(start, end, device=device)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)
