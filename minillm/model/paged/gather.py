"""Paged attention by torch's own kernel, on keys and values that are copied together first: on every device."""

import math
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.model.attention.causal import Attend
from minillm.model.paged.loop import reachable, wide
from minillm.model.paged.quantized import read_rows

GROUP_BYTES, GPU_GROUP_BYTES = 1 << 20, 1 << 28  # keys and values that are gathered together, of several sequences


class Gathered:
    """Copies the keys and values of like sequences together and leaves the rest to torch's fused kernel.

    Sequences with equally many queries stand in order of length, in groups whose keys stay in a core's cache between
    copy and product. All are aligned at their last key; where a shorter one has no key, its first is read and masked.
    """

    def __call__(self, q, k_pool, v_pool, block_table, query_lens, context_lens, **options) -> Tensor:
        return self.prepare(q, k_pool, block_table, query_lens, context_lens, **options)(q, k_pool, v_pool)

    def prepare(
        self, q, k_pool, block_table, query_lens, context_lens, *, window: int | None, soft_cap: float | None = None
    ) -> Attend:
        device, block_size = k_pool.device, k_pool.shape[1]
        slot_bytes = 2 * k_pool.shape[2] * k_pool.shape[3] * q.element_size()
        room = (GROUP_BYTES if device.type == "cpu" else GPU_GROUP_BYTES) // slot_bytes
        counts = zip(query_lens, context_lens, strict=True)
        seen = [keys if window is None else min(keys, queries + window - 1) for queries, keys in counts]
        order = sorted(range(len(seen)), key=lambda s: (query_lens[s], seen[s]))
        first = list(accumulate(query_lens, initial=0))
        if len(order) > 1:
            rows = torch.tensor([row for s in order for row in range(first[s], first[s + 1])], device=device)
            back, block_table = rows.argsort(), block_table[order]
        last = torch.tensor([context_lens[s] for s in order], device=device)
        places = last[:, None] - torch.arange(max(seen), 0, -1, device=device)  # [sequences, keys], negative: none
        absent = torch.zeros(places.shape, dtype=q.dtype, device=device).masked_fill_(places < 0, float("-inf"))
        places.clamp_(min=0)
        slots = block_table.gather(1, places // block_size) * block_size + places % block_size

        groups, start = [], 0
        for end in range(1, len(order) + 1):
            queries, keys = query_lens[order[start]], seen[order[end - 1]]
            following = order[end] if end < len(order) else None
            if following is None or query_lens[following] != queries or (end - start + 1) * seen[following] > room:
                mask = absent[start:end, None, None, -keys:]
                if queries > 1:
                    visible = reachable(keys - queries, queries, 0, keys, window, device)
                    mask = mask.masked_fill(~visible, float("-inf")).repeat(1, 1, q.shape[1] // k_pool.shape[2], 1)
                elif seen[order[start]] == keys:
                    mask = None
                else:
                    mask = mask.clone()  # torch's kernel reads 16 bytes at once, so a GPU's mask may not begin anywhere
                groups.append(_Group(end - start, queries, slots[start:end, -keys:].flatten(), mask, soft_cap))
                start = end

        def attend(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
            if len(order) == 1:
                return groups[0](q, k_pool, v_pool)
            parts = q.index_select(0, rows).split([group.sequences * group.queries for group in groups])
            ys = [group(part, k_pool, v_pool) for group, part in zip(groups, parts, strict=True)]
            return torch.cat(ys).index_select(0, back)

        return attend

    def fixed(self, size: int, kv_heads: int, device: torch.device) -> "GatheredDecode":
        return GatheredDecode(size)


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
            read_rows(pool, self.slots, q.dtype).view(self.sequences, -1, kv_heads, head_dim).transpose(1, 2)
            for pool in (k_pool, v_pool)
        )
        rows = q.view(self.sequences, self.queries, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        if self.soft_cap is None:
            y = F.scaled_dot_product_attention(rows.flatten(2, 3), keys, values, attn_mask=self.mask)
        else:  # which the fused kernel does not know
            scores = (rows.flatten(2, 3) @ keys.mT).to(wide(q)) / math.sqrt(head_dim)
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
            scores = scores if self.mask is None else scores + self.mask
            y = torch.softmax(scores, dim=-1).to(q.dtype) @ values
        return y.view(rows.shape).permute(0, 3, 1, 2, 4).reshape(q.shape)


@dataclass(frozen=True)
class GatheredDecode:
    """A `FixedDecode`: all sequences are gathered at the full width of the tables, whatever their lengths. For tests
    and small models: it reads as if every sequence were as long as the context."""

    size: int

    @property
    def plan_size(self) -> int:
        return 2 * self.size

    def plan(self, rows: np.ndarray, context_lens: np.ndarray) -> np.ndarray:
        return np.concatenate((rows, context_lens))

    def prepare(
        self, q, k_pool, tables: Tensor, plan: Tensor, *, window: int | None, soft_cap: float | None = None
    ) -> Attend:
        rows, context_lens = plan.split(self.size)
        block_size = k_pool.shape[1]
        places = torch.arange(tables.shape[1] * block_size, device=tables.device).expand(self.size, -1)
        distance = context_lens[:, None] - 1 - places
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, float("-inf"))
        places = torch.where(seen, places, context_lens[:, None] - 1)  # its own key, whatever other slots hold
        slots = tables.index_select(0, rows).gather(1, places // block_size) * block_size + places % block_size
        return _Group(self.size, 1, slots.flatten(), mask[:, None, None], soft_cap)


gathered = Gathered()
