"""Lab 13's attention over blocks: one query, one block at a time, with a running maximum and sum.

The check hands in a pool in which everything that is not the sequence's is NaN or left from others, and watches what is
made. Heads and sizes are drawn, no two alike.
"""

import math
import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab13_paged_attention import formulas as predict
from course.lab13_paged_attention.paging import bytes_kept
from course.shared.diagnose import expect_tensor
from course.shared.measuring import one_thread
from course.shared.new_tensors import NewTensors


class Sizes(NamedTuple):
    """Of a case; size is that of a block."""

    heads: int
    kv_heads: int
    dim: int
    size: int


class Case(NamedTuple):
    """What is handed in."""

    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    table: list[int]
    context: int


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
    kv_heads, size, dim = random.sample((2, 3, 4, 5, 6), 3)
    sizes = Sizes(kv_heads * random.choice((2, 3)), kv_heads, dim, size)
    worst, most, alive, limit = 0.0, 0, {}, 2 * size * sizes.heads * dim
    contexts = (1, size, size + 1, 6 * size - 1, 40 * size)
    for context in contexts:
        for spread, others in ((1.0, math.nan), (400.0, math.nan), (1.0, 9.0)):
            case = _case(sizes, context, spread, others)
            with NewTensors(*case[:3]) as made:
                found = learner(*case)
            error = _judge(found, case, spread, others)
            if made.largest > limit:
                raise CheckFailed(
                    f"right, but {context} keys made a tensor of {made.largest:,} numbers, and a longer sequence makes "
                    f"a larger one: one block at a time needs no more than {limit:,}. Do not put the blocks together"
                )
            worst, most, alive[context] = max(worst, error), max(most, made.largest), made.most_alive
    few, many = contexts[-2], contexts[-1]
    if alive[many] > 1.1 * alive[few]:
        raise CheckFailed(
            f"right, but the tensors alive at once hold {alive[few]:,} numbers at {few} keys and {alive[many]:,} at "
            f"{many}: the scores or values of all blocks are kept for a second pass. Add each block to the running "
            "sums and forget it"
        )
    _judge_lists(learner, sizes)
    return receipt(
        f"{sizes.heads} query heads on {kv_heads} kv heads, contexts of {', '.join(map(str, contexts))} keys",
        [
            row("largest difference from softmax over all keys (below 1e-9)", True, worst < 1e-9),
            row(f"largest tensor at {contexts[-1]} keys: at most {limit:,} numbers", True, most <= limit),
            row("    its numbers", None, most),
            row(f"numbers alive at once, {few} and {many} keys: no more", True, alive[many] <= 1.1 * alive[few]),
        ],
    )


def _judge_lists(learner: Callable, sizes: Sizes) -> None:
    """CheckFailed if Python's lists or numpy's arrays grow with the context: from 2 blocks of 32 keys to 12."""
    sizes, kept = sizes._replace(size=32), {}
    for context in (64, 64, 384):  # the first warms up
        case = _case(sizes, context, 1.0, math.nan)
        kept[context] = bytes_kept(lambda case=case: learner(*case))
    if kept[384] - kept[64] > 16 * (384 - 64):  # a float in a list takes 32 bytes
        raise CheckFailed(
            f"right, but at 64 keys the lists, floats and arrays alive at once take {kept[64]:,} bytes and at 384 keys "
            f"{kept[384]:,}: scores or values are kept for a second pass. Add each block to the running sums and "
            "forget it"
        )


def _case(sizes: Sizes, context: int, spread: float, others: float) -> Case:
    """A sequence in a pool where every other number is `others`; scores of about ±spread·10, rising with the position.
    Its table has a block more than it needs."""
    heads, kv_heads, dim, size = sizes
    blocks = predict.blocks_for(context, size)
    table = random.sample(range(blocks + 5), blocks + 1)  # the last one is reserved ahead, and nothing is in it
    draw = {"generator": torch.Generator().manual_seed(random.randrange(2**32)), "dtype": torch.float64}
    slots = torch.tensor([table[p // size] * size + p % size for p in range(context)])
    pools = torch.full((2, (blocks + 5) * size, kv_heads, dim), others, dtype=torch.float64)
    pools[:, slots] = torch.randn(2, context, kv_heads, dim, **draw)
    pools[0, slots] *= torch.linspace(spread, 2 * spread, context, dtype=torch.float64)[:, None, None]
    q = 3 * torch.randn(heads, dim, **draw)
    if context == 1 and spread > 1:  # every score is far below 0
        q, pools[0, slots] = torch.ones_like(q), -10 * spread
    k_pool, v_pool = pools.unflatten(1, (-1, size)).unbind()
    return Case(q, k_pool, v_pool, table, context)


def _judge(found, case: Case, spread: float, others: float) -> float:
    context = case.context
    expect_tensor("what you returned", found, case.q.shape)
    right = _over_all(case)
    if not torch.isfinite(found).all():
        raise CheckFailed(_say_not_finite(case, spread))
    error = float((found - right).abs().max())
    if error < 1e-9:
        return error
    where = "" if math.isnan(others) else f"all slots but the sequence's hold {others:g}, where they held NaN before: "
    raise CheckFailed(f"{context} keys: {where}off by {error:.3g} at most", evidence=found)


def _say_not_finite(case: Case, spread: float) -> str:
    table, context, size = case.table, case.context, case.k_pool.shape[1]
    where = f"{context} keys in blocks {table[:6]}{' ...' if len(table) > 6 else ''}: the result is not finite. "
    if spread > 1:
        return where + (
            "exp of a large score overflows: subtract the largest score so far. Each query head needs a maximum of its "
            "own, or under another head's all of its weights vanish; and it must begin at -inf, or under a 0 those of "
            "scores far below 0 vanish"
        )
    if context % size:
        return where + (
            f"The last block in use holds {context % size} keys; the slots behind them, and all other blocks, are NaN "
            "here: read filled slots only, of blocks in the table only, which may have more blocks than `context` keys "
            "fill"
        )
    return where + "All other blocks are NaN here: logical block i lies in block table[i]"


def _over_all(case: Case) -> Tensor:
    """Attention over all keys at once: the independent reference."""
    heads, dim = case.q.shape
    used = (pool[case.table].flatten(0, 1)[: case.context] for pool in (case.k_pool, case.v_pool))
    keys, values = (x.repeat_interleave(heads // x.shape[1], 1) for x in used)  # [context, heads, head_dim]
    weights = torch.softmax(torch.einsum("hd,khd->hk", case.q / math.sqrt(dim), keys), -1)
    return torch.einsum("hk,khd->hd", weights, values)
