"""Runs lab 07's ring and Ulysses' exchange, with the same receipt, on any number of processes.

python 07_long_context.py                                   4 ranks on this machine
torchrun --nproc-per-node 4 07_long_context.py              the same under torchrun
torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \\
    --rdzv-endpoint HOST:29500 07_long_context.py           on each of two nodes

With a GPU for each rank the tensors live on the GPUs and NCCL carries the messages.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from course.kit import Row, row
from course.kit.torchrun import attempt, run
from minillm.comm import Group
from minillm.measure import ledger
from minillm.model.attention.tiled import merge, tiled, tiled_with_lse
from minillm.predict.training import context
from minillm.predict.training.context import AttentionShape

HEADS_PER_RANK, TOKENS_PER_RANK, HEAD_DIM = 2, 64, 16
Attend = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: Group, attend: Attend) -> Tensor:
    """q, k, v: [batch, heads, seq / N, head_dim] of this rank
    -> its output, over the keys of all ranks.

    attend(q, k, v, source) -> (output, lse) over the block of rank `source`; `merge` joins two of
    them. Begin with the own block; what a rank cannot see at all has output 0 and lse -inf.
    """
    raise NotImplementedError


def to_heads(x: Tensor, group: Group) -> Tensor:
    """x: [heads, seq / N, head_dim], a part of the sequence
    -> [heads / N, seq, head_dim], a group of heads."""
    raise NotImplementedError


def to_sequence(x: Tensor, group: Group) -> Tensor:
    """The way back: [heads / N, seq, head_dim] -> [heads, seq / N, head_dim]."""
    raise NotImplementedError


# What follows runs and judges them.


def whole(n: int) -> list[Tensor]:
    """q, k, v: [1, heads, seq, head_dim], the same on every rank."""
    shape = (1, HEADS_PER_RANK * n, TOKENS_PER_RANK * n, HEAD_DIM)
    return [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def positions(n: int, order: str) -> list[Tensor]:
    seq = TOKENS_PER_RANK * n
    spans = [context.spans(seq, rank, n, order) for rank in range(n)]
    return [torch.cat([torch.arange(*span) for span in each]) for each in spans]


def rank_program(group: Group) -> dict[str, Any]:
    """Each part once: (bytes this rank sent, whether its values are right);
    None if not written yet."""
    return attempt(PARTS, group)


def try_ring(group: Group) -> tuple[int, bool]:
    """Zigzag parts of a causal sequence."""
    held = [at.to(group.device) for at in positions(group.world_size, "zigzag")]
    mine = held[group.rank]

    def attend(q: Tensor, k: Tensor, v: Tensor, source: int) -> tuple[Tensor, Tensor]:
        return tiled_with_lse(q, k, v, positions=mine, key_positions=held[source])

    q, k, v = (x.to(group.device) for x in whole(group.world_size))
    with ledger() as led:
        out = ring_attention(q[:, :, mine], k[:, :, mine], v[:, :, mine], group, attend)
    return led.bytes(), torch.allclose(out, tiled(q, k, v)[:, :, mine], rtol=1e-3, atol=1e-4)


def try_exchange(group: Group) -> tuple[int, bool]:
    """Contiguous parts: q, k and v to heads, ordinary attention, and the output back."""
    mine = positions(group.world_size, "contiguous")[group.rank].to(group.device)
    q, k, v = (x.to(group.device) for x in whole(group.world_size))
    with ledger() as led:
        own = [to_heads(x[0, :, mine], group)[None] for x in (q, k, v)]
        out = to_sequence(tiled(*own)[0], group)
    return led.bytes(), torch.allclose(out, tiled(q, k, v)[0, :, mine], rtol=1e-3, atol=1e-4)


PARTS = {"ring": try_ring, "exchange": try_exchange}


def predictions(n: int) -> dict[str, int]:
    """Bytes sent by all ranks."""
    heads = HEADS_PER_RANK * n
    shape = AttentionShape(1, TOKENS_PER_RANK * n, heads, heads, HEAD_DIM)
    variants = {"ring": "zigzag", "exchange": "ulysses"}
    traffic = {name: context.forward_traffic(variants[name], shape, n) for name in variants}
    return {name: n * each.bytes for name, each in traffic.items()}


def judge(name: str, ranks: list[tuple[int, bool]]) -> Iterator[Row]:
    sent, right = zip(*ranks, strict=True)
    yield row(f"{name}: bytes sent by all ranks", predictions(len(ranks))[name], sum(sent), "B")
    yield row(f"{name}: right values on every rank", True, all(right))


if __name__ == "__main__":
    run("lab 07", rank_program, judge)
