"""Runs lab 04's stage 1, clipping and gathered block, with its receipt, on any number of ranks.

python 04_zero.py                                   4 ranks on this machine
torchrun --nproc-per-node 4 04_zero.py              the same under torchrun
torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \\
    --rdzv-endpoint HOST:29500 04_zero.py           on each of two nodes

With a GPU for each rank the tensors live on the GPUs and NCCL carries the messages.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from course.kit import Row, row
from course.kit.torchrun import attempt, run
from minillm.comm import Group
from minillm.measure import ledger, memory
from minillm.predict import comms

STEPS, LR = 3, 0.1


class ZeroOne:
    """An optimizer over this rank's part of `weights`:
    [P], flat, the same size on every rank, divisible by N."""

    def __init__(
        self,
        weights: Tensor,
        group: Group,
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ):
        """make([parameter, ...]) gives a torch optimizer; keep it as self.optimizer.
        Rank 0's weights count."""
        raise NotImplementedError

    def step(self, gradient: Tensor) -> None:
        """gradient: [P], of this rank's batch.
        Afterwards `weights` are the updated ones, on every rank."""
        raise NotImplementedError


def clip(gradient: Tensor, numel: int, max_norm: float, group: Group) -> Tensor:
    """gradient: [n], this rank's shard of a flat gradient of numel elements, padding behind them.
    Scales it in place so that the whole gradient has a norm of at most max_norm; returns the norm
    before that."""
    raise NotImplementedError


class GatheredBlock(torch.autograd.Function):
    """compute(x, weights) of one block whose weights are spread over the group:
    gather, compute, free."""

    @staticmethod
    def forward(ctx, x, shard, compute, group):
        """x: this rank's activations; shard: [P/N]
        -> compute(x, weights), weights: [P] from all ranks."""
        raise NotImplementedError

    @staticmethod
    def backward(ctx, output_gradient):
        """Gradients of x and of the shard (averaged over the ranks); None for the two others."""
        raise NotImplementedError


# What follows runs and judges them.


def sizes(n: int) -> tuple[int, int]:
    """Elements of the flat weights of stage 1, and of one block:
    multiples of the number of ranks."""
    return 10_000 * n, 64 * n


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rank_program(group: Group) -> dict[str, Any]:
    """Each part once: (bytes this rank sent, whether its values are right, what it held);
    None if not written yet."""
    return attempt(PARTS, group)


def try_stage_one(group: Group) -> tuple[int, bool, int]:
    """A few steps of SGD with momentum; held: the optimizer's bytes."""
    n, size = group.world_size, sizes(group.world_size)[0]
    weights = draw(group.rank, size).to(group.device)
    zero = ZeroOne(weights, group, lambda shards: torch.optim.SGD(shards, LR, momentum=0.9))
    alone = nn.Parameter(draw(0, size))
    sgd = torch.optim.SGD([alone], LR, momentum=0.9)
    for step in range(STEPS):
        gradients = [draw(1000 * step + rank + n, size) for rank in range(n)]
        with ledger() as led:
            zero.step(gradients[group.rank].to(group.device))
        alone.grad = torch.stack(gradients).mean(0)
        sgd.step()
    right = torch.allclose(weights.cpu(), alone.detach(), rtol=1e-4, atol=1e-5)
    return led.bytes(), right, memory(optimizer=zero.optimizer).live.optimizer


def try_clip(group: Group) -> tuple[int, bool, int]:
    """A gradient that does not divide, behind it what happened to be in memory;
    held: collectives."""
    n, numel = group.world_size, 1000 * group.world_size - 1
    flat = torch.cat([draw(7, numel), torch.full((1,), 1e6)])
    shard = flat.chunk(n)[group.rank].clone().to(group.device)
    with ledger() as led:
        norm = clip(shard, numel, 1.0, group)
    whole = group.all_gather(shard)[:numel].cpu()
    right = torch.isclose(norm.cpu(), flat[:numel].norm(), rtol=1e-4) and torch.isclose(
        whole.norm(), torch.tensor(1.0), rtol=1e-3
    )
    return led.bytes(), bool(right), sum(led.calls.values())


def try_block(group: Group) -> tuple[int, bool, int]:
    """One block forward and backward; held: collectives."""
    n, size = group.world_size, sizes(group.world_size)[1]

    def compute(x: Tensor, weights: Tensor) -> Tensor:
        into, out = weights.view(2, 4, -1)
        return x + torch.tanh(x @ into) @ out.T

    flat = draw(3, size) / 4
    shard = nn.Parameter(flat.chunk(n)[group.rank].clone().to(group.device))
    inputs = [draw(50 + rank, 6, 4) for rank in range(n)]
    x = inputs[group.rank].to(group.device).requires_grad_()
    with ledger() as led:
        GatheredBlock.apply(x, shard, compute, group).square().mean().backward()
    whole = flat.clone().requires_grad_()
    torch.stack([compute(given, whole).square().mean() for given in inputs]).mean().backward()
    right = torch.allclose(shard.grad.cpu(), whole.grad.chunk(n)[group.rank], rtol=1e-3, atol=1e-6)
    return led.bytes(), right, sum(led.calls.values())


PARTS = {"stage 1": try_stage_one, "clip": try_clip, "gathered block": try_block}


def predictions(n: int) -> dict[str, tuple[int, str, int]]:
    """(bytes sent by all ranks, what is held, how much of it) of each part."""
    size, block = sizes(n)
    return {
        "stage 1": (
            comms.ring_all_reduce(size, 4, n).total_bytes,
            "optimizer bytes per rank",
            4 * size // n,
        ),
        "clip": (comms.ring_all_reduce(1, 4, n).total_bytes, "collectives", 1),
        "gathered block": (3 * comms.ring_all_gather(block, 4, n).total_bytes, "collectives", 3),
    }


def judge(name: str, ranks: list[tuple[int, bool, int]]) -> Iterator[Row]:
    expected, what, held = predictions(len(ranks))[name]
    sent, right, most = zip(*ranks, strict=True)
    yield row(f"{name}: bytes sent by all ranks", expected, sum(sent), "B")
    yield row(f"{name}: right values on every rank", True, all(right))
    yield row(f"{name}: {what}", held, max(most))


if __name__ == "__main__":
    run("lab 04", rank_program, judge)
