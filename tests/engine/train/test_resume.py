"""Saved and loaded is as if nothing had happened; a save that fails loses nothing; a wrong folder is refused."""

import importlib.util
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import minillm
from minillm.__main__ import run as run_command
from minillm.data import Tokens
from minillm.model import ModelConfig
from minillm.train import TrainConfig, Trainer, fit
from minillm.train.checkpoint import writer
from minillm.train.checkpoint.manifest import committed, step_of
from minillm.train.checkpoint.reader import restore
from minillm.train.checkpoint.writer import Checkpointer
from minillm.train.metrics import Metrics, read_metrics

MODEL = ModelConfig(50, 32, 64, 2, 4, 2, max_seq_len=16, tie_embeddings=True)


def text(count=2000):
    return Tokens((torch.arange(count) * 7 % 50).numpy().astype("uint16"), 50, 0, 1, 3 * count)


def trainer(workers=1, data=None, **options):
    options = {"seq_len": 16, "batch_size": 4, "steps": 14, "warmup_steps": 2} | options
    return Trainer(TrainConfig(MODEL, **options), data or text(), text(300), workers=workers)


def weights(run):
    return {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}


@pytest.mark.parametrize(
    "precision, stop, background", [("fp32", 1, True), ("fp32", 6, False), ("fp16-master", 6, True)]
)
def test_resumed_is_bit_equal(precision, stop, background, tmp_path):
    options = {"precision": precision, "accumulate": 2, "activation_checkpointing": "full"}
    whole = trainer(**options)
    expected = [whole.step().loss for _ in range(14)]
    first = trainer(**options)
    found = [first.step().loss for _ in range(stop)]
    torch.manual_seed(123)
    saver = Checkpointer(tmp_path, background=background)
    saver.save(first)
    drawn = torch.rand(3), np.random.rand(), random.random()
    first.step()  # what is on its way to the disk stays as it was
    saver.finish()
    second = trainer(workers=0, **options)
    restore(second, tmp_path)
    assert torch.equal(torch.rand(3), drawn[0]) and (np.random.rand(), random.random()) == drawn[1:]
    found += [second.step().loss for _ in range(14 - stop)]
    assert found == expected
    assert all(torch.equal(a, b) for a, b in zip(weights(whole).values(), weights(second).values(), strict=True))
    for run in (whole, first, second):
        run.close()


def test_a_state_that_is_refused_changes_nothing():
    saved, again = trainer(workers=0), trainer(workers=0)
    for _ in range(3):
        saved.step()
    state, before = saved.state_dict(), weights(again)
    del state["optimizer"]["param_groups"][-1]
    with pytest.raises(ValueError, match="the state is of another model"):
        again.load_state_dict(state)
    assert again.steps_done == 0 and again.loader.position == 0 and again.loads == 0
    assert all(torch.equal(weight, before[name]) for name, weight in weights(again).items())


@pytest.mark.full
def test_interrupted_at_a_random_step_and_resumed(home):
    """A real SIGINT to a real `python -m minillm train`, then --resume: the uninterrupted losses, bit for bit."""
    options = ["--model-size", "tiny", "--data", "text", "--seq-len", "32", "--batch-size", "2", "--steps", "160"]
    often = ["--validate-every", "50", "--save-every", "70"]
    command = [sys.executable, "-m", "minillm", "train", *options, *often, "--run", "stopped"]
    root = str(Path(minillm.__file__).parents[1])
    process = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": root}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics = home / "runs/stopped/metrics.jsonl"
    stop_after = 3 + os.urandom(1)[0] % 60
    while not metrics.exists() or metrics.read_text().count("\n") < stop_after:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    done = len(losses(home / "runs/stopped"))
    assert 0 < done < 160 and f"saved after step {done}" in out
    assert run_command(["train", "--resume", "--run", "stopped", *often]) == 0
    assert run_command(["train", *options, *often, "--run", "whole"]) == 0
    assert losses(home / "runs/stopped") == losses(home / "runs/whole")
    stopped, whole = (validations(home / "runs" / name) for name in ("stopped", "whole"))
    assert stopped == whole and [row["step"] for row in whole] == [50, 100, 150, 160]


