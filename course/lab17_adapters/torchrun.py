"""Runs lab 17's adapters beside cut layers on any number of processes.

python 17_adapters.py                                   4 ranks on this machine
torchrun --nproc-per-node 4 17_adapters.py              the same under torchrun
torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \\
    --rdzv-endpoint HOST:29500 17_adapters.py           on each of two nodes

With a GPU for each rank the tensors live on the GPUs and NCCL carries the messages.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from course.kit import Row, row
from course.kit.torchrun import attempt, run
from minillm.comm import Group
from minillm.measure import ledger
from minillm.predict import comms

TOKENS, RANK, WIDTH, STEPS = 6, 3, 4, 3  # width of each rank's part of a layer
Judged = tuple[int, int, bool]  # bytes sent, collectives, right values


def finish_gradients(
    kind: str,
    grad_A: Tensor,
    grad_B: Tensor,
    group: Group,
) -> tuple[Tensor, Tensor]:
    """kind: "column" (W and B cut by rows, A whole) or "row" (W and A cut by columns, B whole).
    -> the gradients of what this rank holds of A and B, for the loss of all ranks together."""
    # BEGIN SOLUTION
    if kind == "column":
        return group.all_reduce(grad_A.clone()), grad_B
    return grad_A, group.all_reduce(grad_B.clone())
    # END SOLUTION


# What follows runs and judges it.


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def train(x: Tensor, dy: Tensor, a: Tensor, b: Tensor, finish: Any) -> tuple[Tensor, Tensor]:
    """A and B after some steps down a fixed slope; finish: of the gradients of A and B."""
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    for _ in range(STEPS):
        a.grad = b.grad = None
        ((x @ a.T) @ b.T).backward(dy)
        with torch.no_grad():
            for matrix, gradient in zip((a, b), finish(a.grad, b.grad), strict=True):
                matrix -= 0.1 * gradient
    return a.detach(), b.detach()


def try_kind(group: Group, kind: str) -> Judged:
    """Training a cut adapter, beside training the whole one in one process."""
    n, rank = group.world_size, group.rank
    inputs, outputs = WIDTH * n, 2 * WIDTH * n
    x, dy = draw(1, TOKENS, inputs), draw(2, TOKENS, outputs)
    a, b = draw(3, RANK, inputs), draw(4, outputs, RANK)
    whole = train(x, dy, a, b, lambda grad_A, grad_B: (grad_A, grad_B))

    def mine(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return (a, b.chunk(n)[rank]) if kind == "column" else (a.chunk(n, 1)[rank], b)

    x, dy = (x, dy.chunk(n, 1)[rank]) if kind == "column" else (x.chunk(n, 1)[rank], dy)
    given = [part.to(group.device) for part in (x, dy, *mine(a, b))]
    with ledger() as led:
        found = train(*given, lambda grad_A, grad_B: finish_gradients(kind, grad_A, grad_B, group))
    pairs = zip(found, mine(*whole), strict=True)
    right = all(torch.allclose(part.cpu(), wanted, rtol=1e-9) for part, wanted in pairs)
    return led.bytes(), led.calls.total(), right


def try_column(group: Group) -> Judged:
    return try_kind(group, "column")


def try_row(group: Group) -> Judged:
    return try_kind(group, "row")


PARTS = {"column layer": try_column, "row layer": try_row}


def rank_program(group: Group) -> dict[str, Any]:
    """Each part once, judged; None if not written yet."""
    return attempt(PARTS, group)


def judge(name: str, ranks: list[Judged]) -> Iterator[Row]:
    n = len(ranks)
    numel = RANK * WIDTH * n * (1 if name == "column layer" else 2)
    sent, collectives, right = zip(*ranks, strict=True)
    total = STEPS * comms.ring_all_reduce(numel, 8, n).total_bytes
    yield row(f"{name}: bytes sent by all ranks in {STEPS} steps", total, sum(sent), "B")
    yield row(f"{name}: collectives", STEPS, max(collectives))
    yield row(f"{name}: A and B as in one process, on every rank", True, all(right))


if __name__ == "__main__":
    run("lab 17", rank_program, judge)
