"""`launch` under torchrun: this process already is a rank, in a world that torchrun made."""

import os
from typing import Any

import torch.distributed as dist

from minillm.comm.launch import worker


def in_place(job: worker.Job) -> list[Any]:
    """Under torchrun: this process already is a rank."""
    if "MINILLM_RANK" in os.environ or dist.is_initialized():
        raise ValueError("launch was called inside a rank: call it once, outside, and use group.subgroup inside")
    rank, local_world = int(os.environ["RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    world = int(os.environ["WORLD_SIZE"])
    job = worker.Job(**{**vars(job), "nproc": world, "threads": max(1, (os.cpu_count() or 1) // local_world)})
    with worker.world_group(job, None, rank, wait_s=job.timeout_s) as group:
        return group.gather_objects(job.function(group, *job.args))


def is_root() -> bool:
    """True in the process that should print: outside torchrun, or torchrun's rank 0."""
    return os.environ.get("RANK", "0") == "0"
