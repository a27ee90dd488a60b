"""Attention over keys and values that lie in blocks anywhere in memory (Kwon et al. 2023, PagedAttention, §4.1).

sequence     t0 t1 t2 t3 │ t4 t5 t6 t7 │ t8            block_size 4, the ninth token is new
block table      7       │      2      │  5            logical block i of the sequence lies in block_table[i]
k_pool       block 0 … │2: t4 t5 t6 t7│ … │5: t8 · · ·│ … │7: t0 t1 t2 t3│ …

The tokens of all sequences of a step stand one after the other in one flat row, whether a sequence brings one
(decode) or many (a piece of its prompt): `model(tokens[None], positions, attention=cache.batch(...))`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.model.attention import Attend
from minillm.model.config import ModelConfig

GROUP_BYTES, GPU_GROUP_BYTES = 1 << 20, 1 << 28  # keys and values that are gathered together, of several sequences


class Backend(Protocol):
    """Attention of a whole batch, its shapes as in `paged_attention`, which has checked them.

    What is the same in all layers can be done once a pass: a backend with a method
    `prepare(q, k_pool, block_table, query_lens, context_lens, *, window) -> Attend` is asked for that instead.
    soft_cap (see `dense`) is only handed over if the model has one.
    """

    def __call__(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        block_table: Tensor,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        *,
        window: int | None,
        soft_cap: float | None = None,
    ) -> Tensor: ...


class Gathered:
    """Copies the keys and values of like sequences together and leaves the rest to torch's fused kernel. The default.

    Sequences with equally many queries stand in order of length, cut into groups whose keys stay in a core's cache
    between copy and product: few calls, little padding. All are aligned at their last key; where a shorter one has no
    key, its first is read and masked.
    """

    def __call__(self, q, k_pool, v_pool, block_table, query_lens, context_lens, **options) -> Tensor:
        return self.prepare(q, k_pool, block_table, query_lens, context_lens, **options)(q, k_pool, v_pool)

    def prepare(
        self, q, k_pool, block_table, query_lens, context_lens, *, window: int | None, soft_cap: float | None = None
    ) -> Attend:
        device, block_size = k_pool.device, k_pool.shape[1]
        slot_bytes = 2 * k_pool[0, 0].numel() * k_pool.element_size()
        room = (GROUP_BYTES if device.type == "cpu" else GPU_GROUP_BYTES) // slot_bytes
        counts = zip(query_lens, context_lens, strict=True)
        seen = [keys if window is None else min(keys, queries + window - 1) for queries, keys in counts]
        order = sorted(range(len(seen)), key=lambda s: (query_lens[s], seen[s]))
        first = list(accumulate(query_lens, initial=0))
        rows = torch.tensor([row for s in order for row in range(first[s], first[s + 1])], device=device)
        back = rows.argsort()

        last = torch.tensor([context_lens[s] for s in order], device=device)
        places = last[:, None] - torch.arange(max(seen), 0, -1, device=device)  # [sequences, keys], negative: none
        absent = torch.zeros(places.shape, dtype=q.dtype, device=device).masked_fill_(places < 0, float("-inf"))
        places.clamp_(min=0)
        slots = block_table[order].gather(1, places // block_size) * block_size + places % block_size

        groups, start = [], 0
        for end in range(1, len(order) + 1):
            queries, keys = query_lens[order[start]], seen[order[end - 1]]
            following = order[end] if end < len(order) else None
            if following is None or query_lens[following] != queries or (end - start + 1) * seen[following] > room:
                mask = None if seen[order[start]] == keys else absent[start:end, None, None, -keys:]
                if queries > 1:
                    visible = _visible(keys - queries, queries, 0, keys, window, device)
                    mask = absent[start:end, None, None, -keys:].masked_fill(~visible, float("-inf"))
                    mask = mask.repeat(1, 1, q.shape[1] // k_pool.shape[2], 1)
                groups.append(_Group(end - start, queries, slots[start:end, -keys:].flatten(), mask, soft_cap))
                start = end

        def attend(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
            if len(order) == 1:
                return groups[0](q, k_pool, v_pool)
            parts = q.index_select(0, rows).split([group.sequences * group.queries for group in groups])
            ys = [group(part, k_pool, v_pool) for group, part in zip(groups, parts, strict=True)]
            return torch.cat(ys).index_select(0, back)

        return attend


@dataclass(frozen=True)
class _Group:
    """Sequences with equally many queries and, after padding, keys. slots: theirs, one sequence after the other.

    The query heads of one kv head become rows of one matrix, so that each key is read once and none is repeated.
    mask: [sequences, 1, rows or 1, keys], added to the scores.
    """

    sequences: int
    queries: int
    slots: Tensor
    mask: Tensor | None
    soft_cap: float | None = None

    def __call__(self, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        _, _, kv_heads, head_dim = k_pool.shape
        keys, values = (
            pool.view(-1, kv_heads * head_dim)
            .index_select(0, self.slots)
            .view(self.sequences, -1, kv_heads, head_dim)
            .transpose(1, 2)
            for pool in (k_pool, v_pool)
        )
        rows = q.view(self.sequences, self.queries, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        if self.soft_cap is None:
            y = F.scaled_dot_product_attention(rows.flatten(2, 3), keys, values, attn_mask=self.mask)
        else:  # which the fused kernel does not know
            scores = (rows.flatten(2, 3) @ keys.mT).to(_wide(q)) / math.sqrt(head_dim)
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
            scores = scores if self.mask is None else scores + self.mask
            y = torch.softmax(scores, dim=-1).to(q.dtype) @ values
        return y.view(rows.shape).permute(0, 3, 1, 2, 4).reshape(q.shape)


gathered = Gathered()


def block_by_block(
    q, k_pool, v_pool, block_table, query_lens, context_lens, *, window: int | None, soft_cap: float | None = None
) -> Tensor:
    """One block after the other with a running maximum and sum: what a kernel does, to read and to test.

    Softmax over blocks (Milakov & Gimelshein 2018): when a block raises the maximum from m to m', what was summed so
    far is multiplied by exp(m - m').
    """
    parts = zip(q.split(list(query_lens)), block_table, context_lens, strict=True)
    return torch.cat([_block_by_block(x, k_pool, v_pool, *sizes, window, soft_cap) for x, *sizes in parts])


def _block_by_block(q, k_pool, v_pool, table: Tensor, context: int, window: int | None, soft_cap: float | None):
    queries, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_pool.shape
    group = heads // kv_heads
    rows = q.view(queries, kv_heads, group, head_dim).permute(1, 2, 0, 3).to(_wide(q)) / math.sqrt(head_dim)
    largest = rows.new_full((kv_heads, group, queries, 1), float("-inf"))
    total, weighted = torch.zeros_like(largest), torch.zeros_like(rows)
    for index in range(-(-context // block_size)):
        start, end = index * block_size, min((index + 1) * block_size, context)
        mask = _visible(context - queries, queries, start, end, window, q.device)
        keys, values = (pool[table[index], : end - start].to(rows.dtype) for pool in (k_pool, v_pool))
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


def default_backend(device: torch.device, dtype: torch.dtype = torch.float32) -> Backend:
    """On a CUDA GPU the Triton kernel, where triton is installed and the kernel takes this dtype; else `gathered`."""
    if torch.device(device).type == "cuda" and find_spec("triton") is not None:
        from minillm.model.paged_triton import DTYPES, triton_split_kv

        if dtype in DTYPES:
            return triton_split_kv
    return gathered


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    window: int | None = None,
    backend: Backend = gathered,
    **options,
) -> Tensor:
    """Causal attention of several sequences, each over its own blocks.

    q: [tokens, heads, head_dim], the sequences' queries one after the other, query_lens[s] of them.
    k_pool, v_pool: [num_blocks, block_size, kv_heads, head_dim]. block_table: [sequences, blocks], rows padded at will.
    context_lens: keys of each sequence, those of its queries among them: the queries are its last tokens.
    window: see `ModelConfig.sliding_window`. options: soft_cap, see `dense`. Returns [tokens, heads, head_dim].
    """
    sizes = (block_table, query_lens, context_lens)
    return _prepared(backend, q, k_pool, *sizes, window=window, **options)(q, k_pool, v_pool)


def _prepared(backend, q, k_pool, block_table, query_lens, context_lens, **options) -> Attend:
    """What the backend does in each layer of a pass. ValueError for lengths that do not fit."""
    if sum(query_lens) != q.shape[0] or not len(query_lens) == len(context_lens) == len(block_table):
        raise ValueError(
            f"{q.shape[0]} queries, query_lens {list(query_lens)}, {len(context_lens)} context_lens and "
            f"{len(block_table)} block tables: give one of each per sequence, and lengths that sum to the queries."
        )
    room = block_table.shape[1] * k_pool.shape[1]
    for length, context in zip(query_lens, context_lens, strict=True):
        if not 1 <= length <= context <= room:
            raise ValueError(
                f"a sequence of {length} queries and {context} keys in {room} slots: queries are at least 1, at most "
                "the keys, and the keys fit the block table."
            )
    if hasattr(backend, "prepare"):
        return backend.prepare(q, k_pool, block_table, query_lens, context_lens, **options)
    return lambda q, k, v: backend(q, k, v, block_table, query_lens, context_lens, **options)


class PagedCache:
    """Keys and values of all layers in blocks, on the device and, for sequences that were put aside, on the host.

    2 · layers · block_size · kv_heads · head_dim numbers a block. Which block belongs to whom is decided elsewhere.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        device=None,
        dtype: torch.dtype | None = None,
    ):
        shape = (2, config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.block_size = block_size
        self.pool = torch.zeros(shape, device=device, dtype=dtype)
        pinned = self.pool.is_cuda
        host_shape = (num_host_blocks, *shape[:2], *shape[3:])  # a block in one piece, for one copy
        self.host = torch.zeros(host_shape, dtype=dtype, device="cpu", pin_memory=pinned)

    def copy(self, source: int, target: int) -> None:
        self.pool[:, :, target] = self.pool[:, :, source]

    def to_host(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """The host does not wait: whatever reads `host` or writes these blocks later is queued behind on the device."""
        for block, slot in zip(blocks, slots, strict=True):
            self.host[slot].copy_(self.pool[:, :, block], non_blocking=True)

    def from_host(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        for slot, block in zip(slots, blocks, strict=True):
            self.pool[:, :, block].copy_(self.host[slot], non_blocking=True)

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Arrays of whole numbers as tensors on the device, in one copy that the host does not wait for."""
        if self.pool.device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
        flat = (flat.pin_memory() if self.pool.is_cuda else flat).to(self.pool.device, non_blocking=True)
        parts = flat.split([array.size for array in arrays])
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]

    def batch(
        self, tables: Sequence[Sequence[int]], starts: Sequence[int], query_lens: Sequence[int], backend=gathered
    ) -> "PagedBatch":
        """The attention function of one forward pass: sequence s brings the query_lens[s] tokens from starts[s] on."""
        table = np.zeros((len(tables), max(map(len, tables))), np.int64)
        for row, blocks in zip(table, tables, strict=True):
            row[: len(blocks)] = blocks
        return PagedBatch(self, table, starts, query_lens, backend)


class PagedBatch:
    """An `AttentionFunction` for a flat batch: writes its keys and values into their blocks, then attends.

    All of a layer's keys are written before any is read, so a sequence may share a block that another sequence of the
    same pass fills. table: [sequences, blocks], a row for each, padded at will. positions: [tokens], to hand to the
    model. more: arrays of whole numbers that go to the device in the same copy, and then what they are there.
    """

    def __init__(
        self,
        cache: PagedCache,
        table: np.ndarray,
        starts: Sequence[int],
        query_lens: Sequence[int],
        backend: Backend,
        more: Sequence[np.ndarray] = (),
    ):
        size = cache.block_size
        self.cache, self.backend, self.query_lens = cache, backend, list(query_lens)
        self._attend: dict[tuple, Attend] = {}  # by window and soft cap
        self.context_lens = [start + length for start, length in zip(starts, query_lens, strict=True)]
        lengths, ends = np.array(self.query_lens), np.array(self.context_lens)
        stops = lengths.cumsum()
        rows = np.arange(len(lengths)).repeat(lengths)  # of the table, for each token
        positions = np.arange(len(rows)) + (ends - stops)[rows]
        slots = table[rows, positions // size] * size + positions % size
        on_device = cache.upload((table, slots, positions, stops - 1, *more))
        self.block_table, self.slot_mapping, self.positions, self.last_rows, *self.more = on_device

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, positions: Tensor | None, window: int | None, **options
    ) -> Tensor:
        k_pool, v_pool = self.cache.pool[:, layer]
        k_pool.flatten(0, 1)[self.slot_mapping] = k[0].transpose(0, 1)
        v_pool.flatten(0, 1)[self.slot_mapping] = v[0].transpose(0, 1)
        flat = q[0].transpose(0, 1).contiguous()
        key = (window, *options.values())
        if key not in self._attend:
            sizes = (self.block_table, self.query_lens, self.context_lens)
            self._attend[key] = _prepared(self.backend, flat, k_pool, *sizes, window=window, **options)
        return self._attend[key](flat, k_pool, v_pool).transpose(0, 1)[None]


def _visible(first: int, queries: int, start: int, end: int, window: int | None, device) -> Tensor:
    """[queries, end - start]: may the query at first + i see the key at start + j?"""
    distance = torch.arange(first, first + queries, device=device)[:, None] - torch.arange(start, end, device=device)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)
