"""Runs lab 05's cut MLP, embedding, loss and sequence parallelism on any number of processes.

python 05_tensor_parallel.py                                   4 ranks on this machine
torchrun --nproc-per-node 4 05_tensor_parallel.py              the same under torchrun
torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \\
    --rdzv-endpoint HOST:29500 05_tensor_parallel.py           on each of two nodes

With a GPU for each rank the tensors live on the GPUs and NCCL carries the messages.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from course.kit import Row, row
from course.kit.torchrun import attempt, run
from minillm.comm import Group
from minillm.measure import ledger
from minillm.predict import comms

TOKENS, HIDDEN = 6, 8  # tokens of each rank, so that they divide
Judged = tuple[int, int, int, bool]  # bytes sent forward, backward, collectives, right values


class Enter(torch.autograd.Function):
    """f: x, the same on every rank, enters the parallel region."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.group.all_reduce(gradient.clone()), None


class Leave(torch.autograd.Function):
    """g: shares of a sum leave the parallel region."""

    @staticmethod
    def forward(ctx, share, group):
        return group.all_reduce(share.clone())

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class GatherIn(torch.autograd.Function):
    """f, when x is cut along the sequence: [s/t, h] -> [s, h]."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return group.all_gather(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.group.reduce_scatter(gradient.contiguous()), None


class ScatterOut(torch.autograd.Function):
    """g, when its output is cut along the sequence: [s, h] -> [s/t, h]."""

    @staticmethod
    def forward(ctx, share, group):
        ctx.group = group
        return group.reduce_scatter(share)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.group.all_gather(gradient.contiguous()), None


def mlp(x: Tensor, shards: list[Tensor], group: Group, into: Any, out: Any) -> Tensor:
    """down(silu(gate x) · up x). shards: gate, up: [f/t, h], down: [h, f/t];
    into, out: the operators at the ends."""
    gate, up, down = shards
    x = into.apply(x, group)
    return out.apply((F.silu(x @ gate.T) * (x @ up.T)) @ down.T, group)


def embed(tokens: Tensor, rows: Tensor, group: Group) -> Tensor:
    """tokens: [n]; rows: [V/t, h], ids from rank·V/t on -> [n, h], the same on every rank."""
    local = tokens - group.rank * len(rows)
    outside = (local < 0) | (local >= len(rows))
    found = F.embedding(local.masked_fill(outside, 0), rows)
    return Leave.apply(found.masked_fill(outside[:, None], 0.0), group)


def vocabulary_cross_entropy(logits: Tensor, targets: Tensor, group: Group) -> Tensor:
    """logits: [n, V/t]; targets: [n] -> -log p(target): [n], the same on every rank."""
    logits = logits - group.all_reduce(logits.detach().amax(dim=1), op="max")[:, None]
    local = targets - group.rank * logits.shape[1]
    outside = (local < 0) | (local >= logits.shape[1])
    picked = logits.gather(1, local.masked_fill(outside, 0)[:, None])[:, 0]
    picked = picked.masked_fill(outside, 0.0)
    total, target = Leave.apply(torch.stack([logits.exp().sum(dim=1), picked]), group)
    return total.log() - target


# What follows runs and judges them.


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaf(x: Tensor, group: Group) -> Tensor:
    return x.clone().to(group.device).requires_grad_()


def rank_program(group: Group) -> dict[str, Any]:
    """Each part once, judged; None if not written yet."""
    return attempt(PARTS, group)


def compare(
    compute: Callable[[], Tensor],
    gradient: Tensor,
    pairs: Callable[[Tensor], list],
) -> Judged:
    """pairs(output), called afterwards: (found, wanted) tensors."""
    with ledger() as forward:
        output = compute()
    with ledger() as backward:
        output.backward(gradient.to(output.device))
    compared = [(found.detach().cpu(), wanted) for found, wanted in pairs(output)]
    right = all(torch.allclose(found, wanted, rtol=1e-7) for found, wanted in compared)
    return forward.bytes(), backward.bytes(), (forward.calls + backward.calls).total(), right


def whole_mlp(n: int) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """x, weights, the output's gradient and the output of one process, gradients in .grad."""
    x = draw(1, TOKENS * n, HIDDEN).requires_grad_()
    weights = [draw(2, 4 * n, HIDDEN), draw(3, 4 * n, HIDDEN), draw(4, HIDDEN, 4 * n)]
    weights = [weight.requires_grad_() for weight in weights]
    gate, up, down = weights
    output, gradient = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T, draw(5, TOKENS * n, HIDDEN)
    output.backward(gradient)
    return x, weights, gradient, output.detach()


