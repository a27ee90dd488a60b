"""Blocks through torch.compile: the same tokens, compiled once for all layers and numbers of tokens."""

import shutil
from dataclasses import replace

import pytest
import torch
from recorded import record
from torch._dynamo.utils import counters

from minillm.__main__ import run
from minillm.data import Tokenizer
from minillm.model import ModelConfig, Transformer, save_hf
from minillm.model.generate import generate
from minillm.serve import LLM, SamplingParams
from minillm.serve.run.decode_graphs import DecodeGraphs
from minillm.serve.run.optimise import CompiledBlock

CONFIG = ModelConfig(50, 32, 64, 10, 4, 2, max_seq_len=48, init_std=0.2)  # more layers than dynamo compiles one by one
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10], [11, 12, 13, 14]]


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def same_tokens(variant, backend, count=9, **options):
    model, plain = (Transformer(replace(CONFIG, **variant), seed=3) for _ in range(2))
    names = list(model.state_dict())
    outputs = LLM(model, compile=backend, block_size=4, **options).generate(PROMPTS, SamplingParams(max_tokens=count))
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert output.answers[0].ids == list(generate(plain, prompt, count))
    assert list(model.state_dict()) == names
    return model


@pytest.mark.full
def test_tokens_are_the_naive_loops():
    model = same_tokens({"sliding_window": 5, "qk_norm": True, "tie_embeddings": True}, "eager")
    assert counters["stats"]["unique_graphs"] <= 8, "compiled anew for every layer or number of tokens"
    assert list(generate(model, [1, 2, 3], 9)) == list(generate(Transformer(model.config, seed=3), [1, 2, 3], 9))


@pytest.mark.full
def test_fused_products_graphs_and_a_second_engine(monkeypatch):
    monkeypatch.setattr(DecodeGraphs, "_record", lambda self, compute: record(compute))
    monkeypatch.setattr("minillm.model.transformer.check_tokens", lambda *_: None)
    model = same_tokens({"num_layers": 2}, "eager", fused=True)
    again = LLM(model, compile="eager", graphs=True, async_scheduling=True)
    outputs = again.generate(PROMPTS, SamplingParams(max_tokens=9))
    plain = Transformer(model.config, seed=3)
    assert [output.answers[0].ids for output in outputs] == [list(generate(plain, prompt, 9)) for prompt in PROMPTS]
    assert again.runner.graphs.graphs and all(isinstance(block.forward, CompiledBlock) for block in model.blocks)


@pytest.mark.full
def test_fused_products_break_no_graph():
    """Comparing addresses cannot be traced: a block is two graphs, before attention and after it, fused or not."""
    found = []
    for fused in (False, True):
        torch.compiler.reset()
        counters.clear()
        model = same_tokens({"num_layers": 2}, "eager", count=3, fused=fused)
        found.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    assert found[0] == found[1], found
    model.double()  # each has its own memory again
    plain = Transformer(model.config, seed=3).double()
    tokens = torch.arange(6).view(1, 6)
    torch.testing.assert_close(model(tokens), plain(tokens))
    model.blocks[0].mlp.gate_proj.weight.data.zero_(), plain.blocks[0].mlp.gate_proj.weight.data.zero_()
    torch.testing.assert_close(model(tokens), plain(tokens))


@pytest.mark.full
def test_ahead_of_time():
    same_tokens({"num_layers": 1}, "aot_eager", count=2)


@pytest.mark.full
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="inductor needs a C++ compiler")
def test_inductor(tmp_path, capsys):
    tokenizer = Tokenizer.load()
    model = Transformer(ModelConfig(tokenizer.vocab_size, 32, 64, 1, 2, max_seq_len=64, tie_embeddings=True))
    save_hf(model, tmp_path)
    tokenizer.save(tmp_path)
    counters.clear()
    said = []  # of three tokens two are decoded, by a pass that the command compiles
    for options in ([], ["--compile"]):
        assert run(["generate", "def ", "--max-new-tokens", "3", "--model", str(tmp_path), *options]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("backend", ["fast", 3, None])
def test_unknown_backends_are_refused(backend):
    with pytest.raises(ValueError, match=f"compile {backend!r} is unknown: use True for inductor, or one of eager, "):
        LLM(Transformer(replace(CONFIG, num_layers=1)), compile=backend)


def test_without_a_compiler_it_says_so(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="compile needs a C\\+\\+ compiler on a CPU and there is none: install g"):
        LLM(Transformer(replace(CONFIG, num_layers=1)), compile=True)
