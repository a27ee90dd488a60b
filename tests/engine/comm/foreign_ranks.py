"""Ranks that minillm has not started: one all-reduce and one step of BucketedDDP beside torch's DDP.

Run by `torchrun`, by `accelerate launch`, and by test_foreign_ranks.py through `mp.spawn`.
"""

import copy
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minillm.comm import Group, HangError
from minillm.measure import ledger
from minillm.parallel.data_parallel.ddp import BucketedDDP


def check(group: Group) -> str:
    rank, n = group.rank, group.world_size
    with ledger() as led:
        assert group.all_reduce(torch.tensor([float(rank)])).item() == n * (n - 1) / 2
    assert led.calls == {"all_reduce": 1} and led.bytes() > 0
    (posted,) = [posted for posted in group.world.recorder.posted(rank) if posted.name == group.name]
    assert posted.op == "all_reduce" and not posted.waiting

    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    theirs = DistributedDataParallel(copy.deepcopy(ours), process_group=group.process_group)
    ours = BucketedDDP(ours, group, bucket_cap_mb=1e-4)
    x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    for model in (ours, theirs):
        model(x).square().mean().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-14)
    return f"rank {rank} of {n}: equal gradients"


def hang(group: Group) -> str:
    """Rank 1 does not come."""
    if group.rank == 1:
        time.sleep(8)
        return "late"
    try:
        group.all_reduce(torch.ones(3))
    except HangError as error:
        return error.table
    return "no hang"


def spawned(rank: int, n: int, port: int, folder: str) -> None:
    """A rank of `mp.spawn`: nothing in its environment says so. First all is well, then a rank does not come."""
    store = dist.TCPStore("127.0.0.1", port, n, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n)
    told = [check(Group.from_process_group()), hang(Group.from_process_group(timeout=2))]
    with open(os.path.join(folder, f"{rank}"), "w") as file:
        json.dump(told, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "accelerate":
        from accelerate import Accelerator

        print(check(Group.from_process_group(device=Accelerator(cpu=True).device)))
    else:
        dist.init_process_group("gloo")
        print(check(Group.from_process_group()))
    dist.destroy_process_group()
