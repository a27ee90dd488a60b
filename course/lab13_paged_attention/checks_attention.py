"""Lab 13's attention over blocks: one query, one block at a time, with a running maximum and sum.

The check hands in a pool in which everything that is not the sequence's is NaN, and watches the tensors that are made.
"""

import math
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from course.lab13_paged_attention import formulas as predict
from course.lab13_paged_attention.checks import LAB
from course.lab13_paged_attention.paging import LargestTensor
from course.shared.measuring import one_thread
from minillm.labkit.exercises import CheckFailed, exercise
from minillm.labkit.receipts import Receipt, receipt, row

HEADS, KV_HEADS, DIM, SIZE = 8, 4, 8, 4


def paged_attention(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Sequence[int], context: int) -> Tensor:
    """q: [heads, head_dim], pools: [num_blocks, block_size, kv_heads, head_dim] -> [heads, head_dim]."""
    heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_pool.shape
    rows = q.view(kv_heads, heads // kv_heads, head_dim) / math.sqrt(head_dim)
    largest = rows.new_full((kv_heads, heads // kv_heads, 1), float("-inf"))
    total, weighted = torch.zeros_like(largest), torch.zeros_like(rows)
    for index in range(-(-context // block_size)):
        filled = min(block_size, context - index * block_size)
        keys, values = k_pool[table[index], :filled], v_pool[table[index], :filled]
        scores = torch.einsum("hgd,khd->hgk", rows, keys)
        higher = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights, shrink = (scores - higher).exp(), (largest - higher).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        weighted = weighted * shrink + torch.einsum("hgk,khd->hgd", weights, values)
        largest = higher
    return (weighted / total).reshape(heads, head_dim)


@exercise(
    "paged-attention",
    reference=paged_attention,
    minutes=25,
    difficulty=4,
    lab=LAB,
    hints=(
        "Softmax needs the largest score and the sum over all keys. Neither is known at the first block. What can you "
        "keep that a later block can put right?",
        "Keep three things per head: the largest score so far m, Σ exp(score - m), Σ exp(score - m) · value. When a "
        "block raises m to m', multiply both sums by exp(m - m') before you add to them. At the end divide.",
        "rows = q.view(kv_heads, group, head_dim) / sqrt(head_dim); for each block: scores = einsum('hgd,khd->hgk', "
        "rows, k_pool[block, :filled]); higher = maximum(largest, scores.amax(-1, keepdim=True)); shrink = (largest - "
        "higher).exp(); total = total * shrink + weights.sum(-1, keepdim=True); likewise weighted.",
    ),
)
@one_thread()
def check_paged_attention(learner: Callable) -> Receipt:
    worst, most, limit = 0.0, 0, 2 * SIZE * HEADS * DIM
    contexts = (1, SIZE, SIZE + 1, 6 * SIZE - 1, 40 * SIZE)
    for context in contexts:
        for spread in (1.0, 400.0):
            case = _case(context, spread)
            with LargestTensor(*case[:3]) as made:
                found = learner(*case)
            error = _judge(found, case, spread)
            if made.numel > limit:
                raise CheckFailed(
                    f"right, but {context} keys made a tensor of {made.numel:,} numbers, and a longer sequence makes a "
                    f"larger one: one block at a time needs no more than {limit:,}. Do not put the blocks together"
                )
            worst, most = max(worst, error), max(most, made.numel)
    return receipt(
        f"{HEADS} query heads on {KV_HEADS} kv heads, contexts of {', '.join(map(str, contexts))} keys",
        [
            row("largest difference from softmax over all keys (below 1e-9)", True, worst < 1e-9),
            row(f"largest tensor at {contexts[-1]} keys: at most {limit:,} numbers", True, most <= limit),
            row("    its numbers", None, most),
        ],
    )


def _case(context: int, spread: float) -> tuple[Tensor, Tensor, Tensor, list[int], int]:
    """A sequence in a pool where every other number is NaN; scores of about ±spread·10, rising with the position."""
    blocks = predict.blocks_for(context, SIZE)
    table = random.sample(range(blocks + 5), blocks)
    draw = {"generator": torch.Generator().manual_seed(random.randrange(2**32)), "dtype": torch.float64}
    slots = torch.tensor([table[p // SIZE] * SIZE + p % SIZE for p in range(context)])
    pools = torch.full((2, (blocks + 5) * SIZE, KV_HEADS, DIM), float("nan"), dtype=torch.float64)
    pools[:, slots] = torch.randn(2, context, KV_HEADS, DIM, **draw)
    pools[0, slots] *= torch.linspace(spread, 2 * spread, context, dtype=torch.float64)[:, None, None]
    k_pool, v_pool = pools.unflatten(1, (-1, SIZE)).unbind()
    return 3 * torch.randn(HEADS, DIM, **draw), k_pool, v_pool, table, context


def _judge(found, case, spread: float) -> float:
    q, _, _, table, context = case
    if not isinstance(found, Tensor) or found.shape != q.shape:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise CheckFailed(f"you returned {got}; asked for is a tensor of shape {tuple(q.shape)}, as q")
    right = _over_all(case)
    if not torch.isfinite(found).all():
        raise CheckFailed(_say_not_finite(context, spread, table))
    error = float((found - right).abs().max())
    if error < 1e-9:
        return error
    wrong = {
        "every score is √head_dim too large: divide by √head_dim": _over_all(case, scale=1.0),
        "it is the average of the blocks' own softmaxes: keep sums and divide once, at the end": _average(case),
        "query heads meet the wrong kv heads: heads 0 .. group-1 share kv head 0, the next group kv head 1": _over_all(
            case, swapped=True
        ),
        "what was summed under an older, smaller maximum is not made smaller: multiply by exp(old - new)": _unshrunk(
            case
        ),
    }
    said = next((said for said, other in wrong.items() if torch.allclose(found, other, atol=1e-9)), "")
    raise CheckFailed(f"{context} keys: off by {error:.3g}" + (f": {said}" if said else ", and not by a known mistake"))


def _say_not_finite(context: int, spread: float, table: list[int]) -> str:
    where = f"{context} keys in blocks {table[:6]}{' ...' if len(table) > 6 else ''}: the result is not finite. "
    if spread > 1:
        return where + "exp of a large score overflows: subtract the largest score first"
    if context % SIZE:
        return where + (
            f"The last block holds {context % SIZE} keys; the slots behind them, and all other blocks, are NaN here: "
            "read filled slots only, of blocks in the table only"
        )
    return where + "All other blocks are NaN here: logical block i lies in block table[i]"


def _keys_values(case) -> tuple[Tensor, Tensor]:
    _, k_pool, v_pool, table, context = case
    return tuple(pool[table].flatten(0, 1)[:context] for pool in (k_pool, v_pool))  # [context, kv_heads, head_dim]


def _over_all(case, scale: float = 1 / math.sqrt(DIM), swapped: bool = False) -> Tensor:
    """Attention over all keys at once: the independent reference, and what two mistakes give."""
    keys, values = _keys_values(case)
    group = HEADS // KV_HEADS
    repeat = (lambda x: x.repeat(1, group, 1)) if swapped else (lambda x: x.repeat_interleave(group, 1))
    weights = torch.softmax(torch.einsum("hd,khd->hk", case[0] * scale, repeat(keys)), -1)
    return torch.einsum("hk,khd->hd", weights, repeat(values))


def _average(case) -> Tensor:
    q, k_pool, v_pool, table, context = case
    parts = []
    for index in range(len(table)):
        filled = min(SIZE, context - index * SIZE)
        parts.append(_over_all((q, k_pool, v_pool, table[index : index + 1], filled)))
    return torch.stack(parts).mean(0)


def _unshrunk(case) -> Tensor:
    """Sums under a running maximum that are never made smaller."""
    q, k_pool, v_pool, table, context = case
    rows = q.view(KV_HEADS, -1, DIM) / math.sqrt(DIM)
    largest = rows.new_full((KV_HEADS, rows.shape[1], 1), float("-inf"))
    total, weighted = torch.zeros_like(largest), torch.zeros_like(rows)
    for index in range(len(table)):
        filled = min(SIZE, context - index * SIZE)
        scores = torch.einsum("hgd,khd->hgk", rows, k_pool[table[index], :filled])
        largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
        total = total + (scores - largest).exp().sum(-1, keepdim=True)
        weighted = weighted + torch.einsum("hgk,khd->hgd", (scores - largest).exp(), v_pool[table[index], :filled])
    return (weighted / total).reshape(HEADS, DIM)
