"""Training on a tiny target: it learns, the target stays, weights come back, and what is missing says so."""

import json
from pathlib import Path

import pytest
import torch

import minillm.model
from minillm.cli.train_heads import command
from minillm.data import Loader, TokenDataset, Tokenizer
from minillm.model import load_hf, save_hf
from minillm.model.generate import CHECKPOINTS, folder_of
from minillm.serve import SamplingParams
from minillm.serve.speculate import DraftModel
from minillm.serve.speculate.distil import MAKERS
from minillm.serve.speculate.heads import load, save
from minillm.serve.speculate.held_out import proposer_of, rounds
from minillm.serve.speculate.registry import PROPOSERS, proposer_named
from minillm.serve.speculate.train_heads import train

OPTIONS = {"medusa": {"heads": 2, "layers": 1}, "eagle": {}, "early_exit": {"layers": 1, "width": 8}}


def fresh(kind, target):
    torch.manual_seed(0)
    head = MAKERS[kind](target.config, **OPTIONS[kind])
    return head.initialize(target) if hasattr(head, "initialize") else head


def trained_for(kind, steps, target):
    head = fresh(kind, target)
    tokens = torch.randint(5, (600,), generator=torch.Generator().manual_seed(3)).numpy()
    with Loader(TokenDataset(tokens, 24), 4) as loader:
        return head, train(kind, head, target, loader, steps=steps, rows=48, lr=0.02)


@pytest.mark.parametrize("kind", MAKERS)
def test_it_learns_repeatably_and_leaves_the_target(kind, target):
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    _, losses = trained_for(kind, 30, target)
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])
    assert trained_for(kind, 3, target)[1][0] == losses[0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())


@pytest.mark.parametrize("kind", MAKERS)
def test_weights_come_back_from_their_folder(kind, target, tmp_path):
    head = fresh(kind, target)
    save(kind, head, OPTIONS[kind], target, tmp_path, {"steps": 0})
    again = load(kind, MAKERS[kind], target, tmp_path)
    for name, tensor in head.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, rtol=8e-3, atol=1e-3)  # bfloat16
    assert json.loads((tmp_path / "training.json").read_text()) == {"steps": 0}
    assert proposer_of(kind, target, again).wants_hidden is (kind != "early_exit")


@pytest.mark.parametrize("kind", MAKERS)
def test_missing_or_foreign_weights_name_the_command(kind, target, make_target, tmp_path):
    with pytest.raises(ValueError, match=f"no {kind} weights in .*: train them with .*--kind {kind}"):
        proposer_of(kind, target, tmp_path / "nowhere")
    save(kind, fresh(kind, target), OPTIONS[kind], target, tmp_path, {})
    with pytest.raises(ValueError, match=f"for a target of .*'vocab_size': 5.*not {kind} weights.*train them with"):
        proposer_of(kind, make_target(vocab_size=7), tmp_path)


@pytest.mark.parametrize("kind", MAKERS)
def test_the_committed_weights_fit_the_committed_target(kind):
    target = load_hf(folder_of("target"))
    parameters = sum(parameter.numel() for parameter in load(kind, MAKERS[kind], target).parameters())
    about = json.loads((CHECKPOINTS / kind / "training.json").read_text())
    assert about["parameters"] == parameters and f"--kind {kind}" in about["command"]
    assert (CHECKPOINTS / kind / "model.safetensors").stat().st_size < 3 << 20


def test_every_proposer_has_a_name_that_makes_it():
    target = load_hf(folder_of("target"))
    for name in PROPOSERS:
        assert 0 <= proposer_named(name, target).cost < 1


def test_a_draft_that_is_the_target_is_always_right(target):
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, max_tokens=20)
        counts = list(rounds(target, DraftModel(target), [1, 2, 3], params, k=3))
        assert counts and all(drafted == accepted for drafted, accepted in counts)


def test_the_command_writes_weights_and_what_they_accept(make_target, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_hf(make_target(vocab_size=4096), tmp_path / "target")
    Tokenizer.load().save(tmp_path / "target")
    source = Path(minillm.model.__file__).parent / "transformer.py"
    options = {"model": str(tmp_path / "target"), "data": str(source), "export": tmp_path / "out", "bf16": False}
    command("medusa", steps=2, batch_size=2, seq_len=32, rows=16, heads=2, prompts=1, **options)
    about = json.loads((tmp_path / "out" / "training.json").read_text())
    assert about["tokens"] == 2 * 2 * 32 and "--kind medusa" in about["command"] and about["loss"] > 0
    assert [len(about[f"accepted_at_{temperature}"]) for temperature in ("0", "0.8")] == [4, 4]
    assert len(load("medusa", MAKERS["medusa"], make_target(vocab_size=4096), tmp_path / "out").heads) == 2
    for wrong, message in (
        ({"seq_len": 8}, "--seq-len 8 does not fit: medusa needs 9 or more, the target's context is"),
        ({"seq_len": 1024}, "--seq-len 1024 does not fit"),
        ({"seq_len": 32, "rows": 49}, "--rows 49 is not in 1 .. 48"),
        ({"seq_len": 32, "lr": float("inf")}, "the loss is nan after . steps: lower --lr inf"),
        ({"seq_len": 32, "export": source}, "transformer.py is a file, name another folder"),
        ({"seq_len": 32, "device": "tpu"}, "--device tpu cannot be used"),
    ):
        with pytest.raises(ValueError, match=message):
            command("medusa", **{"steps": 4, "batch_size": 2, "rows": 16, "heads": 2, "prompts": 1, **options, **wrong})
    assert json.loads((tmp_path / "out" / "training.json").read_text()) == about
    with pytest.raises(ValueError, match="--kind hydra is none of medusa, eagle, early_exit"):
        command("hydra")