def try_mlp(group: Group, sequence: bool = False) -> Judged:
    n, rank = group.world_size, group.rank
    x, weights, gradient, output = whole_mlp(n)
    shards = [leaf(w.detach().chunk(n, dim=i // 2)[rank], group) for i, w in enumerate(weights)]
    cut = (lambda whole: whole.chunk(n)[rank]) if sequence else (lambda whole: whole)
    mine = leaf(cut(x.detach()), group)
    ends = (GatherIn, ScatterOut) if sequence else (Enter, Leave)

    def pairs(found: Tensor) -> list:
        parts = [
            (shard.grad, weight.grad.chunk(n, dim=dim)[rank])
            for shard, weight, dim in zip(shards, weights, (0, 0, 1), strict=True)
        ]
        return [(found, cut(output)), (mine.grad, cut(x.grad)), *parts]

    return compare(lambda: mlp(mine, shards, group, *ends), cut(gradient), pairs)


def try_sequence(group: Group) -> Judged:
    return try_mlp(group, sequence=True)


def try_embedding(group: Group) -> Judged:
    n, table = group.world_size, draw(6, 5 * group.world_size, HIDDEN).requires_grad_()
    ids, gradient = torch.arange(TOKENS * n) % len(table), draw(7, TOKENS * n, HIDDEN)
    output = F.embedding(ids, table)
    output.backward(gradient)
    rows = leaf(table.detach().chunk(n)[group.rank], group)

    def pairs(found: Tensor) -> list:
        return [(found, output.detach()), (rows.grad, table.grad.chunk(n)[group.rank])]

    return compare(lambda: embed(ids.to(group.device), rows, group), gradient, pairs)


def try_loss(group: Group) -> Judged:
    n, logits = (
        group.world_size,
        (9 * draw(8, TOKENS * group.world_size, 5 * group.world_size)).requires_grad_(),
    )
    ids, gradient = torch.arange(TOKENS * n) % (5 * n), draw(9, TOKENS * n)
    losses = F.cross_entropy(logits, ids, reduction="none")
    losses.backward(gradient)
    part = leaf(logits.detach().chunk(n, dim=1)[group.rank], group)

    def pairs(found: Tensor) -> list:
        return [(found, losses.detach()), (part.grad, logits.grad.chunk(n, dim=1)[group.rank])]

    ids = ids.to(group.device)
    return compare(lambda: vocabulary_cross_entropy(part, ids, group), gradient, pairs)


PARTS = {
    "mlp": try_mlp,
    "embedding": try_embedding,
    "loss": try_loss,
    "sequence parallel mlp": try_sequence,
}


def predictions(n: int) -> dict[str, tuple[int, int, int]]:
    """(bytes sent forward by all ranks, backward, collectives per rank) of each part."""
    one = comms.ring_all_reduce(TOKENS * n * HIDDEN, 8, n).total_bytes
    loss = sum(comms.ring_all_reduce(count * TOKENS * n, 8, n).total_bytes for count in (1, 2))
    return {
        "mlp": (one, one, 2),
        "embedding": (one, 0, 1),
        "loss": (loss, 0, 2),
        "sequence parallel mlp": (one, one, 4),
    }


def judge(name: str, ranks: list[Judged]) -> Iterator[Row]:
    sent_forward, sent_backward, calls = predictions(len(ranks))[name]
    forward, backward, collectives, right = zip(*ranks, strict=True)
    yield row(f"{name}: bytes sent forward by all ranks", sent_forward, sum(forward), "B")
    yield row(f"{name}: backward", sent_backward, sum(backward), "B")
    yield row(f"{name}: collectives", calls, max(collectives))
    yield row(f"{name}: right values and gradients on every rank", True, all(right))


if __name__ == "__main__":
    run("lab 05", rank_program, judge)
