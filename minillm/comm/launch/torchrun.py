"""`launch` under torchrun: this process already is a rank, in a world that torchrun made."""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from minillm.comm.diagnostics.flight_recorder import RUNNING, Board
from minillm.comm.launch import worker


def in_place(job: worker.Job) -> list[Any]:
    """Under torchrun: this process already is a rank."""
    if "MINILLM_RANK" in os.environ or dist.is_initialized():
        raise ValueError("launch was called inside a rank: call it once, outside, and use group.subgroup inside")
    rank, local_world = int(os.environ["RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    world = int(os.environ["WORLD_SIZE"])
    job = worker.Job(**{**vars(job), "nproc": world, "threads": max(1, (os.cpu_count() or 1) // local_world)})
    with worker.world_group(job, None, rank, wait_s=job.timeout_s) as group:
        group.world.board = _shared_board(rank, local_world)
        group.world.board.set_state(rank, RUNNING)
        result = job.function(group, *job.args)
        return group.gather_objects(result)


def _shared_board(rank: int, local_world: int) -> Board:
    """One board per node. The file has no name once everybody has opened it, so nothing is left behind."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    run = f"{os.environ.get('TORCHELASTIC_RUN_ID', 'run')}-{os.environ.get('MASTER_PORT', '0')}-{rank - local_rank}"
    path = Path(tempfile.gettempdir(), f"minillm-{os.getuid()}-{run}.board")
    if local_rank == 0:
        path.unlink(missing_ok=True)
        board = Board(path, local_world, rank)
    dist.barrier()
    if local_rank != 0:
        board = Board(path, local_world, rank - local_rank)
    dist.barrier()
    if local_rank == 0:
        path.unlink(missing_ok=True)
    return board


def is_root() -> bool:
    """True in the process that should print: outside torchrun, or torchrun's rank 0."""
    return os.environ.get("RANK", "0") == "0"
