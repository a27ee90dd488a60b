"""Closed forms of prefill and decode against numbers worked out by hand, and against passes that were counted."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from course.lab12_decoding import formulas as predict
from course.lab12_decoding.traffic import MemoryTraffic
from minillm.model import ModelConfig, Transformer
from minillm.model.generate import KVCache, generate
from minillm.predict.model import forward_flops, kv_bytes_per_token, parameters

LLAMA_70B = ModelConfig(128256, 8192, 28672, 80, 64, 8)
LLAMA_8B = ModelConfig(128256, 4096, 14336, 32, 32, 8)
TIED = ModelConfig(97, 32, 48, 3, 8, 2, max_seq_len=64, tie_embeddings=True)
UNTIED = ModelConfig(97, 32, 48, 2, 4, 4, max_seq_len=64, qkv_bias=True)


def test_bytes_per_token_of_a_70b_model():
    """P80: 2.62 MB with 64 kv heads, 0.33 MB with 8; 10.7 and 1.34 GB at 4K."""
    full = replace(LLAMA_70B, num_kv_heads=64)
    assert (kv_bytes_per_token(full), kv_bytes_per_token(LLAMA_70B)) == (2_621_440, 327_680)
    assert predict.kv_bytes(full, 4096) == pytest.approx(10.7e9, rel=0.01)
    assert predict.kv_bytes(LLAMA_70B, 4096) == pytest.approx(1.34e9, rel=0.01)
    assert kv_bytes_per_token(replace(LLAMA_70B, num_kv_heads=1)) * 64 == kv_bytes_per_token(full)


def test_decode_rates_of_a_70b_model():
    """P89: 23.9, 191 and 949 tokens per second at 3.35 TB/s; 1,531 if the caches are forgotten."""
    cases = ((1, 0, 23.9), (8, 0, 191.4), (64, 4096, 949), (64, 0, 1531))
    for batch, context, expected in cases:
        assert predict.decode_tokens_per_s(140e9, 327_680, batch, context, 3.35e12) == pytest.approx(expected, rel=2e-3)
    assert predict.decode_tokens_per_s(140e9, 327_680, 10**6, 4096, 3.35e12) == pytest.approx(
        predict.kv_ceiling(327_680, 4096, 3.35e12), rel=1e-3
    )


@pytest.mark.parametrize("config", [TIED, UNTIED])
@pytest.mark.parametrize(("batch", "new", "kept"), [(1, 1, 9), (3, 1, 7), (1, 12, 0), (2, 5, 6)])
def test_bytes_of_a_pass_are_those_counted(config, batch, new, kept):
    model, cache = Transformer(config), KVCache(config, kept + new, batch=batch)
    cache.keys.zero_(), cache.values.zero_()
    tokens, last = torch.zeros(batch, new, dtype=torch.long), torch.tensor([new - 1])
    with torch.no_grad(), MemoryTraffic(weights=model.parameters(), cache=(cache.keys, cache.values)) as traffic:
        model(tokens, torch.arange(kept, kept + new), attention=cache, rows=last)
    cost = predict.work(config, batch, new, kept, 4)
    assert traffic.read == {"weights": cost.weight_bytes, "cache": cost.kv_read_bytes}
    assert traffic.written == {"cache": cost.kv_written_bytes}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:  # all but the scores
        model(tokens, rows=last, attention=lambda q, k, v, **_: q)
    heads = 4 * config.num_layers * config.num_heads * config.head_dim
    assert cost.flops == counter.get_total_flops() + heads * batch * sum(kept + i + 1 for i in range(new))


def test_intensity_counts_the_tokens_of_a_pass():
    """P90: about 2/b FLOP per byte and token, of one prompt or of many sequences."""
    one, many, prompt = (predict.work(LLAMA_8B, *shape) for shape in ((1, 1, 0), (64, 1, 0), (1, 64, 0)))
    assert one.intensity == pytest.approx(1.0, rel=0.02)
    assert many.intensity == pytest.approx(64, rel=0.05) and prompt.intensity == pytest.approx(60, rel=0.05)
    peak, bandwidth = 989e12, 3.35e12
    assert one.bound(peak, bandwidth) == "memory"
    assert predict.work(LLAMA_8B, 1, 2048, 0).bound(peak, bandwidth) == "compute"
    assert one.seconds(peak, bandwidth) == one.bytes / bandwidth


def test_batch_at_which_compute_takes_over():
    peak, bandwidth = 989e12, 3.35e12
    turn = predict.turning_batch(LLAMA_8B, 128, peak, bandwidth)
    assert turn == pytest.approx(439.5, rel=1e-3)
    for batch, bound in ((int(turn), "memory"), (int(turn) + 1, "compute")):
        assert predict.work(LLAMA_8B, batch, 1, 127).bound(peak, bandwidth) == bound
    assert predict.turning_batch(LLAMA_8B, 512, peak, bandwidth) is None
    assert predict.work(LLAMA_8B, 10**6, 1, 511).bound(peak, bandwidth) == "memory"
    speed = [predict.decode_rate(LLAMA_8B, batch, 128, peak, bandwidth) for batch in (1, 2, 1000, 2000)]
    assert speed[1] > 1.9 * speed[0] and speed[3] == pytest.approx(speed[2], rel=0.01)


def test_entries_and_flops_of_an_answer():
    """P81, P82."""
    assert predict.kv_entries(10, 1) == 10 and predict.kv_entries(10, 5) == 14
    model = Transformer(TIED)
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    list(generate(model, [1, 2, 3], 6))
    assert sum(seen) == predict.kv_entries(3, 6)
    cached = predict.answer_flops(TIED, 3, 6, cached=True)
    assert cached == sum(predict.work(TIED, 1, n, kept).flops for n, kept in ((3, 0), *((1, 3 + i) for i in range(5))))
    assert predict.answer_flops(TIED, 3, 1, cached=True) == predict.answer_flops(TIED, 3, 1, cached=False)
    ratio = predict.answer_flops(LLAMA_8B, 1000, 200, cached=False) / predict.answer_flops(
        LLAMA_8B, 1000, 200, cached=True
    )
    assert 150 < ratio < 200
    assert predict.work(TIED, 1, 1, 20).flops == forward_flops(TIED, 21).total


def test_a_window_bounds_the_scores_not_the_prompt():
    window = replace(TIED, sliding_window=4)
    more = predict.work(TIED, 1, 10, 5).flops - predict.work(window, 1, 10, 5).flops
    keys = sum(i + 1 - min(i + 1, 4) for i in range(5, 15))
    assert more == pytest.approx(4 * TIED.num_layers * TIED.num_heads * TIED.head_dim * keys)


def test_what_fits_and_how_long_it_takes():
    left = 80e9 - parameters(LLAMA_8B).total * 2
    assert predict.tokens_that_fit(LLAMA_8B, 80e9) == int(left // 131_072)
    assert predict.tokens_that_fit(LLAMA_70B, 80e9) < 0
    assert predict.request_seconds(0.02, 0.08, 300, 0.025) == pytest.approx(7.575)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: predict.work(TIED, 0, 1, 0), "batch is 0"),
        (lambda: predict.work(TIED, 1, 1, -1), "kept is -1"),
        (lambda: predict.kv_entries(3, 0), "answer is 0"),
        (lambda: predict.work(TIED, 1, 1, 0).seconds(0, 1), "peak_flops is 0"),
    ],
)
def test_bad_input(call, said):
    with pytest.raises(ValueError, match=said):
        call()
