"""Lab 10 in production: torch.distributed.checkpoint, saved on 2 ranks and loaded on 3, and torchrun's agent."""

import logging
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from course.lab10_fault_tolerance.experiments import folder
from minillm.comm import Group, launch

ROWS, WIDTH = 12, 50
WORKER = """\
import json, os, pathlib, signal
state, rank = pathlib.Path("state.json"), int(os.environ["RANK"])
step = json.loads(state.read_text())["step"] if state.exists() else 0
while step < 10:
    step += 1
    with open(f"log-{rank}", "a") as log:
        log.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {step}\\n")
    if rank == 0 and step % 4 == 0:
        pathlib.Path("draft").write_text(json.dumps({"step": step}))
        os.replace("draft", state)
    if rank == 0 and step == 6 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def _tensor(group: Group) -> Any:
    """A matrix over the ranks by rows, as FSDP2 holds its parameters: a DTensor of zeros."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, zeros

    return zeros(ROWS, WIDTH, device_mesh=DeviceMesh.from_group(group.process_group, "cpu"), placements=[Shard(0)])


def _numbers() -> torch.Tensor:
    return torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH)


def _save(group: Group, place: Path) -> None:
    import torch.distributed.checkpoint as dcp

    ours = _tensor(group)
    local = ours.to_local()
    local.copy_(_numbers().chunk(group.world_size)[group.rank])
    future = dcp.async_save({"weight": ours}, checkpoint_id=place)
    local.zero_()  # training goes on: what is saved has been copied
    future.result()


def _load(group: Group, place: Path) -> bool:
    """Whether this rank's rows are those that were saved."""
    import torch.distributed.checkpoint as dcp

    ours = _tensor(group)
    dcp.load({"weight": ours}, checkpoint_id=place)
    return torch.equal(ours.to_local(), _numbers().chunk(group.world_size)[group.rank])


def _spoil(_: Group, place: Path) -> dict[str, Any]:
    """Loaded by one process, first with a flipped bit in a file, then without .metadata: same numbers, complaint."""
    import torch.distributed.checkpoint as dcp

    def attempt() -> tuple[bool, str]:
        found = torch.zeros(ROWS, WIDTH)
        try:
            dcp.load({"weight": found}, checkpoint_id=place, no_dist=True)
        except (Exception, dcp.api.CheckpointException) as error:  # the latter is no Exception
            return False, type(error).__name__
        return torch.equal(found, _numbers()), ""

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    file = place / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.find(_numbers()[1].numpy().tobytes()) + 2] ^= 1  # in the fraction of a number
    file.write_bytes(bytes(data))
    found = {"flipped": attempt()}
    (place / ".metadata").unlink()
    return found | {"torn": attempt()}


def distributed_checkpoint() -> dict[str, Any]:
    """Saved by 2 ranks while they go on, loaded by 3; then a bit of one file is flipped, and .metadata taken away."""
    with folder() as place:
        launch(_save, 2, place, device="cpu")
        files = sorted(path.name for path in place.iterdir())
        found = {"files": files, "same": launch(_load, 3, place, device="cpu")}
        return found | launch(_spoil, 1, place, device="cpu")[0]


def elastic() -> list[list[tuple[int, int]]]:
    """(restarts so far, step) of 2 ranks under torchrun, in order; rank 0 is killed after step 6, and saves every 4."""
    with folder() as place:
        (place / "worker.py").write_text(WORKER)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", "1", "--monitor-interval", "0.1", "worker.py"]
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "RANK"))}
        clean["TMPDIR"] = str(place)
        process = subprocess.Popen(
            command,
            cwd=place,
            env=clean,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            told, _ = process.communicate(timeout=120)
        finally:
            _end(process)
        if process.returncode:
            raise RuntimeError(f"torchrun ended with status {process.returncode}:\n{told[-2000:]}")
        return [_log(place / f"log-{rank}") for rank in range(2)]


def _log(path: Path) -> list[tuple[int, int]]:
    return [tuple(map(int, line.split())) for line in path.read_text().splitlines()]


def _end(process: subprocess.Popen) -> None:
    """It and all that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
