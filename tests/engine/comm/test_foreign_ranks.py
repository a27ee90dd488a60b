"""A Group over ranks that somebody else has started: `mp.spawn`, plain torchrun, `accelerate launch`."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from minillm.comm import Group, launch
from tests.engine.comm.foreign_ranks import spawned

HERE = Path(__file__).parent
COMMANDS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "accelerate": ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"],
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.full
def test_spawned_ranks_agree_and_report_a_hang_without_a_launcher(tmp_path) -> None:
    mp.spawn(spawned, (2, free_port(), str(tmp_path)), nprocs=2)
    (first, table), (second, late) = (json.loads((tmp_path / str(rank)).read_text()) for rank in range(2))
    assert [first, second] == ["rank 0 of 2: equal gradients", "rank 1 of 2: equal gradients"] and late == "late"
    first, second = table.splitlines()[2:]
    assert "all_reduce" in first and first.endswith("rank 1") and "in no operation" in second


@pytest.mark.full
@pytest.mark.parametrize("by", COMMANDS)
def test_command(by: str, tmp_path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[2]), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    extra = ["--main_process_port", str(free_port())] if by == "accelerate" else []
    command = [sys.executable, "-m", *COMMANDS[by], *extra, str(HERE / "foreign_ranks.py"), by]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2: equal gradients" in done.stdout
    assert not list(tmp_path.glob("minillm-*"))  # no recorder is left behind


def half(group: Group) -> None:
    process_group = dist.new_group([0])
    if group.rank == 0:
        Group.from_process_group(process_group)
        return
    with pytest.raises(ValueError, match="rank 1 is not in the process group"):
        Group.from_process_group(process_group)


def test_a_rank_outside_the_process_group() -> None:
    launch(half, 2)


def test_without_a_process_group() -> None:
    with pytest.raises(ValueError, match=r"no process group yet: call torch.distributed.init_process_group\(\)"):
        Group.from_process_group()
