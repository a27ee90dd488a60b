"""Runs lab 10's commit behind a barrier and its reshard on any number of processes.

python 10_fault_tolerance.py                                4 ranks on this machine
torchrun --nproc-per-node 4 10_fault_tolerance.py           the same under torchrun
torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \\
    --rdzv-endpoint HOST:29500 10_fault_tolerance.py        on each of two nodes that share a disk

TMPDIR says where the files go; they are removed again.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from course.kit import Row, row
from course.kit.torchrun import attempt, run
from minillm.comm import Group
from minillm.files import flush

NUMEL, ITEMSIZE = 1003, 4  # a number that divides over nothing


def bounds(rank: int, world_size: int) -> tuple[int, int]:
    """The elements that a rank holds, from and up to."""
    return NUMEL * rank // world_size, NUMEL * (rank + 1) // world_size


def save(shard: Tensor, folder: Path, group: Group) -> None:
    """shard: elements `bounds(rank, world_size)`. When `folder` is there, it holds files "0", "1",
    ... of all ranks (shard.numpy().tobytes()) and "manifest.json", {"ranks": world_size}; until
    then it has another name. `write(path, data)` makes a file last, `flush(folder)` the names in a
    folder."""
    # BEGIN SOLUTION
    draft = folder.with_name(f".{folder.name}")
    draft.mkdir(exist_ok=True)
    write(draft / str(group.rank), shard.numpy().tobytes())
    group.barrier()
    if group.rank == 0:
        write(draft / "manifest.json", json.dumps({"ranks": group.world_size}).encode())
        flush(draft)
        os.rename(draft, folder)
        flush(folder.parent)
    group.barrier()
    # END SOLUTION


def load(folder: Path, rank: int, world_size: int, read) -> Tensor:
    """What `rank` of `world_size` holds, whoever saved it:
    `read(path, offset, nbytes)` its bytes, and no others."""
    # BEGIN SOLUTION
    ranks = json.loads((folder / "manifest.json").read_text())["ranks"]
    (first, last), found = bounds(rank, world_size), b""
    for saver in range(ranks):
        start, stop = bounds(saver, ranks)
        begin, end = max(first, start), min(last, stop)
        if begin < end:
            found += read(folder / str(saver), (begin - start) * ITEMSIZE, (end - begin) * ITEMSIZE)
    return torch.frombuffer(bytearray(found), dtype=torch.float32)
    # END SOLUTION


# What follows runs and judges them.


def write(path: Path, data: bytes) -> None:
    """It is on the disk when this returns."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def rank_program(group: Group) -> dict[str, Any]:
    """Saved by all ranks, loaded as by one rank more; None if it is not written yet."""
    made = tempfile.mkdtemp(prefix="minillm-lab10-") if group.rank == 0 else None
    place = Path(group.gather_objects(made)[0])
    try:
        return attempt({"save and load": save_and_load}, group, place / "step-1")
    finally:
        group.barrier()
        shutil.rmtree(place, ignore_errors=True)


def save_and_load(group: Group, folder: Path) -> dict[str, Any]:
    whole, count = torch.arange(NUMEL, dtype=torch.float32).sqrt(), [0]
    first, last = bounds(group.rank, group.world_size)
    save(whole[first:last].clone(), folder, group)
    complete = sorted(path.name for path in folder.iterdir()) == sorted(
        [*map(str, range(group.world_size)), "manifest.json"]
    )

    def read(path: Path, offset: int, nbytes: int) -> bytes:
        with path.open("rb") as file:
            file.seek(offset)
            count[0] += nbytes
            return file.read(nbytes)

    same = True
    # rank 0 plays the one more, too
    roles = [group.rank, group.world_size] if group.rank == 0 else [group.rank]
    for role in roles:
        first, last = bounds(role, group.world_size + 1)
        same &= torch.equal(load(folder, role, group.world_size + 1, read), whole[first:last])
    return {"complete": complete, "same": same, "read": count[0]}


def judge(name: str, ranks: list[dict[str, Any]]) -> Iterator[Row]:
    totals = {key: sum(rank[key] for rank in ranks) for key in ("complete", "same", "read")}
    complete, same, read = totals.values()
    yield row("ranks that find a whole checkpoint", len(ranks), complete)
    yield row("loaded by one rank more: ranks with the same bits", len(ranks), same)
    yield row("bytes read by all", NUMEL * ITEMSIZE, read, "B")


if __name__ == "__main__":
    run("lab 10", rank_program, judge, device="cpu")