def validations(folder):
    return [row for row in read_metrics(folder) if "validation_loss" in row]


def losses(folder):
    return [(row["step"], row["loss"]) for row in read_metrics(folder) if "loss" in row]


@pytest.fixture
def full_disk():
    """Files can grow to 20 kB only: the operating system refuses the rest, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(bytes_left=20_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, before[1]))

    yield fill
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_loses_nothing(background, tmp_path, full_disk):
    run, saver = trainer(workers=0), Checkpointer(tmp_path, background=background)
    run.step()
    saver.save(run)
    run.step()
    saver.finish()
    full_disk()
    with pytest.raises(
        OSError, match=r"cannot save to .* \(.*File too large\); the checkpoint that was there still loads"
    ):
        saver.save(run)
        saver.finish()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["save-0001-step-1"]
    again = trainer(workers=0)
    assert restore(again, tmp_path).step == again.steps_done == 1


def test_a_folder_that_cannot_be_written_loses_nothing(tmp_path):
    run, saver = trainer(workers=0), Checkpointer(tmp_path)
    saver.save(run)
    os.rename(saver.folder, tmp_path / "aside")
    saver.folder.write_text("no folder")
    with pytest.raises(OSError, match=r"cannot save to .* \(.*File exists"):
        saver.save(run)
    saver.folder.unlink()
    os.rename(tmp_path / "aside", saver.folder)
    assert restore(run, tmp_path).step == 0


def test_a_save_on_the_way_that_fails_costs_a_warning(tmp_path, monkeypatch, capsys):
    write, calls = Checkpointer._write_parts, []

    def flaky(self, draft, pieces):
        calls.append(draft.name)
        if len(calls) == 2:
            raise OSError("no space left on device")
        return write(self, draft, pieces)

    monkeypatch.setattr(Checkpointer, "_write_parts", flaky)
    how = {"save_every": 4, "progress": False, "tensorboard": False}
    for background in (False, True):
        calls.clear()
        folder = tmp_path / str(background)
        done = fit(trainer(), folder, save_in_background=background, **how)
        assert [name.split("-")[-1] for name in calls] == ["4", "8", "12", "14"] and done.steps_done == 14
        assert [step_of(path) for path in committed(folder)] == [12, 14]
        assert (
            capsys.readouterr().err.count("(no space left on device); the checkpoint that was there still loads. T")
            == 1
        )


def test_the_last_checkpoints_stay(tmp_path):
    fit(trainer(), tmp_path, save_every=2, keep=3, progress=False, tensorboard=False)
    assert [path.name for path in committed(tmp_path)] == [
        "save-0005-step-10",
        "save-0006-step-12",
        "save-0007-step-14",
    ]
    with pytest.raises(ValueError, match="keep 0 must be at least 1"):
        Checkpointer(tmp_path, keep=0)


@pytest.mark.parametrize("instant", ["rename", "fsync"])
def test_killed_before_it_counts(instant, tmp_path, monkeypatch):
    """Whatever the last thing was that a save did, the one before it is what a reader finds."""
    run, saver = trainer(workers=0), Checkpointer(tmp_path)
    saver.save(run)
    run.step()

    class Killed(BaseException):
        pass

    def kill(*_, **__):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(writer.os, instant, kill)
        patch.setattr(writer.shutil, "rmtree", kill)
        patch.setattr(writer.threading, "excepthook", lambda _: None)
        saver.save(run)
    assert [path.name for path in committed(tmp_path)] == ["save-0001-step-0"]
    assert (saver.folder / ".save-0002-step-1").is_dir()
    assert restore(trainer(workers=0), tmp_path).step == 0
    Checkpointer(tmp_path).save(run)
    assert sorted(path.name for path in saver.folder.iterdir()) == ["save-0001-step-0", "save-0002-step-1"]


def test_wrong_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no checkpoint"):
        fit(trainer(), tmp_path, resume=True)
    done = fit(trainer(), tmp_path, progress=False, tensorboard=False)
    assert done.steps_done == 14 and len(done.losses) == 14 and not done.interrupted
    with pytest.raises(ValueError, match="holds a run already: go on with --resume"):
        fit(trainer(), tmp_path)
    with pytest.raises(ValueError, match=r"trained with lr 0\.001, not 0\.1: use the same settings"):
        fit(trainer(lr=0.1), tmp_path, resume=True)
    other = TrainConfig(ModelConfig(50, 48, 64, 2, 4, 2, max_seq_len=16), seq_len=16)
    with pytest.raises(ValueError, match="trained with hidden_size 32, not 48"):
        fit(Trainer(other, text()), tmp_path, resume=True)
    with pytest.raises(ValueError, match="cannot resume: saved with samples"):
        fit(trainer(data=text(1000)), tmp_path, resume=True)
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier/checkpoint.pt").touch()
    with pytest.raises(ValueError, match=r"checkpoint\.pt is of an earlier version, which this one does not read"):
        fit(trainer(), tmp_path / "earlier", resume=True)
    with pytest.raises(ValueError, match="holds a run already"):
        fit(trainer(), tmp_path / "earlier")
    saver = Checkpointer(tmp_path, tokenizer="one")
    saver.save(trainer())
    with pytest.raises(ValueError, match="was trained with another tokenizer: use the same or another run"):
        restore(trainer(), tmp_path, tokenizer="another")


def test_a_finished_run_resumes_to_nothing(tmp_path):
    first = fit(trainer(), tmp_path, progress=False, tensorboard=False)
    rows = read_metrics(tmp_path)
    again = fit(trainer(), tmp_path, resume=True, progress=False, tensorboard=False)
    assert again.losses == [] and again.validation == first.validation
    assert read_metrics(tmp_path)[: len(rows)] == rows


def test_metrics_and_memory(tmp_path, capsys):
    seen = []
    done = fit(
        trainer(),
        tmp_path,
        track_memory=True,
        validate_every=7,
        validation_tokens=32,
        on_step=lambda _, s: seen.append(s),
    )
    rows = read_metrics(tmp_path)
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(14)) and [s.loss for s in seen] == done.losses
    assert all(row["seconds"] > 0 and row["tokens_per_s"] > 0 and row["mfu"] is None for row in steps)
    parameters = sum(p.numel() for p in trainer().model.parameters())
    assert steps[0]["peak_parameter_bytes"] == 4 * parameters and "peak_parameter_bytes" not in steps[1]
    assert 8 * parameters < steps[0]["peak_optimizer_bytes"] < 8.2 * parameters
    assert [(row["step"], row["validation_tokens"]) for row in rows if "validation_loss" in row] == [(7, 32), (14, 288)]
    assert "tokens/s" in capsys.readouterr().err
    written = list((tmp_path / "tensorboard").glob("events.out.*"))
    assert bool(written) == (importlib.util.find_spec("tensorboard") is not None)


def test_metrics_survive_a_crash(tmp_path):
    """Lines after the checkpoint are dropped on resumption, and a line cut short is no obstacle."""
    with Metrics(tmp_path, tensorboard=False) as metrics:
        for step in range(6):
            metrics.log({"step": step, "loss": float("nan") if step == 2 else 1.0})
        metrics.log({"step": 4, "validation_loss": 1.0})
        metrics.log({"step": 6, "validation_loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    Metrics(tmp_path, 4, tensorboard=False).close()
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4] and "validation_loss" in rows[-1]
    assert rows[2]["loss"] is None and all("NaN" not in json.dumps(row) for row in rows)
    with pytest.raises(ValueError, match=r"holds no metrics\.jsonl"):
        read_metrics(tmp_path / "none")


def test_a_second_interrupt_stops_at_once(tmp_path):
    def interrupt_twice(*_):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(trainer(), tmp_path, progress=False, tensorboard=False, on_step=interrupt_twice)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_stopped_where_a_validation_is_due(tmp_path):
    def interrupt(run, step):
        if step.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    how = {"progress": False, "tensorboard": False, "validate_every": 5}
    assert fit(trainer(), tmp_path, on_step=interrupt, **how).steps_done == 5
    fit(trainer(), tmp_path, resume=True, **how)
    assert [row["step"] for row in validations(tmp_path)] == [5, 10, 14]
