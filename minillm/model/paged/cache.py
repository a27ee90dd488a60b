"""Attention over keys and values that lie in blocks anywhere in memory (Kwon et al. 2023, PagedAttention, §4.1).

sequence     t0 t1 t2 t3 │ t4 t5 t6 t7 │ t8            block_size 4, the ninth token is new
block table      7       │      2      │  5            logical block i of the sequence lies in block_table[i]
k_pool       block 0 … │2: t4 t5 t6 t7│ … │5: t8 · · ·│ … │7: t0 t1 t2 t3│ …

The tokens of all sequences of a step stand one after the other in one flat row, whether a sequence brings one
(decode) or many (a piece of its prompt): `model(tokens[None], positions, attention=cache.batch(...))`.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from minillm.model.attention.causal import Attend
from minillm.model.config import ModelConfig
from minillm.model.paged.backend import Backend
from minillm.model.paged.gather import gathered
from minillm.model.paged.quantized import QuantizedPool, RowFormat, write_rows
from minillm.model.paged.tables import slots_of_tokens, to_device


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
    return prepare_pass(backend, q, k_pool, *sizes, window=window, **options)(q, k_pool, v_pool)


def prepare_pass(backend, q, k_pool, block_table, query_lens, context_lens, **options) -> Attend:
    """What the backend does in each layer of a pass, shapes as in `paged_attention`. ValueError for wrong lengths."""
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
    """Keys and values of all layers in blocks, on the device and, for preempted sequences, on the host.

    2 · layers · block_size · kv_heads · head_dim numbers a block; with a format as many codes of 8 bits, and a scale
    for each head_dim of them (`quantized.py`). The block pool of `minillm.serve` decides which sequence owns which
    block. layers: by its number, the keys and the values of each layer, views of the pool.
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
        format: RowFormat | None = None,
        layers: Sequence[int] | None = None,
    ):
        """layers: whose keys and values it keeps; None = all of the model."""
        layers = range(config.num_layers) if layers is None else layers
        shape = (2, len(layers), num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.block_size, self.format = block_size, format
        self.parts: list[tuple[Tensor, Tensor]] = []  # on the device and on the host
        of_parts = [(shape, dtype)]
        if format is not None:
            of_parts = [(shape, format.code_dtype), (shape[:-1], format.scale_dtype)]
        for size, kind in of_parts:
            pool = torch.zeros(size, device=device, dtype=kind)
            of_host = (num_host_blocks, *size[:2], *size[3:])  # a block in one piece, for one copy
            self.parts.append((pool, torch.zeros(of_host, dtype=kind, device="cpu", pin_memory=pool.is_cuda)))
        self.pool, self.host = self.parts[0]
        self.layers = {
            layer: (self._of_layer(0, place), self._of_layer(1, place)) for place, layer in enumerate(layers)
        }

    @property
    def nbytes(self) -> int:
        """Of the blocks on the device, scales included."""
        return sum(pool.nbytes for pool, _ in self.parts)

    def copy(self, source: int, target: int) -> None:
        for pool, _ in self.parts:
            pool[:, :, target] = pool[:, :, source]

    def to_host(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """The host does not wait: whatever reads `host` or writes these blocks later is queued behind on the device."""
        for pool, host in self.parts:
            for block, slot in zip(blocks, slots, strict=True):
                host[slot].copy_(pool[:, :, block], non_blocking=True)

    def from_host(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        for pool, host in self.parts:
            for slot, block in zip(slots, blocks, strict=True):
                pool[:, :, block].copy_(host[slot], non_blocking=True)

    def batch(
        self, tables: Sequence[Sequence[int]], starts: Sequence[int], query_lens: Sequence[int], backend=gathered
    ) -> "PagedBatch":
        """The attention function of one forward pass: sequence s brings the query_lens[s] tokens from starts[s] on."""
        return PagedBatch(self, tables, starts, query_lens, backend)

    def _of_layer(self, kind: int, place: int) -> Tensor | QuantizedPool:
        parts = [pool[kind, place] for pool, _ in self.parts]
        return parts[0] if self.format is None else QuantizedPool(*parts, self.format)


class PagedAttention:
    """An `AttentionFunction` for a flat batch: writes its keys and values into their blocks, then attends.

    All of a layer's keys are written before any is read, so a sequence may share a block that another sequence of the
    same pass fills. slot_mapping: [tokens], where each goes. prepare: (q, k_pool, *, window, **options) -> what a layer
    does; it is asked once for all layers that are alike.
    """

    def __init__(self, cache: PagedCache, slot_mapping: Tensor, prepare: Callable[..., Attend]):
        self.cache, self.slot_mapping, self._prepare = cache, slot_mapping, prepare
        self._attend: dict[tuple, Attend] = {}  # by window and soft cap

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, positions: Tensor | None, window: int | None, **options
    ) -> Tensor:
        k_pool, v_pool = self.cache.layers[layer]
        write_rows(k_pool, self.slot_mapping, k[0].transpose(0, 1))
        write_rows(v_pool, self.slot_mapping, v[0].transpose(0, 1))
        flat = q[0].transpose(0, 1).contiguous()
        key = (window, *options.values())
        if key not in self._attend:
            self._attend[key] = self._prepare(flat, k_pool, window=window, **options)
        return self._attend[key](flat, k_pool, v_pool).transpose(0, 1)[None]


class PagedBatch(PagedAttention):
    """The `PagedAttention` of sequences of any lengths; see `PagedCache.batch`.

    positions: [tokens], which the model is given. last_rows: [sequences], the place of each one's last token in the
    flat row.
    """

    def __init__(
        self,
        cache: PagedCache,
        tables: Sequence[Sequence[int]],
        starts: Sequence[int],
        query_lens: Sequence[int],
        backend: Backend,
    ):
        table = np.zeros((len(tables), max(map(len, tables))), np.int64)
        for row, blocks in enumerate(tables):
            table[row, : len(blocks)] = blocks
        lengths, starts = np.array(query_lens), np.array(starts)
        ends = starts + lengths
        positions, slots = slots_of_tokens(table, np.arange(len(table)), starts, lengths, cache.block_size)
        on_device = to_device((positions, slots, table, lengths.cumsum() - 1), cache.pool.device)
        self.positions, slots, table, self.last_rows = on_device
        sizes = {"block_table": table, "query_lens": lengths.tolist(), "context_lens": ends.tolist()}
        super().__init__(cache, slots, partial(prepare_pass, backend, **sizes))
