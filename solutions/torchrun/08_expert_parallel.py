"""Sends rows to their experts and back, and averages gradients, on any number of processes.

python 08_expert_parallel.py                                4 ranks on this machine
torchrun --nproc-per-node 4 08_expert_parallel.py           the same under torchrun
torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \\
    --rdzv-endpoint HOST:29500 08_expert_parallel.py        on each of two nodes

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
from minillm.predict.training import moe

EXPERTS_PER_RANK, TOKENS_PER_EXPERT, HIDDEN = 2, 32, 16


def to_experts(rows: Tensor, counts: Tensor, group: Group) -> tuple[Tensor, Tensor, Any]:
    """rows: [n, hidden] of this rank's tokens, by expert;
    counts: [E], int64, rows for each expert of all ranks.

    -> (rows for this rank's experts, by expert and then by source rank; counts: [E / N];
    what from_experts needs).
    """
    n, each = group.world_size, len(counts) // group.world_size
    received = group.all_to_all(counts).view(n, each)
    sent, come = counts.view(n, each).sum(1).tolist(), received.sum(1).tolist()
    arrived = group.all_to_all(rows, input_splits=sent, output_splits=come)
    expert = torch.arange(each, device=rows.device).repeat(n)
    order = expert.repeat_interleave(received.flatten()).argsort(stable=True)
    return arrived[order], received.sum(0), (order, sent, come)


def from_experts(rows: Tensor, plan: Any, group: Group) -> Tensor:
    """The experts' answers, in the order that to_experts gave
    -> [n, hidden], in the order that it was given."""
    order, sent, come = plan
    by_source = torch.empty_like(rows).index_copy(0, order, rows)
    return group.all_to_all(by_source, input_splits=come, output_splits=sent)


def average_gradients(
    router: Tensor,
    experts: Tensor,
    data: Group,
    replicas: Group,
) -> tuple[Tensor, Tensor]:
    """Gradients of the mean over all tokens of `data`,
    from those of each rank's mean over its own tokens.

    data: all ranks that share the batch.
    replicas: those that hold the same experts; every rank has the whole router.
    """
    return data.all_reduce(router) / data.world_size, replicas.all_reduce(experts) / data.world_size


# What follows runs and judges them.


def rank_program(group: Group) -> dict[str, Any]:
    """Each part once: (bytes this rank sent, whether its values are right);
    None if not written yet."""
    return attempt(PARTS, group)


def try_exchange(group: Group) -> tuple[int, bool]:
    """Every expert is chosen equally often, and multiplies its rows by its number."""
    num_experts = EXPERTS_PER_RANK * group.world_size
    draw = torch.Generator().manual_seed(group.rank)
    pairs = TOKENS_PER_EXPERT * num_experts  # so that they divide
    chosen = (torch.arange(pairs) % num_experts).sort().values.to(group.device)
    rows = torch.randn(pairs, HIDDEN, generator=draw).to(group.device)
    counts = torch.bincount(chosen, minlength=num_experts)
    with ledger() as led:
        arrived, own, plan = to_experts(rows, counts, group)
        numbers = EXPERTS_PER_RANK * group.rank + torch.arange(EXPERTS_PER_RANK, device=rows.device)
        factors = numbers.repeat_interleave(torch.as_tensor(own, device=rows.device))
        home = from_experts(arrived * factors[:, None], plan, group)
    sent = sum(event.bytes for event in led.events if event.dtype.startswith("float"))
    return sent, len(arrived) == pairs and torch.equal(home, rows * chosen[:, None])


def try_average(group: Group) -> tuple[int, bool]:
    """Two replicas of each expert, ranks r and r + n / 2; of an odd number of ranks, one."""
    n = group.world_size
    ep = n // replicas_of(n)
    alike = [group.subgroup(range(at, n, ep), f"replicas {at}") for at in range(ep)]
    replicas = alike[group.rank % ep]
    router = torch.full((8 * n,), float(group.rank), device=group.device)
    experts = torch.full((8,), float(n * (1 + group.rank)), device=group.device)
    with ledger() as led:
        mean, own = average_gradients(router, experts, group, replicas)
    right = (n - 1) / 2, sum(1.0 + rank for rank in replicas.ranks)
    pairs = zip((mean, own), right, strict=True)
    return led.bytes(), all(torch.allclose(x, torch.full_like(x, wanted)) for x, wanted in pairs)


def replicas_of(n: int) -> int:
    """Ranks that hold the same experts."""
    return 2 if n % 2 == 0 else 1


PARTS = {"exchange": try_exchange, "average": try_average}


def predictions(n: int) -> dict[str, int]:
    """Bytes sent by all ranks: two all-to-alls of rows,
    and all-reduces of the router's gradient over all ranks, of 8 experts' over their replicas."""
    pairs, alike = TOKENS_PER_EXPERT * EXPERTS_PER_RANK * n, replicas_of(n)
    return {
        "exchange": round(n * 2 * moe.all_to_all_bytes(pairs, 1, HIDDEN, 4, n)),
        "average": 2 * (n - 1) * 4 * 8 * n + (n // alike) * 2 * (alike - 1) * 4 * 8,
    }


def judge(name: str, ranks: list[tuple[int, bool]]) -> Iterator[Row]:
    sent, right = zip(*ranks, strict=True)
    yield row(f"{name}: bytes sent by all ranks", predictions(len(ranks))[name], sum(sent), "B")
    yield row(f"{name}: right values on every rank", True, all(right))


if __name__ == "__main__":
    run("lab 08", rank_program, judge)
