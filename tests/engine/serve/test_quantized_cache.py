"""Keys and values in 8 bits: whatever is switched on, tokens are those of a naive loop that rounds each key and each
value once. The loop, its attention and its rounding are written here from their definitions."""

import math
from copy import deepcopy
from dataclasses import replace
from functools import cache

import pytest
import torch
from test_proof import mixed_requests

from minillm.measure import memory
from minillm.model import ModelConfig, Transformer
from minillm.model.draw import Draw, sample_seed, softmax_at
from minillm.model.paged import block_by_block, gathered
from minillm.predict.model import kv_bytes_per_token
from minillm.quantize.kv import KV_FORMATS, RoundedKeysAndValues
from minillm.serve import LLM
from minillm.serve.run.memory import default_num_blocks
from minillm.serve.speculate import DraftModel, NGram

pytestmark = pytest.mark.drawn(2)

CONFIG = ModelConfig(61, 32, 64, 2, 4, 2, max_seq_len=64, init_std=0.2)
E4M3 = sorted(
    sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    for sign in (-1, 1)
    for exponent in range(16)
    for mantissa in range(8)
    if exponent < 15 or mantissa < 7
)
E4M3.remove(0)  # of the two zeros
ZERO = E4M3.index(0)


def int8(rows):
    """255 steps over -largest .. largest, of each row by itself."""
    step = (2 * rows.abs().amax(-1, keepdim=True) / 255).float().to(rows.dtype)
    return torch.where(step == 0, rows, torch.clamp(torch.round(rows / step), -128, 127) * step)


def fp8(rows):
    """The nearest number that e4m3 has, the largest of a row being 448; of two, the one with an even last bit."""
    unit = (rows.abs().amax(-1, keepdim=True) / 448).float().to(rows.dtype)
    levels = torch.tensor(E4M3, dtype=rows.dtype)
    distance = ((rows / unit)[..., None] - levels).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    odd = torch.tensor([abs(place - ZERO) % 2 for place in range(len(E4M3))])
    return torch.where(unit == 0, rows, levels[(nearest * (2 - odd)).argmax(-1)] * unit)


ROUNDING = {"int8": int8, "fp8": fp8}
WINDOWS = {"sliding_window": 5, "full_attention_layers": (1,)}  # two pools of blocks


class Naive:
    """An attention function for one sequence: all keys so far, each rounded when it came, and a softmax."""

    def __init__(self, kv):
        self.round, self.keys, self.values = ROUNDING[kv], {}, {}

    def __call__(self, q, k, v, *, layer, positions, window):
        for kept, rows in ((self.keys, k[0]), (self.values, v[0])):
            rounded = self.round(rows)
            kept[layer] = torch.cat((kept[layer], rounded), 1) if layer in kept else rounded
        group = q.shape[1] // k.shape[1]
        keys, values = (kept[layer].repeat_interleave(group, 0) for kept in (self.keys, self.values))
        distance = positions[:, None] - torch.arange(keys.shape[1])
        hidden = (distance < 0) | (distance >= (window or math.inf))
        scores = (q[0] @ keys.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf)
        return (scores.softmax(-1) @ values)[None]


@torch.no_grad()
def naive(model, kv, prompt, params, index=0):
    """The answer without its stop token."""
    attention, draw, ids = Naive(kv), Draw(sample_seed(params.seed or 0, index)), []
    tokens, start = list(prompt), 0
    while len(ids) < params.max_tokens and start + len(tokens) <= model.config.max_seq_len - (not ids):
        positions = torch.arange(start, start + len(tokens))
        logits = model(torch.tensor([tokens]), positions, attention=attention)[0, -1].float()
        token = draw.choose(softmax_at(logits, params.temperature)) if params.temperature else int(logits.argmax())
        if token in params.stop_tokens:
            break
        ids.append(token)
        start, tokens = start + len(tokens), [token]
        if start + 1 >= model.config.max_seq_len:
            break
    return ids


@cache
def world(kv, dtype=torch.float32, **variant):
    """A model, requests, and the naive loop's answers to them."""
    model, requests = Transformer(replace(CONFIG, **dict(variant)), seed=2).to(dtype), mixed_requests(24)
    return model, requests, [[naive(model, kv, p, w, i) for i in range(w.n)] for p, w, _, _ in requests]


def nothing_left(llm):
    assert llm.pool.used == 0 and llm.pool.references == [0] * llm.pool.total
    assert llm.pool.free_host == llm.pool.num_host_blocks and not llm.scheduler.running and not llm.unfinished


def run(llm, requests, expected):
    """All of them, some cancelled; returns the outputs."""
    outputs = {}
    for number, (prompt, params, priority, _) in enumerate(requests):
        llm.add(prompt, params, request_id=str(number), priority=priority)
    for step in range(2000):
        if step == 9:
            for number, (*_, end) in enumerate(requests):
                if end is not None and str(number) not in outputs:
                    llm.cancel(str(number))
        outputs |= {output.request_id: output for output in llm.step()}
        if len(outputs) == len(requests):
            break
    for number, answers in enumerate(expected):
        for answer, ids in zip(outputs[str(number)].answers, answers, strict=False):
            assert answer.ids == (ids[: len(answer.ids)] if answer.reason == "cancelled" else ids)
    nothing_left(llm)
    return list(outputs.values())


def near(model):
    """A draft that agrees now and then."""
    draft, noise = deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=noise))
    return draft


def by_a_model(model):
    return DraftModel(near(model), block_size=4)


