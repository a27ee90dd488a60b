"""Runs lab 01's collectives, with the same receipt, on as many processes as you like.

python 01_collectives.py                                   4 ranks on this machine
torchrun --nproc-per-node 4 01_collectives.py              the same under torchrun
torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \\
    --rdzv-endpoint HOST:29500 01_collectives.py           on each of two nodes

With a GPU for each rank the tensors live on the GPUs and NCCL carries the messages.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from course.kit import Row, answers_of, row
from course.kit.torchrun import attempt, run
from minillm.comm import Group, Mesh
from minillm.measure import ledger
from minillm.predict import comms

LAB = "01_collectives"


def reduce_scatter(x: torch.Tensor, group: Group) -> torch.Tensor:
    """x: [N * n] on each rank -> [n]: chunk number group.rank of the sum over the ranks.
    x is left alone."""
    # BEGIN SOLUTION
    return answers_of(LAB).reduce_scatter(x, group)
    # END SOLUTION


def all_gather(x: torch.Tensor, group: Group) -> torch.Tensor:
    """x: [n] on each rank -> [N * n] on every rank: the ranks' tensors in rank order.
    x is left alone."""
    # BEGIN SOLUTION
    return answers_of(LAB).all_gather(x, group)
    # END SOLUTION


def all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    """x: [N * n], replaced in place by its sum over the ranks; returns x."""
    # BEGIN SOLUTION
    return answers_of(LAB).all_reduce(x, group)
    # END SOLUTION


def broadcast(x: torch.Tensor, group: Group, root: int = 0) -> torch.Tensor:
    """x: [n], replaced in place by root's x on every rank, by a tree; returns x."""
    # BEGIN SOLUTION
    return answers_of(LAB).broadcast(x, group, root)
    # END SOLUTION


def hierarchical_all_reduce(
    x: torch.Tensor,
    group: Group,
    node: Group,
    across: Group,
) -> torch.Tensor:
    """x, replaced in place by its sum over all ranks, as little as possible of it across nodes;
    returns x."""
    # BEGIN SOLUTION
    return answers_of(LAB).hierarchical_all_reduce(x, group, node, across)
    # END SOLUTION


def all_to_all(x: torch.Tensor, group: Group) -> torch.Tensor:
    """x: [N * n], part j is for rank j -> [N * n], part j is from rank j. x is left alone."""
    # BEGIN SOLUTION
    return answers_of(LAB).all_to_all(x, group)
    # END SOLUTION


# What follows runs and judges them.


def rank_program(group: Group) -> dict[str, Any]:
    """Each collective once: the bytes this rank sent, and whether its values are right."""
    n, r, per_node = group.world_size, group.rank, ranks_per_node(group.world_size)
    size = 10_000 * n
    seeds = [torch.Generator().manual_seed(i) for i in range(n)]
    inputs = [torch.randint(0, 999, (size,), generator=seed).float() for seed in seeds]
    x, total = inputs[r].to(group.device), torch.stack(inputs).sum(0)
    mesh = Mesh(group, across=n // per_node, node=per_node)
    trials = {
        "reduce-scatter": (lambda: reduce_scatter(x, group), total.chunk(n)[r]),
        "all-gather": (
            lambda: all_gather(x.chunk(n)[0], group),
            torch.cat([i.chunk(n)[0] for i in inputs]),
        ),
        "all-reduce": (lambda: all_reduce(x.clone(), group), total),
        "broadcast": (lambda: broadcast(x.clone(), group, root=n - 1), inputs[-1]),
        "two levels": (
            lambda: hierarchical_all_reduce(x.clone(), group, mesh.node, mesh.across),
            total,
        ),
        "all-to-all": (lambda: all_to_all(x, group), torch.cat([i.chunk(n)[r] for i in inputs])),
    }
    return attempt({name: partial(sent_and_right, *trial) for name, trial in trials.items()})


def sent_and_right(call: Callable[[], torch.Tensor], wanted: torch.Tensor) -> tuple[int, bool]:
    """The bytes that this rank sent in one call, and whether its values are right."""
    with ledger() as led:
        result = call()
    return led.bytes(), torch.equal(result.cpu(), wanted)


def ranks_per_node(world_size: int) -> int:
    """Really several nodes: their size.
    One node: two halves stand for two nodes, if there are two halves."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if local < world_size and world_size % local == 0:
        return local
    return world_size // 2 if world_size % 2 == 0 else world_size


def costs(n: int) -> dict[str, comms.Cost]:
    size = 10_000 * n
    return {
        "reduce-scatter": comms.ring_reduce_scatter(size, 4, n),
        "all-gather": comms.ring_all_gather(size, 4, n),
        "all-reduce": comms.ring_all_reduce(size, 4, n),
        "broadcast": comms.tree_broadcast(size, 4, n, root=n - 1),
        "two levels": comms.hierarchical_all_reduce(size, 4, n, ranks_per_node(n)).total,
        "all-to-all": comms.pairwise_all_to_all(size, 4, n),
    }


def judge(name: str, ranks: list[tuple[int, bool]]) -> Iterator[Row]:
    cost, (sent, right) = costs(len(ranks))[name], zip(*ranks, strict=True)
    yield row(f"{name}: bytes sent by all ranks", cost.total_bytes, sum(sent), "B")
    yield row(f"{name}: bytes sent by the busiest rank", max(cost.sent_per_rank), max(sent), "B")
    yield row(f"{name}: right values on every rank", True, all(right))


if __name__ == "__main__":
    run("lab 01", rank_program, judge)
