"""Lab 13's attention over blocks: one query, one block at a time, with a running maximum and sum.

The check hands in a pool in which everything that is not the sequence's is NaN, and watches the tensors that are made.
"""

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab13_paged_attention import formulas as predict
from course.shared.diagnose import expect_tensor
from course.shared.measuring import one_thread
from course.shared.new_tensors import NewTensors

HEADS, KV_HEADS, DIM, SIZE = 8, 4, 6, 4


@exercise(
    "paged-attention",
    minutes=25,
    difficulty=4,
    hints=(
        "Softmax needs the largest score and the sum over all keys. Neither is known at the first block. What can you "
        "keep that a later block can put right?",
        "Keep three things per head: the largest score so far m, Σ exp(score - m), Σ exp(score - m) · value. When a "
        "block raises m to m', multiply both sums by exp(m - m') before you add to them. At the end divide.",
    ),
)
@one_thread()
def check_paged_attention(learner: Callable) -> Receipt:
    worst, most, alive, limit = 0.0, 0, {}, 2 * SIZE * HEADS * DIM
    contexts = (1, SIZE, SIZE + 1, 6 * SIZE - 1, 40 * SIZE)
    for context in contexts:
        for spread in (1.0, 400.0):
            case = _case(context, spread)
            with NewTensors(*case[:3]) as made:
                found = learner(*case)
            error = _judge(found, case, spread)
            if made.largest > limit:
                raise CheckFailed(
                    f"right, but {context} keys made a tensor of {made.largest:,} numbers, and a longer sequence makes "
                    f"a larger one: one block at a time needs no more than {limit:,}. Do not put the blocks together"
                )
            worst, most, alive[context] = max(worst, error), max(most, made.largest), made.most_alive
    few, many = contexts[-2], contexts[-1]
    if alive[many] > 1.5 * alive[few]:
        raise CheckFailed(
            f"right, but the tensors alive at once hold {alive[few]:,} numbers at {few} keys and {alive[many]:,} at "
            f"{many}: the scores or values of all blocks are kept for a second pass. Add each block to the running "
            "sums and forget it"
        )
    return receipt(
        f"{HEADS} query heads on {KV_HEADS} kv heads, contexts of {', '.join(map(str, contexts))} keys",
        [
            row("largest difference from softmax over all keys (below 1e-9)", True, worst < 1e-9),
            row(f"largest tensor at {contexts[-1]} keys: at most {limit:,} numbers", True, most <= limit),
            row("    its numbers", None, most),
            row(f"numbers alive at once, {few} and {many} keys: no more", True, alive[many] <= 1.5 * alive[few]),
        ],
    )


def _case(context: int, spread: float) -> tuple[Tensor, Tensor, Tensor, list[int], int]:
    """A sequence in a pool where every other number is NaN; scores of about ±spread·10, rising with the position. Its
    table has a block more than it needs."""
    blocks = predict.blocks_for(context, SIZE)
    table = random.sample(range(blocks + 5), blocks + 1)  # the last one is reserved ahead, and nothing is in it
    draw = {"generator": torch.Generator().manual_seed(random.randrange(2**32)), "dtype": torch.float64}
    slots = torch.tensor([table[p // SIZE] * SIZE + p % SIZE for p in range(context)])
    pools = torch.full((2, (blocks + 5) * SIZE, KV_HEADS, DIM), float("nan"), dtype=torch.float64)
    pools[:, slots] = torch.randn(2, context, KV_HEADS, DIM, **draw)
    pools[0, slots] *= torch.linspace(spread, 2 * spread, context, dtype=torch.float64)[:, None, None]
    q = 3 * torch.randn(HEADS, DIM, **draw)
    if context == 1 and spread > 1:  # every score is far below 0
        q, pools[0, slots] = torch.ones_like(q), -10 * spread
    k_pool, v_pool = pools.unflatten(1, (-1, SIZE)).unbind()
    return q, k_pool, v_pool, table, context


def _judge(found, case, spread: float) -> float:
    q, _, _, table, context = case
    expect_tensor("what you returned", found, q.shape)
    right = _over_all(case)
    if not torch.isfinite(found).all():
        raise CheckFailed(_say_not_finite(context, spread, table))
    error = float((found - right).abs().max())
    if error < 1e-9:
        return error
    raise CheckFailed(f"{context} keys: off by {error:.3g} at most", evidence=found)


def _say_not_finite(context: int, spread: float, table: list[int]) -> str:
    where = f"{context} keys in blocks {table[:6]}{' ...' if len(table) > 6 else ''}: the result is not finite. "
    if spread > 1:
        return where + (
            "exp of a large score overflows: subtract the largest score so far. Each query head needs a maximum of its "
            "own, or under another head's all of its weights vanish; and it must begin at -inf, or under a 0 those of "
            "scores far below 0 vanish"
        )
    if context % SIZE:
        return where + (
            f"The last block in use holds {context % SIZE} keys; the slots behind them, and all other blocks, are NaN "
            "here: read filled slots only, of blocks in the table only, which may have more blocks than `context` keys "
            "fill"
        )
    return where + "All other blocks are NaN here: logical block i lies in block table[i]"


def _keys_values(case) -> tuple[Tensor, Tensor]:
    _, k_pool, v_pool, table, context = case
    return tuple(pool[table].flatten(0, 1)[:context] for pool in (k_pool, v_pool))  # [context, kv_heads, head_dim]


def _over_all(case) -> Tensor:
    """Attention over all keys at once: the independent reference."""
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in _keys_values(case))
    weights = torch.softmax(torch.einsum("hd,khd->hk", case[0] / math.sqrt(DIM), keys), -1)
    return torch.einsum("hk,khd->hd", weights, values)