TIGHT = {"token_budget": 40, "max_num_seqs": 12, "reserve": 0}
ENGINES = {
    "defaults": {},
    "chunks, recomputed": TIGHT | {"block_size": 4, "num_blocks": 20, "chunk": 7},
    "chunks, swapped": TIGHT | {"block_size": 4, "num_blocks": 20, "chunk": 7, "preemption": "swap"},
    "odd blocks, no prefixes": TIGHT | {"block_size": 3, "num_blocks": 24, "prefix_cache": False, "chunk": 5},
    "blocks of one": TIGHT | {"block_size": 1, "num_blocks": 70},
    "by a loop": {"backend": block_by_block},
    "asynchronous": TIGHT | {"block_size": 4, "num_blocks": 20, "async_scheduling": True, "preemption": "swap"},
    "replayed": {"block_size": 4, "graphs": True, "backend": gathered},
    "drafts by n-gram": TIGHT | {"block_size": 4, "num_blocks": 20, "proposer": lambda _: NGram(shortest=1)},
    "drafts by a model": TIGHT | {"block_size": 4, "num_blocks": 24, "preemption": "swap", "proposer": by_a_model},
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kv", ROUNDING)
@pytest.mark.parametrize("name", ENGINES)
def test_tokens_equal_those_of_a_naive_loop_with_the_same_rounding(name, kv):
    model, requests, expected = world(kv)
    options = dict(ENGINES[name])
    if "proposer" in options:
        options |= {"proposer": options["proposer"](model), "k": 3}
    if name == "drafts by a model":  # whose drawn answers have the same distribution, with other draws
        greedy = [number for number, (_, params, *_) in enumerate(requests) if not params.temperature]
        requests, expected = ([each[number] for number in greedy] for each in (requests, expected))
    llm = LLM(model, kv_dtype=kv, **options)
    outputs = run(llm, requests, expected)
    tight = "num_blocks" in options
    assert tight == (sum(output.preemptions for output in outputs) > 2)
    assert llm.pool.copied > 0 or options.get("block_size") == 1
    if options.get("prefix_cache", True):
        assert sum(output.hit for output in outputs) > 50
    if "proposer" in options:
        assert sum(output.accepted for output in outputs) > 0


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kv", ROUNDING)
@pytest.mark.parametrize(
    "variant",
    [{"num_kv_heads": 1}, {"num_kv_heads": 4, "head_dim": 6}, {"sliding_window": 5}, {"qk_norm": True}, WINDOWS],
    ids=str,
)
def test_other_models(variant, kv):
    """One kv head for four, one each with an odd size, a window; two bytes instead of four would change the tokens."""
    model, requests, expected = world(kv, torch.float64, **variant)  # in 32 bits a CPU may meet a tie
    run(LLM(model, kv_dtype=kv, block_size=3, num_blocks=30, chunk=7, **TIGHT), requests, expected)


@pytest.mark.parametrize("kv", ROUNDING)
def test_the_rounding_is_seen_in_the_tokens(kv):
    model, requests, expected = world(kv)
    outputs = LLM(model).generate([prompt for prompt, *_ in requests], [params for _, params, *_ in requests])
    assert [[answer.ids for answer in output.answers] for output in outputs] != expected


FLOATS, CODES = {"bytes_per_element": 4}, {"bytes_per_element": 1, "scale_bytes": 4}


@pytest.mark.parametrize("head_dim", [6, 8])
@pytest.mark.parametrize("kv, sizes", [(None, FLOATS), ("int8", CODES), ("fp8", CODES)])
def test_the_bytes_that_are_allocated_are_those_of_the_formula(kv, sizes, head_dim):
    model = Transformer(replace(CONFIG, head_dim=head_dim))
    with memory(model) as tracker:
        llm = LLM(model, kv_dtype=kv, block_size=3, num_blocks=7)
        held = tracker.live.other - llm.runner.tables.on_device.nbytes
    assert held == llm.cache.nbytes == 21 * kv_bytes_per_token(model.config, **sizes)


def test_the_default_pool_holds_as_many_more_tokens(monkeypatch):
    config = ModelConfig(64, 1024, 64, 4, 8, max_seq_len=1 << 20)
    model = Transformer(config, device="meta", dtype=torch.bfloat16)
    model.embedding.weight = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
    monkeypatch.setattr("minillm.serve.run.memory.psutil.virtual_memory", lambda: type("M", (), {"available": 1e9}))
    plain, coded = (default_num_blocks(model, 16, kv_format=KV_FORMATS[kv] if kv else None) for kv in (None, "int8"))
    assert coded == pytest.approx(plain * 2 * 128 / (128 + 4), rel=1e-3)


@pytest.mark.parametrize("kv", ["int4", "INT8", 8, ["int8"], True])
def test_an_unknown_kv_dtype_is_one_sentence(kv):
    with pytest.raises(ValueError, match=r"kv_dtype .* is unknown: use 'int8', 'fp8' or None\.$"):
        LLM(Transformer(CONFIG), kv_dtype=kv)


def test_a_backend_that_reads_no_codes_is_refused():
    class Floats:
        reads_codes = False

        def __call__(self, *_):
            raise AssertionError

    with pytest.raises(ValueError, match="kv_dtype 'int8': Floats reads no codes, leave kv_dtype or it out"):
        LLM(Transformer(CONFIG), kv_dtype="int8", backend=Floats())


def test_logits_without_an_engine():
    """`RoundedKeysAndValues` in one pass gives what the naive loop does, token by token."""
    model, tokens = Transformer(CONFIG, seed=2).double(), torch.arange(20) * 7 % 61
    for kv, format in KV_FORMATS.items():
        attention = Naive(kv)
        with torch.no_grad():
            one_by_one = [model(tokens[at][None, None], torch.tensor([at]), attention=attention)[0] for at in range(20)]
            together = model(tokens[None], attention=RoundedKeysAndValues(format))[0]
        torch.testing.assert_close(together, torch.cat(one_by_one))
