"""The same script by python, by torchrun and as two nodes: equal receipts, hangs found, nothing left."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from minillm.comm.launch.launcher import _store

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


@pytest.mark.slow
def test_receipts_are_equal_in_all_three_worlds(tmp_path) -> None:
    rendezvous = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "two"]
    rendezvous += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    commands = {
        "python": [[SCRIPT]],
        "torchrun": [torchrun("--standalone", "--nproc-per-node", "4")],
        "two nodes": [torchrun(*rendezvous), torchrun(*rendezvous)],
    }
    started = {name: [start(tmp_path, *args, "receipts") for args in commands[name]] for name in commands}
    receipts = {}
    for name, processes in started.items():
        outputs = [process.communicate(timeout=90) for process in processes]
        assert all(process.returncode == 0 for process in processes), outputs
        lines = [line for out, _ in outputs for line in out.splitlines() if line.startswith("RECEIPTS ")]
        assert len(lines) == 1, outputs
        receipts[name] = json.loads(lines[0].removeprefix("RECEIPTS "))
    assert receipts["torchrun"] == receipts["python"]
    assert receipts["two nodes"] == receipts["python"]
    first, second = receipts["python"]
    assert [rank["ranks"][0] for rank in first] == [0, 1, 2, 3] and first != second
    assert all(rank["left"] == [] for rank in first + second)
    nothing_left(tmp_path)


@pytest.mark.slow
def test_hangs_end_with_the_table(tmp_path) -> None:
    """Within the timeout of `launch`, in any group: not after half an hour, nor after rank 1's two minutes of sleep."""
    rows = {"mesh": "0     all_reduce", "barrier": "0     barrier", "subgroup": "0     make group"}
    begin = time.monotonic()
    started = {how: start(tmp_path, *torchrun("--standalone", "--nproc-per-node", "2"), how) for how in rows}
    for how, process in started.items():
        _, err = process.communicate(timeout=90)
        assert process.returncode != 0 and "HangError: rank 0 waited too long" in err, err[-3000:]
        assert "Who waits for whom" in err
        assert [line for line in err.splitlines() if line.rstrip().endswith("rank 1") and rows[how] in line], err[
            -3000:
        ]
    assert time.monotonic() - begin < 90
    nothing_left(tmp_path)


@pytest.mark.slow
def test_nested_launch_is_refused_under_torchrun(tmp_path) -> None:
    process = start(tmp_path, *torchrun("--standalone", "--nproc-per-node", "1"), "nested")
    _, err = process.communicate(timeout=90)
    assert process.returncode != 0 and "ValueError: launch was called inside a rank" in err
    nothing_left(tmp_path)


@pytest.mark.slow
def test_no_thread_of_gloo_outlives_the_launch(tmp_path) -> None:
    """One that frees a tensor while Python shuts down would abort the process."""
    process = start(tmp_path, *torchrun("--standalone", "--nproc-per-node", "2"), "threads")
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    seen = re.findall(r"THREADS (\[.*?\])", out)  # two ranks share the pipe: their lines may run together
    assert len(seen) == 2 and "gloo" not in "".join(seen)
