"""The comparison of serving engines: the same tokens from all, wrong ones are not timed."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from minillm.bench import serve, serve_installed
from minillm.bench.load import skewed, uniform
from minillm.bench.serve_peers import Continuous, Limits, Ours, Static, timed, twin
from minillm.model import ModelConfig, Transformer, load_hf, save_hf
from minillm.model.generate import generate

LIMITS = Limits(num_blocks=64, block_size=4, token_budget=64, max_num_seqs=8)
ARRIVALS = skewed(6, prompt_tokens=(5, 12), max_tokens=10, shared_prefix=4, vocab_size=61)


@pytest.fixture(scope="module")
def model():
    config = ModelConfig(61, 32, 64, 2, 4, 2, max_seq_len=64, tie_embeddings=True, init_std=0.2)
    return Transformer(config, seed=3)


@pytest.fixture(scope="module")
def peer(model):
    return twin(model)


@pytest.mark.full
def test_rows_of_a_comparison(model, peer):
    rows = serve.compare("skewed", Ours(model, LIMITS), Static(peer, 4), ARRIVALS[:3])
    assert [row.name for row in rows] == [f"skewed: {what}" for what in serve.METRICS]
    assert all(row.correct and row.runs == 5 and row.ours > 0 and row.theirs > 0 and row.ratio > 0 for row in rows)


def test_wrong_tokens_are_not_timed(model, peer):
    ours = Ours(model, LIMITS).serve(ARRIVALS)
    assert serve.same_answers(model, ARRIVALS, ours, Static(peer, 4).serve(ARRIVALS))
    for wrong in (ours.answers[0][:-1], [*ours.answers[0][:-1], 60 - ours.answers[0][-1]]):
        other = replace(ours, answers=[wrong, *ours.answers[1:]])
        assert not serve.same_answers(model, ARRIVALS, ours, other)


def test_every_peer_gives_the_same_tokens_and_only_useful_ones_count(model, peer):
    mine = Ours(model, LIMITS).serve(ARRIVALS)
    for side in (Static(peer, 1), Static(peer, 6), Continuous(peer, LIMITS)):
        served = side.serve(ARRIVALS)
        assert serve.same_answers(model, ARRIVALS, mine, served), side.title
        assert [len(answer) for answer in served.answers] == [each.params.max_tokens for each in ARRIVALS]
        assert 0 < served.ttft.p50 <= served.ttft.p99 <= served.seconds


@pytest.mark.full
def test_rows_without_a_trace(model, peer, monkeypatch):
    class Card:
        memory_bandwidth_bytes_per_s = 1e9

    monkeypatch.setattr(serve, "machine", Card)
    ours, alone = Ours(model, LIMITS), uniform(1, prompt_tokens=4, max_tokens=8, vocab_size=61)
    prefix = serve.prefix_row(
        model, LIMITS, uniform(4, prompt_tokens=24, max_tokens=2, shared_prefix=16, vocab_size=61), 5
    )
    roofline = serve.roofline_row(ours, alone, 5)
    queue = serve.queue_row(ours, Continuous(peer, LIMITS), ARRIVALS)
    assert prefix.correct and roofline.correct and queue.correct and queue.runs == 1
    read = 4 * (sum(p.numel() for p in model.parameters()) + 2 * 2 * 2 * 8 * (4 + 8 / 2))
    assert roofline.theirs == pytest.approx(1e9 / read)


def test_what_is_not_installed_is_said(monkeypatch):
    assert not serve.installed(None, LIMITS)  # without a GPU
    assert [note.split()[0] for note in serve.notes()] == ["vLLM", "llama-cpp-python", "nano-vllm"]
    assert all(note.endswith("not compared.") for note in serve.notes())
    monkeypatch.setattr(serve_installed, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [note.split()[0] for note in serve.notes()] == ["llama-cpp-python", "nano-vllm"]


def test_vllm_is_asked_for_the_same_work(model, monkeypatch, tmp_path):
    """A stand-in with the interface of vLLM 0.19 whose tokens are ours."""

    class Engine:
        def __init__(self, **options):
            assert (options["max_model_len"], options["block_size"], options["max_num_seqs"]) == (64, 4, 8)
            self.model = load_hf(options["model"])

        def reset_prefix_cache(self):
            pass

        def generate(self, prompts, wanted, use_tqdm):
            found = []
            for prompt, each in zip(prompts, wanted, strict=True):
                assert each.temperature == 0 and each.ignore_eos
                ids = list(generate(self.model, prompt["prompt_token_ids"], each.max_tokens))
                times = SimpleNamespace(first_token_ts=1.0, last_token_ts=1.5, first_token_latency=0.25)
                found.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(ids))], metrics=times))
            return found

    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = Engine, SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", module)
    save_hf(model, tmp_path)
    theirs = serve_installed.VLLM(str(tmp_path), LIMITS, model.config.max_seq_len).serve(ARRIVALS)
    assert serve.same_answers(model, ARRIVALS, Ours(model, LIMITS).serve(ARRIVALS), theirs)
    assert theirs.ttft.p99 == 0.25 and theirs.tpot.p50 == 0.5 / (len(theirs.answers[0]) - 1)


def test_a_run_leaves_torch_as_it_was(model):
    before = torch.get_num_threads()
    timed(Ours(model, LIMITS, threads=before + 1), ARRIVALS[:1])
    assert torch.get_num_threads() == before


@pytest.mark.full
def test_the_frontier_is_measured(model, peer):
    def make(streams):
        return uniform(streams, prompt_tokens=4, max_tokens=4, vocab_size=61)

    rows = serve.frontier_rows(Ours(model, LIMITS), Static(peer, 4), make, 5, streams=(1, 3))
    assert [row.name for row in rows] == [f"{n} streams at once: tokens/s of each" for n in (1, 3)]
    assert all(row.correct and row.ours > 0 and row.runs == 5 for row in rows)
