"""Paged attention by torch's flex_attention (Dong et al. 2024): the mask is a function, the kernel is made for it.

The pool is one long row of slots, all queries of the batch are one row, too, and the mask finds out who may see what:

slot ──▶ physical block, place in it ──▶ logical block of this query's sequence, if it has that block at all
                                                 ╰──▶ position of the key;  visible if 0 ≤ position(query) - it < window

Nothing is copied and a block may belong to several sequences. What it costs: a mask of [tokens, slots of the whole
pool] is worked out in every pass, to find the 128 × 128 tiles that the kernel can skip.

Limits, of flex_attention as of torch 2.13: a prototype (its documentation says it may change), no gradients on the CPU.
Masked weights are 0 and 0 · nan is nan: all slots must hold finite numbers (the pool starts at 0), so the nan of one
failed request spreads as long as its blocks are not written again. Not compiled, the default on the CPU here, all
scores [heads, tokens, slots] are stored. Compiled on the CPU, batches have to keep one shape: the C++ that torch
generates for changing ones is refused by the compiler.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from minillm.model.attention import Attend


@dataclass(frozen=True)
class Flex:
    """A backend of `paged_attention`, shapes as there. compiled: None = on a GPU."""

    compiled: bool | None = None

    def __call__(self, q, k_pool, v_pool, block_table, query_lens, context_lens, **options) -> Tensor:
        return self.prepare(q, k_pool, block_table, query_lens, context_lens, **options)(q, k_pool, v_pool)

    def prepare(
        self, q, k_pool, block_table, query_lens, context_lens, *, window: int | None, soft_cap: float | None = None
    ) -> Attend:
        mask = block_mask(q, k_pool, block_table, query_lens, context_lens, window)
        compiled = q.is_cuda if self.compiled is None else self.compiled
        attention, grouped = _compiled() if compiled else flex_attention, q.shape[1] != k_pool.shape[2]

        def capped(score, batch, head, query, slot):
            return soft_cap * torch.tanh(score / soft_cap)

        change = None if soft_cap is None else capped

        def attend(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
            row = (x.transpose(0, 1)[None] for x in (q, k_pool.flatten(0, 1), v_pool.flatten(0, 1)))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
                return attention(*row, score_mod=change, block_mask=mask, enable_gqa=grouped)[0].transpose(0, 1)

        return attend


flex = Flex()


def block_mask(q, k_pool, block_table, query_lens, context_lens, window: int | None) -> BlockMask:
    """Which of the pool's slots each query sees. flex_attention's indices count from 0 in what it is given: a decoding
    query has index 0 there, whatever its position (without the offset it would see one key: gpt-fast#233).
    """
    num_blocks, block_size = k_pool.shape[:2]
    device, lens = q.device, torch.tensor([list(query_lens), list(context_lens)])
    sequence_of = torch.arange(len(query_lens)).repeat_interleave(lens[0])
    starts = lens[0].cumsum(0) - lens[0]
    position_of = torch.arange(len(q)) - starts[sequence_of] + (lens[1] - lens[0])[sequence_of]
    logical = logical_blocks(block_table, context_lens, num_blocks, block_size)
    sequence_of, position_of = sequence_of.to(device), position_of.to(device)
    size, reach = (torch.tensor(n, device=device) for n in (block_size, window or num_blocks * block_size))

    def visible(batch, head, query, slot):
        block = logical[sequence_of[query], slot // size]
        distance = position_of[query] - (block * size + slot % size)
        return (block >= 0) & (distance >= 0) & (distance < reach)

    return create_block_mask(visible, None, None, len(q), num_blocks * block_size, device=device)


def logical_blocks(block_table: Tensor, context_lens: Sequence[int], num_blocks: int, block_size: int) -> Tensor:
    """The block table turned round, [sequences, num_blocks]: which block of the sequence this is; -1 if it is none."""
    device, width = block_table.device, block_table.shape[1]
    used = torch.tensor([-(-context // block_size) for context in context_lens], device=device)
    place = torch.arange(width, device=device).expand_as(block_table)
    spare = torch.where(place < used[:, None], block_table, num_blocks)  # what pads a row goes beyond the last block
    logical = torch.full((len(block_table), num_blocks + 1), -1, device=device)
    return logical.scatter_(1, spare, place)[:, :num_blocks]


@cache
def _compiled() -> Callable:
    return torch.compile(flex_attention, fullgraph=True)
