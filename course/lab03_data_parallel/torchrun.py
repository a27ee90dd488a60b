"""Trains lab 03's replicas with your averaging, buckets and overlap on any number of processes.

python 03_data_parallel.py                                   4 ranks on this machine
torchrun --nproc-per-node 4 03_data_parallel.py              the same under torchrun
torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \\
    --rdzv-endpoint HOST:29500 03_data_parallel.py           on each of two nodes

With a GPU for each rank the replicas live on the GPUs and NCCL carries the gradients.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from course.kit import Row, answers_of, row
from course.kit.torchrun import attempt, run
from course.lab03_data_parallel.rank_programs import CLOSE, Bucket, TrainingCase, loss_of
from minillm.comm import Group
from minillm.measure import ledger
from minillm.predict.training import sharding as predict

LAB = "03_data_parallel"
STEPS, CAP_BYTES, LR = 3, 12 * 12 * 8, 0.1


def average_gradients(model: nn.Module, group: Group) -> None:
    """After backward: every gradient becomes its mean over the ranks.
    Parameters without one are left alone."""
    # BEGIN SOLUTION
    return answers_of(LAB).average_gradients(model, group)
    # END SOLUTION


def make_buckets(parameters: Iterable[nn.Parameter], cap_bytes: int) -> list[Bucket]:
    """Pack the trainable parameters, last one first;
    each .grad becomes a view of its bucket's flat tensor."""
    # BEGIN SOLUTION
    return answers_of(LAB).make_buckets(parameters, cap_bytes)
    # END SOLUTION


def overlap(buckets: list[Bucket], group: Group) -> Callable[[], None]:
    """Start each bucket's all-reduce during backward, in the order of the list;
    returns finish(), which waits."""
    # BEGIN SOLUTION
    return answers_of(LAB).overlap(buckets, group)
    # END SOLUTION


def weighted_loss(nll: Tensor, counts: Tensor, group: Group) -> Tensor:
    """What each rank calls backward on,
    so that averaged gradients are those of the mean over all tokens."""
    # BEGIN SOLUTION
    return answers_of(LAB).weighted_loss(nll, counts, group)
    # END SOLUTION


# What follows trains replicas with them, and judges.


def rank_program(group: Group) -> dict[str, Any]:
    """Train with each form; None for what is not written yet."""
    case = TrainingCase(world_size=group.world_size, steps=STEPS, unused=False, seed=3)
    programs = {"naive": naive, "overlapped": overlapped, "weighted": weighted}
    return attempt(programs, group, case)


def naive(group: Group, case: TrainingCase) -> dict[str, Any]:
    model = case.model().to(group.device)

    def backward(step: int) -> None:
        model.zero_grad()
        loss_of(model, *(part.to(group.device) for part in case.data(step, group.rank))).backward()
        average_gradients(model, group)

    return trained(model, backward, group, case)


def overlapped(group: Group, case: TrainingCase) -> dict[str, Any]:
    # on every second rank gradients become ready in another order
    model = case.model(flip=group.rank % 2 == 1).to(group.device)
    buckets = make_buckets(model.parameters(), CAP_BYTES)
    finish, early = overlap(buckets, group), []

    def backward(step: int) -> None:
        for bucket in buckets:
            bucket.flat.zero_()
        with ledger() as led:
            batch = [part.to(group.device) for part in case.data(step, group.rank)]
            loss_of(model, *batch).backward()
            early.append(led.calls["all_reduce"])  # of those started, before anybody waits
        finish()

    return trained(model, backward, group, case) | {"early": early[-1], "buckets": len(buckets)}


def weighted(group: Group, case: TrainingCase) -> dict[str, Any]:
    """One step; rank r has 1 + r samples that count."""
    counted = [torch.arange(case.batch) < 1 + rank % case.batch for rank in range(group.world_size)]
    x, y = case.data(0)
    alone = case.model()
    samples = (alone(x) - y).square().mean(1)[torch.cat(counted)]
    right = torch.autograd.grad(samples.mean(), alone.last.weight)[0]

    model = case.model().to(group.device)
    x, y = (part.to(group.device) for part in case.data(0, group.rank))
    nll, counts = (
        (model(x) - y).square().mean(1),
        counted[group.rank].to(group.device, torch.float64),
    )
    (gradient,) = torch.autograd.grad(weighted_loss(nll, counts, group), model.last.weight)
    averaged = group.all_reduce(gradient, op="avg").cpu()
    return {"right": bool((averaged - right).norm() <= CLOSE * right.norm())}


def trained(
    model: nn.Module,
    backward: Callable[[int], None],
    group: Group,
    case: TrainingCase,
) -> dict[str, Any]:
    """STEPS steps of SGD: whether gradients are one process's and replicas the same bits,
    and what was sent."""
    expected, _ = case.alone()
    right, sent, calls = True, 0, 0
    for step, wanted in enumerate(expected):
        with ledger() as led:
            backward(step)
        sent, calls = sent + led.bytes("all_reduce"), calls + led.calls["all_reduce"]
        for name, parameter in model.named_parameters():
            if wanted[name] is None:
                continue
            error = (parameter.grad.cpu() - wanted[name]).norm()
            right &= bool(error <= CLOSE * wanted[name].norm())
            with torch.no_grad():
                parameter -= LR * parameter.grad
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyone = group.all_gather(weights[None])
    payload = sum(gradient.nbytes for gradient in expected[0].values() if gradient is not None)
    return {
        "right": right,
        "same": bool((everyone == everyone[0]).all()),
        "bytes": sent / STEPS,
        "predicted": predict.gradient_bytes(payload, group.world_size),
        "all_reduces": calls / STEPS,
        "tensors": sum(gradient is not None for gradient in expected[0].values()),
    }


def judge(name: str, ranks: list[dict[str, Any]]) -> Iterator[Row]:
    right = all(rank["right"] for rank in ranks)
    yield row(f"{name}: gradients of one process on every rank", True, right)
    if name == "weighted":
        return
    sent, predicted = (sum(rank[key] for rank in ranks) for key in ("bytes", "predicted"))
    calls = ranks[0].get("buckets", ranks[0]["tensors"])
    yield row(f"{name}: replicas are the same bits", True, all(rank["same"] for rank in ranks))
    yield row(f"{name}: bytes of all ranks per step, 2P(N-1)", round(predicted), round(sent), "B")
    yield row(f"{name}: all-reduces per step", calls, ranks[0]["all_reduces"])
    if "early" in ranks[0]:
        early = min(rank["early"] for rank in ranks)
        yield row(f"{name}: of these, started during backward", calls, early)


if __name__ == "__main__":
    run("lab 03", rank_program, judge)
