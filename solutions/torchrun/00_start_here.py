"""The mean over all ranks, and its receipt, on as many processes as you like.

python 00_start_here.py                                    4 ranks on this machine
torchrun --nproc-per-node 4 00_start_here.py               the same under torchrun
torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \\
    --rdzv-endpoint HOST:29500 00_start_here.py            on each of two nodes
"""

from collections.abc import Iterator
from typing import Any

import torch

from course.kit import Row, answers_of, row
from course.kit.torchrun import attempt, run
from minillm import measure
from minillm.comm import Group
from minillm.predict import comms

NUM_ELEMENTS = 1 << 20


def average(group: Group, x: torch.Tensor) -> torch.Tensor:
    """x: [n], another one on each rank -> [n]: their mean, on every rank. x is left alone."""
    return answers_of("00_start_here").average(group, x)


# What follows runs and judges it.


def rank_program(group: Group) -> dict[str, Any]:
    """What one rank does; None while `average` is not written yet."""
    return attempt({"average": try_average}, group)


def try_average(group: Group) -> tuple[float, int]:
    """The mean that this rank got, and the bytes that it sent."""
    x = torch.full((NUM_ELEMENTS,), float(group.rank), device=group.device)
    with measure.ledger() as led:
        mean = average(group, x)
    return mean[0].item(), led.bytes("all_reduce")


def judge(name: str, ranks: list[tuple[float, int]]) -> Iterator[Row]:
    predicted = comms.ring_all_reduce(NUM_ELEMENTS, 4, len(ranks)).sent_per_rank
    for rank, (mean, _) in enumerate(ranks):
        yield row(f"mean on rank {rank}", (len(ranks) - 1) / 2, mean)
    for rank, (_, sent) in enumerate(ranks):
        yield row(f"bytes sent by rank {rank}", predicted[rank], sent, "B")


if __name__ == "__main__":
    run("lab 00", rank_program, judge)
