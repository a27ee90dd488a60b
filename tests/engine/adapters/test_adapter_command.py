"""`python -m minillm train --base --lora` end to end on a tiny model: text, chats, pairs; and what it refuses."""

import json
from dataclasses import fields

import pytest
import torch

from minillm.__main__ import run
from minillm.adapters.peft_folder import load_peft, read_peft
from minillm.adapters.start import BaseFolder
from minillm.data import Tokenizer
from minillm.measure.machine import Machine, _Cache
from minillm.model import ModelConfig, Transformer, load_hf, save_hf
from tests.engine.data.test_conversations import PAIR, TEMPLATE, chat, write

TRAIN = ["train", "--base", "base", "--seq-len", "32", "--batch-size", "2", "--steps", "3", "--lora", "2"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    unmeasured = {each.name: 0 for each in fields(Machine)} | {"links": {}, "gpu": None}
    _Cache().write(Machine.from_json(unmeasured | {"peak_flops": 1e9, "peak_flops_bf16": 1e9}))
    tokenizer = Tokenizer.load()
    save_hf(Transformer(ModelConfig(tokenizer.vocab_size, 64, 64, 2, 4, 2, max_seq_len=128)), tmp_path / "base")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save(tmp_path / "base")
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / f"text/{number}.py").write_text(f"def add_{number}(x):\n    return x + {number}\n" * 40)
    write(tmp_path / "chats.jsonl", [{"messages": chat(number)} for number in range(12)])
    write(tmp_path / "pairs.jsonl", [PAIR] * 6)
    return tmp_path


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(
            ["--data", "text", "--target", "q,self_attn.v_proj,*.mlp.down", "--alpha", "8"], marks=pytest.mark.full
        ),
        ["--data", "chats.jsonl", "--qlora", "--seq-len", "96"],
        pytest.param(["--data", "pairs.jsonl", "--dpo", "0.1", "--rslora", "--seq-len", "64"], marks=pytest.mark.full),
    ],
    ids=["text", "chats", "pairs"],
)
def test_a_run_is_exported_and_resumed(home, capsys, more):
    assert run([*TRAIN, *more, "--export", "adapter", "--json", "found.json"]) == 0
    said = capsys.readouterr().out
    assert "trains " in said and "adapter holds the adapters alone: python -m minillm generate --model base" in said
    command = ["generate", "--model", "base", "--adapter", "adapter", "--max-new-tokens", "3", "def f"]
    assert run(command) == 0 and capsys.readouterr().out.startswith("def f")
    base = BaseFolder(home / "base")
    adapter = read_peft(home / "adapter")
    assert adapter.config.rank == 2 and adapter.fingerprint == base.fingerprint
    model = load_hf(home / "base")
    load_peft(model, home / "adapter", fingerprint=base.fingerprint)
    assert torch.isfinite(model(torch.arange(8)[None])).all()
    about = json.loads((home / "adapter/training.json").read_text())
    assert about["parameters"] == sum(a.numel() + b.numel() for a, b in adapter.matrices.values())
    assert "--lora 2" in about["command"] and "--base base" in about["command"]
    assert "--model-size" not in about["command"]  # which --base refuses
    if "text" not in more:
        steps = [json.loads(line) for line in (home / "runs/base-1/metrics.jsonl").read_text().splitlines()]
        tokens = 2 * int(more[-1]) * (2 if "--dpo" in more else 1)  # of both windows, prompts included
        assert {step["tokens"] for step in steps if "tokens" in step} == {tokens}
    assert run(["train", "--resume", "--run", "base-1"]) == 0
    saved = sum(path.stat().st_size for path in (home / "runs/base-1/checkpoints").rglob("*.bin"))
    assert saved < 20 * 4 * about["parameters"] + 20_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lora", "0"], "--lora"),
        (["--target", "qkv"], "--target: target 'qkv' matches no layer: there are q_proj"),
        (["--base", "nowhere"], "--base nowhere is not a model folder"),
        (["--model-size", "tiny"], "--model-size tiny and --base base both say which model"),
        (["--alpha", "0"], "alpha 0.0 must be a number above 0"),
        (["--lora-dropout", "1"], "dropout 1.0 is outside"),
        (["--qlora", "--tp", "2"], "o_proj.weight has [64, 64] weights, which --tp 2 cannot cut so: use fewer ranks"),
        (["--dpo", "0.1", "--documents"], "dpo's windows hold one answer each: leave documents out"),
        (["--data", "pairs.jsonl", "--dpo", "0.1", "--lora-dropout", "0.1"], "leave lora_dropout out"),
        (["--data", "chats.jsonl", "--compile"], "for the documents, or conversations, of every"),
        (["--dpo", "0.1"], "--dpo 0.1 learns from pairs of answers"),
        (["--data", "pairs.jsonl"], 'pairs.jsonl, line 1: it has no "messages"'),
        (["--data", "missing.jsonl"], "missing.jsonl cannot be read"),
        (["--seq-len", "4", "--data", "chats.jsonl"], "no answer begins within 5 tokens"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_leaves_nothing(home, capsys, arguments, message):
    assert run([*TRAIN, "--data", "text", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (home / "runs").exists()


def test_a_base_whose_rows_nf4_does_not_divide_is_refused_before_a_run_begins(home, capsys):
    save_hf(Transformer(ModelConfig(Tokenizer.load().vocab_size, 96, 192, 2, 4, 2)), home / "odd")
    Tokenizer.load().save(home / "odd")
    assert run([*TRAIN, "--base", "odd", "--qlora", "--data", "text"]) == 2
    assert "--qlora gives each 64 weights of a row a scale, and blocks.0" in capsys.readouterr().err
    assert not (home / "runs").exists()


def test_adapters_beside_a_model_of_the_seed_are_exported(home, capsys):
    small = ["train", "--model-size", "tiny", "--lora", "2", "--steps", "1", "--seq-len", "16", "--batch-size", "1"]
    assert run([*small, "--data", "text", "--export", "adapter"]) == 0
    assert "exported: adapter holds the adapters alone" in capsys.readouterr().out


def test_options_of_adapters_need_adapters(home, capsys):
    assert run(["train", "--base", "base", "--qlora", "--data", "text"]) == 2
    assert "qlora" in capsys.readouterr().err
    assert run(["train", "--base", "base", "--target", "q", "--data", "text"]) == 2
    assert "--target is about adapters: add --lora" in capsys.readouterr().err


def test_a_quantized_base_is_refused(home, capsys):
    assert run(["quantize", "--model", "base", "--bits", "8", "--method", "rtn", "--out", "small"]) == 0
    capsys.readouterr()
    assert run([*TRAIN, "--base", "small", "--data", "text"]) == 2
    assert "is quantized already: start from the folder that it was made of" in capsys.readouterr().err
