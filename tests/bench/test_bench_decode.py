"""Decoding of a model against the roofline and peers, with models of the 8B shapes' proportions."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from minillm.bench import decode, serve_installed
from minillm.bench.shapes import SHAPES, model_of, random_model
from minillm.model import Transformer, load_hf, save_hf
from minillm.model.generate import generate

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    card = SimpleNamespace(memory_bandwidth_bytes_per_s=1e9, peak_flops=1e10)
    monkeypatch.setattr(decode, "machine", lambda: card)
    monkeypatch.setattr(decode, "PROMPT", 6)
    monkeypatch.setattr(decode, "ANSWER", 5)
    monkeypatch.setattr(decode, "WARM_UP", 2)
    monkeypatch.setattr(decode, "STEPS", 3)


def test_the_8b_shapes_have_the_published_numbers_of_parameters():
    """8.03, 8.19 and 1.24 billion: the models' cards on Hugging Face."""
    for name, billions in (("llama-8b", 8.03), ("qwen3-8b", 8.19), ("llama-1b", 1.24)):
        model = Transformer(SHAPES[name], seed=None, device="meta")
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.005)
    for tiny, large in (("tiny-llama", "llama-8b"), ("tiny-qwen3", "qwen3-8b")):
        assert SHAPES[tiny].qk_norm == SHAPES[large].qk_norm
        assert {name for name, _ in Transformer(SHAPES[tiny], device="meta").blocks[0].named_parameters()} == {
            name for name, _ in Transformer(SHAPES[large], seed=None, device="meta").blocks[0].named_parameters()
        }


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_rows_of_a_random_model(name, monkeypatch):
    monkeypatch.setattr(decode, "unavailable", lambda: dict.fromkeys(("transformers", "vLLM", "nano-vllm"), "no"))
    one, three = decode.rows(name, streams=(1, 3), device="cpu")
    assert [one.name, three.name] == [f"{name}, {n} sequences decode" for n in (1, 3)]
    assert all(row.correct and row.runs == 5 and 0 < row.ratio < 1 for row in (one, three))
    assert one.peer == "roofline: 1 GB/s, 0.01 TFLOP/s (measured)"


def test_the_roofline_is_bytes_or_products():
    model = random_model(SHAPES["tiny-llama"], CPU, torch.float32)
    config = model.config
    weights = 4 * (sum(p.numel() for p in model.parameters()) - config.vocab_size * config.hidden_size)
    keys = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4 * 100
    assert decode.roofline_s(model, 1, 100) == pytest.approx((weights + keys) / 1e9)
    products = weights / 4 - (2 * config.num_layers + 1) * config.hidden_size  # norms take none
    assert decode.roofline_s(model, 10_000, 0) == pytest.approx(2 * products * 10_000 / 1e10)


@pytest.mark.full
def test_transformers_has_the_same_tokens(monkeypatch, tmp_path):
    monkeypatch.setattr(decode, "unavailable", lambda: {"transformers": "", "vLLM": "no", "nano-vllm": "no"})
    save_hf(random_model(replace(SHAPES["tiny-qwen3"], max_seq_len=64), CPU, torch.float32), tmp_path)
    rows = decode.rows(str(tmp_path), streams=(2,), device="cpu")
    assert [row.peer for row in rows][1:] == ["transformers generate, 2 at a time"]
    assert all(row.correct and row.ratio > 0 for row in rows)


def test_nano_vllm_is_asked_for_the_same_work(monkeypatch):
    """A stand-in with the interface of nano-vllm 0.2 whose tokens are ours."""

    class Engine:
        def __init__(self, folder, **options):
            assert options == {
                "enforce_eager": False, "tensor_parallel_size": 1, "max_model_len": 11, "max_num_seqs": 2
            }  # fmt: skip
            self.model, self.left = load_hf(folder), False

        def generate(self, prompts, wanted, use_tqdm):
            assert all(each.ignore_eos and each.temperature > 1e-10 for each in wanted) and not use_tqdm
            pairs = zip(prompts, wanted, strict=True)
            return [{"token_ids": list(generate(self.model, ids, each.max_tokens))} for ids, each in pairs]

        def exit(self):
            self.left = True

    module = ModuleType("nanovllm")
    module.LLM, module.SamplingParams = Engine, SimpleNamespace
    monkeypatch.setitem(sys.modules, "nanovllm", module)
    monkeypatch.setattr(decode, "unavailable", lambda: {"transformers": "no", "vLLM": "no", "nano-vllm": ""})
    rows = decode.rows("tiny-qwen3", streams=(2,), device="cpu")
    assert rows[1].peer == "nano-vllm" and rows[1].correct
    assert len(decode.rows("tiny-llama", streams=(2,), device="cpu")) == 1  # it reads Qwen3 only


def test_a_peer_that_fails_leaves_the_other_rows(monkeypatch):
    monkeypatch.setattr(decode, "unavailable", lambda: {"transformers": "no", "vLLM": "", "nano-vllm": "no"})
    monkeypatch.setitem(sys.modules, "vllm", None)
    good, bad = decode.rows("tiny-llama", streams=(2,), device="cpu")
    assert good.correct and not bad.correct and bad.name.startswith("tiny-llama: ModuleNotFoundError: import of vllm")


def test_wrong_tokens_are_not_timed():
    model, trace = random_model(SHAPES["tiny-llama"], CPU, torch.float32), decode.arrivals(2, 512)
    right = [list(generate(model, each.prompt, each.params.max_tokens)) for each in trace]
    mine = SimpleNamespace(answers=right)
    assert decode.alike(model, trace, mine, mine)
    for wrong in (right[1][:-1], [*right[1][:-1], (right[1][-1] + 1) % 512]):
        assert not decode.alike(model, trace, mine, SimpleNamespace(answers=[right[0], wrong]))


def test_what_is_no_model_is_told():
    with pytest.raises(ValueError, match=r"--model nowhere is no folder with a config\.json, and none of llama-8b"):
        model_of("nowhere", CPU, torch.float32)


def test_what_is_not_installed_is_known(monkeypatch):
    monkeypatch.setattr(serve_installed, "find_spec", lambda name: name if name != "nanovllm" else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert serve_installed.unavailable() == {
        "transformers": "", "vLLM": "there is no CUDA GPU", "nano-vllm": "it is not installed"
    }  # fmt: skip
