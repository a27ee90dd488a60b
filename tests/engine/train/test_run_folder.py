"""A run's folder has one owner at a time, and damaged files in it are refused in one sentence."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import minillm
from minillm.__main__ import run
from minillm.data import Tokens
from minillm.files import write_whole
from minillm.model import ModelConfig
from minillm.train import TrainConfig, Trainer, fit
from minillm.train.checkpoint.manifest import committed, step_of
from minillm.train.job import DEFAULTS, LATER, run_of_job, saved_settings
from minillm.train.run_folder import claim_unused, locked

TINY = ["train", "--model-size", "tiny", "--data", "text", "--seq-len", "32", "--batch-size", "4", "--steps", "30"]
MODEL = ModelConfig(50, 16, 32, 1, 2, 1, max_seq_len=16)
QUIET = {"progress": False, "tensorboard": False}


def trainer():
    text = Tokens((torch.arange(500) * 7 % 50).numpy().astype("uint16"), 50, 0, 1, 1500)
    return Trainer(TrainConfig(MODEL, seq_len=16, batch_size=2, steps=3), text, workers=0)


def test_a_lock_ends_with_its_process_however_that_ends(tmp_path):
    read, write = os.pipe()
    if (holder := os.fork()) == 0:
        with locked(tmp_path):
            os.write(write, b"held")
            signal.pause()
    try:
        assert os.read(read, 4) == b"held"
        with pytest.raises(ValueError, match=rf"is in use by process {holder} on \S+: wait until it has ended"):
            locked(tmp_path).__enter__()
        threading.Timer(0.3, os.kill, [holder, signal.SIGKILL]).start()
        with locked(tmp_path, wait_s=60):  # torchrun's next ranks wait for the last of those before
            assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    with locked(tmp_path):
        pass


def test_runs_without_a_name_that_start_together_get_folders_of_their_own(tmp_path):
    found, begin = [], threading.Barrier(16)

    def claim():
        begin.wait()
        found.append(claim_unused(tmp_path / "runs", "tiny"))

    threads = [threading.Thread(target=claim) for _ in range(16)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(int(folder.name.removeprefix("tiny-")) for folder in found) == list(range(1, 17))


def test_a_run_that_is_still_going_is_refused_to_others(tmp_path):
    def intrude(*_):
        with pytest.raises(ValueError, match=f"is in use by process {os.getpid()}"):
            fit(trainer(), tmp_path, resume=True, **QUIET)

    assert fit(trainer(), tmp_path, on_step=intrude, **QUIET).steps_done == 3
    assert fit(trainer(), tmp_path, resume=True, **QUIET).losses == []


@pytest.fixture
def a_run(home):
    assert run([*TINY, "--steps", "2", "--run", "a"]) == 0
    return home / "runs/a"


def test_damaged_settings_and_metrics_are_one_sentence(a_run, capsys):
    path, good = a_run / "run.json", json.loads((a_run / "run.json").read_text())
    capsys.readouterr()

    def refused(command=("train", "--resume", "--run", "a")):
        assert run(list(command)) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and error.startswith("minillm: "), error
        return error

    wrong = {
        "it holds [1, 2], not settings": [1, 2],
        "it holds 7, not settings": 7,
        "it lacks 'betas'": {k: v for k, v in good.items() if k != "betas"},
        "it lacks 'dp'": {k: v for k, v in good.items() if k != "dp"},
        "'batchsize' is not a setting, perhaps 'batch_size' is meant": good | {"batchsize": 4},
        "lr cannot be 'fast'": good | {"lr": "fast"},
        "betas cannot be 0.9": good | {"betas": 0.9},
        "batch_size cannot be 0": good | {"batch_size": 0},
        "compile cannot be 1": good | {"compile": 1},
    }
    for message, content in wrong.items():
        path.write_text(json.dumps(content))
        assert f"runs/a/run.json is damaged ({message}" in refused()
    path.write_bytes(b"\x80\x81")
    assert "run.json is damaged (it cannot be read" in refused()
    path.write_text(json.dumps(good))
    metrics = a_run / "metrics.jsonl"
    for content, message in (
        (b"\x80\xff\x00 binary", "it is not text"),
        (b"5\n", "line 1 has no step: 5"),
        (b'{"loss": 1}\n', "line 1 has no step"),
    ):
        metrics.write_bytes(content)
        assert message in refused() and message in refused(["plot", "a"])
    metrics.unlink()
    metrics.mkdir()
    assert "Is a directory" in refused() and "Is a directory" in refused(["plot", "a"])


def test_a_run_of_before_there_were_teachers_goes_on(a_run):
    path = a_run / "run.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in LATER}))
    assert run(["train", "--resume", "--run", "a"]) == 0


def test_a_checkpoint_without_a_key_is_one_sentence(tmp_path):
    fit(trainer(), tmp_path, **QUIET)
    state = trainer().state_dict()
    for key in ("config", "step", "loader", "loss_spikes"):
        with pytest.raises(ValueError, match=f"the checkpoint lacks {key}: restore it"):
            trainer().load_state_dict({name: value for name, value in state.items() if name != key})


def test_settings_follow_the_number_of_ranks(tmp_path):
    about = DEFAULTS | {"batch_size": 2, "accumulate": 3, "dp": 4, "job": "night"}
    folder = tmp_path / "a"
    folder.mkdir()
    write_whole(folder / "run.json", json.dumps(about))
    assert [saved_settings(folder, {}, dp)["accumulate"] for dp in (1, 2, 3, 4, 6, 12)] == [12, 6, 4, 3, 2, 1]
    with pytest.raises(ValueError, match=r"24 windows .* over 5 .* --batch-size 2: go on with 1, 2, 3, 4, 6, 12 of"):
        saved_settings(folder, {}, 5)
    with pytest.raises(ValueError, match="go on with"):
        saved_settings(folder, {}, 24)
    assert run_of_job(tmp_path, "night") == folder
    assert run_of_job(tmp_path, "day") is None and run_of_job(tmp_path, None) is None


@pytest.mark.full
def test_two_commands_at_once_and_a_resume_of_a_running_run(home, capsys):
    environ = os.environ | {"PYTHONPATH": str(Path(minillm.__file__).parents[1])}
    command = [sys.executable, "-m", "minillm", *TINY[:-1], "100000", "--seed", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, env=environ, **pipes) for _ in range(2)]
    try:
        folders = [home / "runs" / name for name in ("tiny-1", "tiny-2")]
        for folder in folders:
            while not (folder / "metrics.jsonl").exists() or (folder / "metrics.jsonl").read_text().count("\n") < 3:
                assert all(process.poll() is None for process in both)
                time.sleep(0.05)
        for more in (["--run", "tiny-1", "--steps", "100000"], ["--resume", "--run", "tiny-2"]):
            assert run([*TINY[:1], *more, *(TINY[1:5] if "--steps" in more else [])]) == 2
            assert "is in use by process" in capsys.readouterr().err
        both[0].send_signal(signal.SIGTERM)  # pre-emption: it saves and leaves
        both[1].send_signal(signal.SIGINT)
        ends = [process.communicate(timeout=60) for process in both]
        assert [process.returncode for process in both] == [130, 130], ends
        for folder in folders:
            rows = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
            assert step_of(committed(folder)[-1]) == max(rows) + 1
            assert f"saved after step {max(rows) + 1}" in "".join(out for out, _ in ends)
    finally:
        [process.kill() for process in both]
