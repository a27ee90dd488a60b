"""`python -m minillm train` end to end on a tiny model, and the model folder it exports."""

import errno
import json
import os

import pytest
import torch
import transformers

from minillm.__main__ import run
from minillm.cli import train as train_command
from minillm.data import Tokenizer
from minillm.model import load_hf
from minillm.predict.model import parameters
from minillm.train.presets import SIZES, preset

TINY = ["train", "--model-size", "tiny", "--data", "text", "--seq-len", "32", "--batch-size", "4", "--steps", "30"]


@pytest.mark.full
def test_train_export_and_load(home, capsys):
    assert run([*TINY, "--export", "model", "--lr", "0.01", "--memory", "--json", "found.json"]) == 0
    out, err = capsys.readouterr()
    assert "kept in runs/tiny-1" in out and "unigram entropy" in out and "activation" in out
    assert "MFU" in err and "tokens/s" in err
    found = json.loads((home / "found.json").read_text())
    assert found["steps_done"] == len(found["losses"]) == 30 and found["peak_bytes"]["parameter"] > 0
    assert found["validation_loss"] > 0 and found["provenance"]["command"]
    training = json.loads((home / "model/training.json").read_text())
    repeat = "python -m minillm train --model-size tiny --data text --seq-len 32 --batch-size 4 --steps 30 --lr 0.01"
    assert sorted(training["command"].split()) == sorted(f"{repeat} --export model".split())
    assert training["tokens"] == 30 * 4 * 32 and training["bits_per_byte"] > 0 and training["hardware"]
    model = load_hf(home / "model", dtype=torch.float32)
    assert next(load_hf(home / "model").parameters()).dtype == torch.bfloat16
    ids = torch.tensor([Tokenizer.load(home / "model").encode("def f(x):")])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
    assert torch.allclose(model(ids), theirs(ids).logits, atol=1e-5)
    assert transformers.AutoTokenizer.from_pretrained(home / "model")("def f(x):")["input_ids"] == ids[0].tolist()


@pytest.mark.full
def test_runs_are_numbered_and_resumed(home, capsys):
    assert run(TINY) == run(TINY) == 0
    assert sorted(path.name for path in (home / "runs").iterdir()) == ["tiny-1", "tiny-2"]
    capsys.readouterr()
    assert run(["train", "--resume", "--export", "again"]) == 0
    assert "kept in runs/tiny-2" in capsys.readouterr().out
    assert "betas" not in json.loads((home / "again/training.json").read_text())["command"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model-size", "huge"], "no model size 'huge': use one of tiny"),
        (["--precision", "fp8"], "precision 'fp8' is unknown"),
        (["--data", "nowhere"], "no such file or folder: nowhere"),
        (["--steps", "0"], "steps 0 must be a whole number"),
        (["--device", "tpu9"], "--device tpu9 cannot be used"),
        (["--device", "meta", "--dp", "2"], "--device meta cannot be used"),
        (["--data", ""], "the path of the text is empty"),
        (["--weight-decay", "inf"], "--weight-decay inf is not a finite number"),
        ([*TINY[1:], "--runs", "text/part1.py"], "text/part1.py/tiny-1 cannot hold a run (Not a directory)"),
        ([*TINY[1:], "--export", "text/part1.py"], "--export text/part1.py: text/part1.py is a file, name another"),
        ([*TINY[1:], "--export", "text/part1.py/b/c"], "text/part1.py is a file, name another folder"),
        (["--json", "nowhere/x.json"], "--json nowhere/x.json cannot be written"),
        (["--resume"], "no run under runs has a checkpoint"),
        (["--resume", "--run", "x"], "holds no run"),
        (["--seq-len", "1000000", "--data", "text"], "too few for seq_len 1000000"),
    ],
)
def test_bad_input_is_one_line(home, capsys, arguments, message):
    assert run(["train", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (home / "runs").exists()


@pytest.mark.full
def test_bad_input_that_a_rank_finds_is_one_line_too(home, capsys):
    assert run([*TINY, "--zero", "1", "--offload", "text/part1.py"]) == 2
    assert "offload='text/part1.py' cannot take" in capsys.readouterr().err.splitlines()[-1]


def test_a_full_disk_is_one_sentence_whose_advice_works(home, capsys, monkeypatch):
    """Before the first save there is nothing to resume; afterwards there is."""

    def full(group, job):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(job.folder / "metrics.jsonl"))

    small = [*TINY[1:-1], "2", "--run", "a"]
    with monkeypatch.context() as patched:
        patched.setattr(train_command, "train", full)
        assert run(["train", *small]) == 2
    said = capsys.readouterr().err
    assert "No space left on device" in said and said.endswith(": free some space, then start again with --run a.\n")
    assert run(["train", *small]) == 0
    capsys.readouterr()
    monkeypatch.setattr(train_command, "train", full)
    assert run(["train", "--resume", "--run", "a"]) == 2
    assert capsys.readouterr().err.endswith(": free some space, then go on with --resume --run a.\n")


def test_resume_with_other_options_is_refused(home, capsys):
    assert run([*TINY, "--run", "a"]) == 0
    assert run(["train", "--resume", "--run", "a", "--lr", "0.5"]) == 2
    assert "--lr 0.5: runs/a was trained with 0.001" in capsys.readouterr().err
    assert run([*TINY, "--run", "a"]) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_presets():
    counts = {}
    for size in SIZES:
        counts[size] = parameters(preset(size, 4096, 256)).total
    assert 2 * counts["target"] < 12e6 and 2 * counts["draft"] < 1.5e6
    assert counts["target"] > 5e6 and 4e5 < counts["draft"] < 6e5
