"""The same script by python, by torchrun and as two nodes: equal receipts, hangs found, nothing left."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from minillm.comm.launch import _store

HERE = Path(__file__).parent
SCRIPT = str(HERE / "torchrun_program.py")


def start(folder: Path, *command: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *command]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def torchrun(*args: str) -> list[str]:
    return ["-m", "torch.distributed.run", *args, SCRIPT]


def nothing_left(folder: Path) -> None:
    assert not list(folder.glob("minillm-*"))
    mine = [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("TMPDIR") == str(folder)]
    assert not psutil.wait_procs(mine, timeout=20)[1]


def free_port() -> str:
    return str(_store().port)  # closed again at once


def test_receipts_are_equal_in_all_three_worlds(tmp_path) -> None:
    rendezvous = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "two"]
    rendezvous += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    commands = {
        "python": [[SCRIPT]],
        "torchrun": [torchrun("--standalone", "--nproc-per-node", "4")],
        "two nodes": [torchrun(*rendezvous), torchrun(*rendezvous)],
    }
    receipts = {}
    for name, processes in commands.items():
        started = [start(tmp_path, *command, "receipts") for command in processes]
        outputs = [process.communicate(timeout=120) for process in started]
        assert all(process.returncode == 0 for process in started), outputs
        lines = [line for out, _ in outputs for line in out.splitlines() if line.startswith("RECEIPTS ")]
        assert len(lines) == 1, outputs
        receipts[name] = json.loads(lines[0].removeprefix("RECEIPTS "))
    assert receipts["torchrun"] == receipts["python"]
    assert receipts["two nodes"] == receipts["python"]
    first, second = receipts["python"]
    assert [rank["ranks"][0] for rank in first] == [0, 1, 2, 3] and first != second
    assert all(rank["left"] == [] for rank in first + second)
    nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("how", "lines"),
    [
        ("mesh", ["1     all_reduce", "rank 3"]),
        ("barrier", ["2     barrier", "rank 3"]),
        ("subgroup", ["gather_objects", "rank 3"]),
    ],
)
def test_a_hang_ends_with_the_table(how: str, lines: list[str], tmp_path) -> None:
    process = start(tmp_path, *torchrun("--standalone", "--nproc-per-node", "4"), how)
    begin = time.monotonic()
    _, err = process.communicate(timeout=90)
    assert process.returncode != 0 and time.monotonic() - begin < 60  # not half an hour, nor rank 3's two minutes
    assert "HangError: rank" in err and "Who waits for whom" in err, err[-3000:]
    rows = [line for line in err.splitlines() if line.rstrip().endswith(lines[1]) and lines[0] in line]
    assert rows, err[-3000:]
    nothing_left(tmp_path)


def test_nested_launch_is_refused_under_torchrun(tmp_path) -> None:
    process = start(tmp_path, *torchrun("--standalone", "--nproc-per-node", "4"), "nested")
    _, err = process.communicate(timeout=90)
    assert process.returncode != 0 and "ValueError: launch was called inside a rank" in err
    nothing_left(tmp_path)
