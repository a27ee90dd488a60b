"""The small decoder against a loop that keeps nothing, and where its checkpoints are."""

import shutil
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from minillm.__main__ import run
from minillm.data import Tokenizer
from minillm.model import ModelConfig, Transformer, compiled_decode
from minillm.model import generate as generate_module
from minillm.model.compiled_decode import next_logits
from minillm.model.generate import folder_of, generate, heal
from minillm.quantize import Int, Settings, quantize
from minillm.train.job import SETTINGS_FILE

CONFIG = ModelConfig(50, 32, 64, 2, 4, 2, max_seq_len=32)


def naive(model, prompt, count):
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("length", [1, 7])
def test_greedy_equals_recomputing_everything(window, length):
    model = Transformer(replace(CONFIG, sliding_window=window), seed=3)
    prompt = list(range(length))
    expected = naive(model, prompt, 12)
    assert list(generate(model, prompt, 12)) == expected
    assert len(set(expected)) > 1
    assert list(generate(model, prompt, 12, stop=expected[5])) == expected[: expected.index(expected[5])]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}, {"attention_soft_cap": 4.0}, {"qk_norm": True}])
def test_one_compiled_pass_serves_all_positions(options, monkeypatch):
    """Each token by the same graph, whatever its position, and the tokens of a cache that grows."""
    torch.compiler.reset()
    counter = CompileCounter()
    graph = torch.compile(next_logits, dynamic=False, fullgraph=True, backend=counter)
    monkeypatch.setattr(compiled_decode, "_compiled", lambda: graph)
    model = Transformer(replace(CONFIG, **options), seed=3)
    if not options:
        quantize(model, Settings(Int()))
    expected = list(generate(model, [1, 2, 3], 20))
    for _ in range(2):
        assert list(generate(model, [1, 2, 3], 20, compiled=True)) == expected
    assert counter.frame_count == 1 and len(set(expected)) > 1
    longer = Transformer(replace(CONFIG, max_seq_len=100, **options), seed=3)
    list(generate(longer, [1] * 60, 20, compiled=True))
    assert counter.frame_count == 2, "another length of the cache"


@pytest.mark.full
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="inductor needs a C++ compiler")
def test_what_the_compiler_makes_gives_the_same_tokens():
    model = Transformer(CONFIG, seed=3)
    assert list(generate(model, [1, 2], 20, compiled=True)) == list(generate(model, [1, 2], 20))


def test_without_a_compiler_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"install g\+\+"):
        next(generate(Transformer(CONFIG), [1], 5, compiled=True))


def test_ends_with_the_context():
    model = Transformer(CONFIG)
    assert len(list(generate(model, [1] * 30, 100))) == 2
    for prompt in ([], [1] * 32):
        with pytest.raises(ValueError, match="use 1 to 31"):
            next(generate(model, prompt, 5))
    with pytest.raises(ValueError, match="temperature -1"):
        next(generate(model, [1], 5, temperature=-1))


def test_draws_follow_the_distribution():
    model = Transformer(ModelConfig(5, 16, 32, 1, 2, init_std=0.5))
    with torch.no_grad():
        expected = torch.softmax(model(torch.tensor([[2]]))[0, -1] / 0.7, dim=-1)
    drawn = [next(generate(model, [2], 1, temperature=0.7, seed=seed)) for seed in range(2000)]
    share = torch.bincount(torch.tensor(drawn), minlength=5) / len(drawn)
    assert (share - expected).abs().max() < 0.04
    assert list(generate(model, [2], 9, temperature=1, seed=4)) == list(generate(model, [2], 9, temperature=1, seed=4))


def test_a_space_at_the_end_is_taken_back():
    tokenizer = Tokenizer.load()
    ids, first = heal(tokenizer, tokenizer.encode("def "))
    assert ids == tokenizer.encode("def")
    assert all(tokenizer.decode([i]).startswith(" ") for i in first) and tokenizer.encode(" self")[0] in first
    assert heal(tokenizer, tokenizer.encode("def f")) == (tokenizer.encode("def f"), None)
    model = Transformer(ModelConfig(tokenizer.vocab_size, 32, 64, 1, 2, max_seq_len=32))
    assert next(generate(model, ids, 1, first=first)) in first


def test_missing_checkpoints_say_what_makes_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate_module, "CHECKPOINTS", tmp_path)
    assert run(["generate", "x"]) == 2
    assert "python -m minillm train --model-size target --export" in capsys.readouterr().err
    assert run(["generate", "x", "--model", str(tmp_path)]) == 2
    assert "is not a model folder" in capsys.readouterr().err
    assert generate_module.RUN_FILE == SETTINGS_FILE
    monkeypatch.chdir(tmp_path)
    for folder, named, wanted in (
        ("runs/e2e", ("e2e", "runs/e2e"), "train --resume --run e2e --export FOLDER`"),
        ("kept/my run", ("kept/my run",), "train --resume --run 'my run' --runs kept --export FOLDER`"),
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / SETTINGS_FILE).write_text("{}")
        for model in named:
            assert run(["generate", "x", "--model", model]) == 2
            assert f"--model {model} is a training run: `python -m minillm {wanted}" in capsys.readouterr().err
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft/config.json").write_text("{}")
    assert folder_of("draft") == tmp_path / "draft"
