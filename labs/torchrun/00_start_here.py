"""The mean over all ranks, and its receipt, on as many processes as you like.

python 00_start_here.py                                    4 ranks on this machine
torchrun --nproc-per-node 4 00_start_here.py               the same under torchrun
torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \\
    --rdzv-endpoint HOST:29500 00_start_here.py            on each of two nodes
"""

import torch

from course.kit import answers_of, receipt, row
from minillm import measure
from minillm.comm import Group, is_root, launch
from minillm.predict import comms

NUM_ELEMENTS = 1 << 20


def average(group: Group, x: torch.Tensor) -> torch.Tensor:
    """x: [n], another one on each rank -> [n]: their mean, on every rank. x is left alone."""
    raise NotImplementedError


def program(group: Group) -> tuple[float, int] | None:
    """What one rank does: (the mean that it got, bytes that it sent);
    None while `average` is not written yet."""
    x = torch.full((NUM_ELEMENTS,), float(group.rank), device=group.device)
    try:
        with measure.ledger() as led:
            mean = average(group, x)
    except NotImplementedError:
        return None
    return mean[0].item(), led.bytes("all_reduce")


if __name__ == "__main__":
    results = launch(program, 4)
    world_size = len(results)
    predicted = comms.ring_all_reduce(NUM_ELEMENTS, 4, world_size).sent_per_rank
    if is_root() and None in results:
        print("average: not written yet")
    elif is_root():
        rows = []
        for rank, (mean, _) in enumerate(results):
            rows.append(row(f"mean on rank {rank}", (world_size - 1) / 2, mean))
        for rank, (_, sent) in enumerate(results):
            rows.append(row(f"bytes sent by rank {rank}", predicted[rank], sent, "B"))
        print(receipt(f"{world_size} ranks", rows))
