"""Triton's kernel in its interpreter, against the loop over blocks in float64. Run by test_paged_triton.py, which sets
TRITON_INTERPRET for this process: it is read when a kernel is defined, and would stay for every other test."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_paged import scattered
from test_paged_quantized import pool_of

from minillm.model import ModelConfig, Transformer
from minillm.model.generate import generate
from minillm.model.paged import block_by_block, gathered, paged_attention
from minillm.model.paged.quantized import QuantizedPool
from minillm.model.paged.triton import TritonSplitKV, triton_split_kv
from minillm.quantize.kv import KV_FORMATS
from minillm.serve import LLM, SamplingParams

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def compare(
    seed, lengths, heads, kv_heads, block_size, head_dim, window, splits, dtype=torch.float32, tolerance=2e-6, **options
):
    """Slots that hold no key of a sequence are nan: none may be read."""
    parts, pools, tables = scattered(seed, lengths, heads, kv_heads, block_size, head_dim)
    q, pools = torch.cat([part[0] for part in parts]).to(dtype), [pool.to(dtype) for pool in pools]
    where = (tables, *zip(*lengths, strict=True))
    options |= {"window": window}
    exact = paged_attention(q.double(), *(p.double() for p in pools), *where, **options, backend=block_by_block)
    y = paged_attention(q, *pools, *where, **options, backend=TritonSplitKV(splits))
    assert y.dtype is dtype and y.shape == q.shape
    torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=tolerance)
    if dtype is torch.float32:
        torch.testing.assert_close(y, paged_attention(q, *pools, *where, **options, backend=gathered))


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 99),
    lengths=st.lists(
        st.integers(1, 20).flatmap(lambda c: st.tuples(st.integers(1, c), st.just(c))), min_size=1, max_size=2
    ),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3, 17]),
    block_size=st.sampled_from([1, 3, 4, 16]),
    head_dim=st.sampled_from([2, 16, 24, 32]),
    window=st.none() | st.integers(1, 41),
    splits=st.sampled_from([None, 2]),
    dtype=st.sampled_from(sorted(TOLERANCE, key=str)),
)
def test_small_shapes(seed, lengths, kv_heads, group, block_size, head_dim, window, splits, dtype):
    sizes = (lengths, kv_heads * group, kv_heads, block_size, head_dim)
    compare(seed, *sizes, window, splits, dtype, TOLERANCE[dtype])


@pytest.mark.parametrize("block_size, window, splits", [(1, None, 1), (4, 50, 3), (16, None, 3), (16, 50, 1)])
def test_several_tiles_of_queries_and_of_keys(block_size, window, splits):
    """A long decode beside a prompt piece: 64 keys at a time, 64 rows at a time."""
    compare(1, [(1, 150), (40, 100)], 4, 1, block_size, 24, window, splits)


@pytest.mark.parametrize("window", [None, 90])
def test_each_sequence_has_its_own_number_of_splits(window, monkeypatch):
    """A long decode is cut in many parts beside a short prompt piece that is not cut at all."""
    monkeypatch.setattr("minillm.model.paged.split.MIN_KEYS", 16)
    monkeypatch.setattr("minillm.model.paged.triton.count_splits", lambda keys, *_: np.maximum(1, keys // 16))
    compare(7, [(1, 150), (9, 9), (1, 40)], 4, 2, 4, 24, window, None)


@pytest.mark.parametrize("soft_cap", [0.5, 50.0])
def test_soft_caps(soft_cap):
    compare(8, [(1, 150), (9, 20)], 4, 2, 4, 24, 90, 3, tolerance=1e-5, soft_cap=soft_cap)


def test_more_splits_than_keys():
    compare(2, [(1, 1), (2, 3)], 2, 1, 4, 32, None, 8)


def test_a_wide_head_takes_smaller_tiles():
    compare(3, [(1, 40), (9, 20)], 4, 1, 16, 136, None, 2)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, splits):
    compare(4, [(1, 150), (5, 9)], 4, 2, 4, 32, None, splits, dtype, TOLERANCE[dtype])


@pytest.mark.parametrize("splits", [1, 3])
def test_not_a_number_stays_with_its_sequence(splits):
    parts, pools, tables = scattered(5, [(1, 150), (1, 20)], 2, 1, 4, 16)
    q, pools = torch.cat([part[0] for part in parts]).float(), [pool.float() for pool in pools]
    pools[0][tables[0, 7]] = float("nan")
    y = paged_attention(q, *pools, tables, [1, 1], [150, 20], backend=TritonSplitKV(splits))
    assert y[0].isnan().all() and y[1].isfinite().all()


@pytest.mark.parametrize("window", [None, 5])
def test_greedy_tokens_of_the_engine(window):
    config = ModelConfig(50, 48, 64, 2, 4, 2, head_dim=24, max_seq_len=32, init_std=0.2, sliding_window=window)
    model = Transformer(config, seed=3)
    prompts = [[1, 2, 3, 4, 5, 6, 7], [10], [1, 2, 3, 4, 9]]
    llm = LLM(model, block_size=2, chunk=3, backend=triton_split_kv)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=3))
    assert [o.answers[0].ids for o in outputs] == [list(generate(model, prompt, 3)) for prompt in prompts]


@pytest.mark.parametrize("window, splits", [(None, None), (None, 2), (5, 2)])
def test_decoding_with_programs_that_are_the_same_for_all_lengths(window, splits):
    config = ModelConfig(50, 48, 64, 2, 4, 2, head_dim=24, max_seq_len=32, init_std=0.2, sliding_window=window)
    model = Transformer(config, seed=3)
    prompts = [[1, 2, 3, 4, 5, 6, 7], [10], [1, 2, 3, 4, 9]]
    llm = LLM(model, block_size=2, backend=TritonSplitKV(splits), graphs=True, max_num_seqs=5)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=4))
    assert [o.answers[0].ids for o in outputs] == [list(generate(model, prompt, 4)) for prompt in prompts]
    assert list(llm.runner.graphs.graphs) == [4]  # three sequences, filled up


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 99),
    lengths=st.lists(
        st.integers(1, 12).flatmap(lambda c: st.tuples(st.integers(1, min(c, 5)), st.just(c))), min_size=1, max_size=2
    ),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3]),
    block_size=st.sampled_from([1, 3, 16]),
    head_dim=st.sampled_from([5, 16, 24]),
    window=st.none() | st.integers(1, 25),
    splits=st.sampled_from([None, 2]),
    format=st.sampled_from(sorted(KV_FORMATS)),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_codes_of_8_bits(seed, lengths, kv_heads, group, block_size, head_dim, window, splits, format, dtype):
    parts, pools, tables = scattered(seed, lengths, kv_heads * group, kv_heads, block_size, head_dim)
    q, where = torch.cat([part[0] for part in parts]), (tables, *zip(*lengths, strict=True))
    coded = [pool_of(pool, KV_FORMATS[format]) for pool in pools]
    rounded = [pool.format.decode_rows(pool.codes, pool.scale.double()) for pool in coded]
    exact = paged_attention(q, *rounded, *where, window=window, backend=block_by_block)
    y = paged_attention(q.to(dtype), *coded, *where, window=window, backend=TritonSplitKV(splits))
    tolerance = 2e-6 if dtype is torch.float32 else 5e-3
    torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("format", KV_FORMATS)
def test_small_values_are_not_lost_in_float16(format):
    """Their scales are: of values around 1e-4 they are below what float16 can hold."""
    parts, (keys, values), tables = scattered(3, [(1, 40), (2, 33)], 4, 2, 4, 32)
    q = torch.cat([part[0] for part in parts])
    coded = [pool_of(pool, KV_FORMATS[format]) for pool in (keys, values * 1e-4)]
    where = (tables, (1, 2), (40, 33))
    rounded = [pool.format.decode_rows(pool.codes, pool.scale.double()) for pool in coded]
    exact = paged_attention(q, *rounded, *where, window=None, backend=block_by_block)
    half = paged_attention(q.half(), *coded, *where, window=None, backend=triton_split_kv)
    assert (half.double() - exact).norm() <= 3e-3 * exact.norm()


def test_every_code_of_e4m3_is_read_exactly():
    """255 keys of one number each, all but nan: the values come back through a softmax that sees one key."""
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8).view(-1, 1, 1, 1)
    pool = QuantizedPool(codes.repeat(1, 1, 1, 2), torch.ones(len(codes), 1, 1), KV_FORMATS["fp8"])
    tables, ones = torch.arange(len(codes))[:, None], [1] * len(codes)
    y = paged_attention(torch.ones(len(codes), 1, 2), pool, pool, tables, ones, ones, backend=triton_split_kv)
    assert torch.equal(y[:, 0, 0], codes.flatten().view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("graphs, kv", [(False, "int8"), (True, "fp8")])
def test_greedy_tokens_of_the_engine_with_codes(graphs, kv):
    model = Transformer(ModelConfig(50, 48, 64, 2, 4, 2, head_dim=24, max_seq_len=32, init_std=0.2), seed=3)
    prompts, options = [[1, 2, 3, 4, 5, 6, 7], [10], [1, 2, 3, 4, 9]], {"block_size": 2, "chunk": 3, "kv_dtype": kv}
    ours, loop = (
        LLM(model, **options, **rest).generate(prompts, SamplingParams(max_tokens=4))
        for rest in ({"backend": triton_split_kv, "graphs": graphs}, {"backend": block_by_block})
    )
    assert [o.answers[0].ids for o in ours] == [o.answers[0].ids for o in loop]


def test_what_the_kernel_cannot_take_is_refused():
    parts, pools, tables = scattered(6, [(1, 5)], 2, 1, 4, 16)
    call = partial(triton_split_kv, block_table=tables, query_lens=[1], context_lens=[5], window=None)
    q, k, v = (x.float() for x in (parts[0][0], *pools))
    with pytest.raises(ValueError, match="takes float32, bfloat16 or"):
        call(q.double(), k.double(), v.double())
    with pytest.raises(ValueError, match=r"keys of torch\.bfloat16"):
        call(q, k.bfloat16(), v)
    with pytest.raises(ValueError, match="with equal strides"):
        call(q, k, v.transpose(0, 1).contiguous().transpose(0, 1))
