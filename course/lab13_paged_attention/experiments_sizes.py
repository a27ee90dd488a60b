"""Lab 13's block sizes, measured: what a large block wastes and what a small one costs."""

import time
from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F

from course.lab13_paged_attention import formulas as predict
from course.lab13_paged_attention.experiments import target, waste
from course.lab13_paged_attention.experiments_sharing import share
from course.shared.measuring import one_thread
from minillm.model.paged import block_by_block, paged_attention


@one_thread()
def attention_seconds(block_size: int, context: int = 480, repeats: int = 15) -> dict[str, float]:
    """Median CPU seconds per sequence of one layer's attention of one query, blocks scattered over the pool."""
    config, draw = target().config, torch.Generator().manual_seed(0)
    blocks, count = predict.blocks_for(context, block_size), 8
    shape = (blocks * count, block_size, config.num_kv_heads, config.head_dim)
    k_pool, v_pool = (torch.randn(shape, generator=draw) for _ in range(2))
    q = torch.randn(count, config.num_heads, config.head_dim, generator=draw)
    table = torch.randperm(blocks * count, generator=draw).view(count, blocks)
    found = {}
    for name, some, options in (("copied together", count, {}), ("block by block", 1, {"backend": block_by_block})):
        seconds = []
        for _ in range(repeats if some > 1 else 2):
            began = time.thread_time()
            paged_attention(q[:some], k_pool, v_pool, table[:some], [1] * some, [context] * some, **options)
            seconds.append((time.thread_time() - began) / some)
        found[name] = sorted(seconds)[len(seconds) // 2]
    return found


@one_thread()
def one_piece_seconds(context: int = 480, repeats: int = 15) -> float:
    """The same as `attention_seconds` with the keys of each sequence in one piece and no table: torch's own kernel."""
    config, draw, count = target().config, torch.Generator().manual_seed(0), 8
    shape = (count, config.num_kv_heads, context, config.head_dim)
    keys, values = (torch.randn(shape, generator=draw) for _ in range(2))
    group = config.num_heads // config.num_kv_heads
    q = torch.randn(count, config.num_kv_heads, group, config.head_dim, generator=draw)
    seconds = []
    for _ in range(repeats):
        began = time.thread_time()
        F.scaled_dot_product_attention(q, keys, values)
        seconds.append((time.thread_time() - began) / count)
    return sorted(seconds)[repeats // 2]


@cache
def sweep(sizes: Sequence[int] = (1, 4, 16, 64, 256), prefix: int = 200, own: int = 40, requests: int = 2):
    """By block size: waste share of `mixed` requests, tokens of a prefix that a hit covers, attention's time."""
    rows = []
    for size in sizes:
        wasted = waste(size, count=8, num_blocks=6144 // size)
        shared = share(prefix, own, requests, size, answer=2, compare=False)
        rows.append(
            {
                "block_size": size,
                "waste": 1 - wasted["filled"] / wasted["held"],
                "predicted_unused": predict.mean_unused_slots(size),
                "unused": sum(wasted["unused"]) / len(wasted["unused"]),
                "hit": shared["hit"] // (requests - 1),
                "hit_predicted": predict.cacheable_tokens(prefix, prefix + own, size),
                "blocks": sum(predict.blocks_for(length, size) for length in wasted["lengths"]),
                "attention_s": attention_seconds(size),
            }
        )
    return rows
