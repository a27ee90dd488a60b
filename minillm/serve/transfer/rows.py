"""Keys and values as they lie in a cache, taken out of blocks and put into blocks: numbers, or codes and scales."""

import math

import torch
from torch import Tensor

from minillm.model.paged import PagedCache


def kept_as(cache: PagedCache) -> list[tuple[torch.dtype, int]]:
    """(dtype, numbers) of a kv head in one slot: its keys (or values), and with a format their scale."""
    return [(pool.dtype, math.prod(pool.shape[5:])) for pool, _ in cache.parts]


def bytes_of_head(cache: PagedCache) -> int:
    """Of one token, in one layer: keys and values of one kv head."""
    return 2 * sum(dtype.itemsize * size for dtype, size in kept_as(cache))


def read_layer(cache: PagedCache, layer: int, slots: Tensor) -> list[Tensor]:
    """[2, slots, kv_heads, ...] for each of `kept_as`: keys, then values; copies."""
    return [pool[:, layer].flatten(1, 2).index_select(1, slots) for pool, _ in cache.parts]


def write_layer(cache: PagedCache, layer: int, slots: Tensor, heads: slice, rows: list[Tensor]) -> None:
    """rows: as of `read_layer`, of these heads."""
    for (pool, _), part in zip(cache.parts, rows, strict=True):
        pool[:, layer].flatten(1, 2)[:, slots, heads] = part


def to_bytes(rows: list[Tensor]) -> list[memoryview]:
    """Of rows on the CPU."""
    return [memoryview(part.contiguous().view(-1).view(torch.uint8).numpy()) for part in rows]


def from_bytes(cache: PagedCache, content: bytearray, tokens: int, heads: int) -> list[Tensor]:
    """What `to_bytes` was given, on the CPU."""
    rows, start = [], 0
    for (pool, _), (dtype, size) in zip(cache.parts, kept_as(cache), strict=True):
        count = 2 * tokens * heads * size
        part = torch.frombuffer(content, dtype=dtype, count=count, offset=start)
        rows.append(part.view(2, tokens, heads, *pool.shape[5:]))
        start += count * dtype.itemsize
    return rows
