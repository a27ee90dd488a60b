"""`python -m minillm train --dp N --zero S`: the same losses as one process, stopped and resumed on other ranks."""

import json
import subprocess
import sys
import threading
import time

import pytest
import torch

from minillm.__main__ import run
from minillm.cli import train
from minillm.comm import RankError
from minillm.train.checkpoint.manifest import committed, step_of
from minillm.train.checkpoint.reader import read_whole
from minillm.train.metrics import read_metrics

COMMON = ["train", "--model-size", "tiny", "--data", "text", "--seq-len", "32", "--lr", "0.01", "--steps", "8"]


def losses(home, *arguments):
    assert run([*COMMON, *arguments, "--json", "found.json"]) == 0
    return json.loads((home / "found.json").read_text())


def test_a_killed_rank_is_said_in_a_line_with_the_way_on(home, monkeypatch, capsys):
    def die(*_, **__):
        raise RankError("rank 1 of 2 was killed by SIGKILL before it finished", 1, -9)

    monkeypatch.setattr(train, "launch", die)
    assert run([*COMMON, "--dp", "2", "--run", "cut"]) == 1
    said = "minillm: rank 1 of 2 was killed by SIGKILL before it finished: start again with --run cut"
    assert capsys.readouterr().err.splitlines() == [said]


@pytest.mark.full
def test_ranks_lose_like_one_process_and_resumes_on_other_ranks(home, capsys):
    alone = losses(home, "--batch-size", "4", "--run", "alone")
    for stage in (0, 3):  # the oracle has the gradients of all
        found = losses(home, "--batch-size", "2", "--dp", "2", "--zero", str(stage), "--run", f"zero{stage}")
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-4)
        assert found["validation_loss"] == pytest.approx(alone["validation_loss"], rel=1e-4)
        out, err = capsys.readouterr()
        assert "on 2 ranks" in out and "tokens/s" in out and "leaked" not in err
    # What stage 3 saved on two ranks is a whole checkpoint: the same tensors as one process saves.
    (_, one), (_, other) = (read_whole(committed(home / "runs" / name)[-1]) for name in ("alone", "zero3"))
    assert one.keys() == other.keys() and "optimizer/exp_avg/norm.weight" in one
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-2, atol=1e-3)


@pytest.mark.full
def test_a_run_is_asked_to_stop_and_goes_on_with_another_number_of_ranks(home, capsys):
    long = [*COMMON[:-1], "4000", "--batch-size", "1", "--accumulate", "3", "--save-every", "5000"]
    folder = home / "runs/stopped"

    def ask_after(step):
        """Waits until the run has done that step, then asks it to stop."""
        for _ in range(600):
            if any(row["step"] >= step for row in read_metrics(folder, missing_ok=True)):
                break
            time.sleep(0.1)
        (folder / "stop").touch()

    def stopped(step, *arguments):
        asking = threading.Thread(target=ask_after, args=[step])
        asking.start()
        assert run([*arguments, "--run", "stopped"]) == 130
        asking.join()
        assert not (folder / "stop").exists()
        return step_of(committed(folder)[-1])

    first = stopped(1, *long, "--dp", "2", "--zero", "3")
    assert 1 < first < 4000
    second = stopped(first + 1, "train", "--resume")  # one process takes over
    assert first + 1 < second < 4000
    assert stopped(second, "train", "--resume", "--dp", "3", "--zero", "2") > second
    assert run(["train", "--resume", "--dp", "4", "--run", "stopped"]) == 2
    refused = (
        "the 6 windows of a step do not divide over 4 data-parallel ranks with --batch-size 1: go on with 1, 2, 3, 6"
    )
    assert refused in capsys.readouterr().err
    rows = [row for row in read_metrics(folder) if "loss" in row]
    assert [row["position"] for row in rows] == [6 * step for step in range(len(rows))]  # none twice, none skipped


@pytest.mark.full
def test_under_torchrun_there_is_one_run_in_one_folder(home):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "minillm"]
    argv = [*torchrun, *COMMON, "--batch-size", "2", "--zero", "1"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("on 2 ranks") == done.stdout.count("bits per byte: the best") == 1
    assert [folder.name for folder in (home / "runs").iterdir()] == ["tiny-1"]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--offload", "cpu"], "--offload cpu needs shards to move: add --zero 1, 2 or 3"),
        (["--dp", "0"], "dp"),
        (["--zero", "4"], "zero"),
    ],
)
def test_bad_input_is_one_line(home, capsys, argv, message):
    assert run([*COMMON, *argv]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
