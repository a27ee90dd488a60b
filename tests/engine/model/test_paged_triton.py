"""The Triton kernel: in Triton's interpreter on the CPU, compiled for GPUs that are not there, and on one that is."""

import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_paged import scattered

from minillm.model import ModelConfig, Transformer, kernels
from minillm.model.generate import generate
from minillm.model.paged import block_by_block, default_backend, gathered, paged_attention
from minillm.model.paged import split as paged_split
from minillm.model.paged import triton as paged_triton
from minillm.model.paged.cpp import cpp_decode, missing
from minillm.model.paged.quantized import QuantizedPool
from minillm.model.paged.triton import TritonSplitKV, triton_split_kv
from minillm.quantize.kv import KV_FORMATS
from minillm.serve import LLM, SamplingParams
from tests.engine.triton_interpreter import check_in_the_interpreter, needs_triton


@pytest.mark.full
@needs_triton
def test_in_the_interpreter():
    check_in_the_interpreter(Path(__file__).with_name("interpreted_kernel.py"))


@needs_triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.drawn(2)
@pytest.mark.parametrize("codes, pool", [(0, None), (1, "i8"), (2, "u8")])
@pytest.mark.parametrize("dtype, tensor_cores", [("bf16", True), ("fp32", False)])
def test_compiles_without_a_gpu(dtype, tensor_cores, codes, pool, tmp_path, monkeypatch):
    """For compute capability 8.0: half precision on tensor cores, float32 exactly, without them."""
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tensors = {"q": f"*{dtype}"} | dict.fromkeys(("k_pool", "v_pool"), f"*{pool or dtype}")
    tensors |= dict.fromkeys(("k_scales", "v_scales"), "*fp32")
    tensors |= {"block_table": "*i64", "work": "*i32", "parts": "*fp32", "log_sums": "*fp32", "scale": "fp32"}
    constants = {"GROUP": 3, "HEAD_DIM": 24, "BLOCK_SIZE": 4, "ROWS": 16, "COLUMNS": 64, "DIMS": 32}
    constants["CODES"] = codes
    constants["FACTORS"] = {"bf16": tl.bfloat16, "fp32": tl.float32}[dtype]
    names = paged_triton.attend.arg_names
    types = {name: "constexpr" if name in constants else tensors.get(name, "i32") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    built = compile(ASTSource(paged_triton.attend, types, places), target=GPUTarget("cuda", 80, 32))
    assert ("mma.sync" in built.asm["ptx"]) == tensor_cores
    assert built.metadata.shared <= 99 << 10  # what the smallest cards of that generation give a program


def test_tiles_hold_each_query_once_with_its_position():
    tiles = paged_split.cut_tiles((1, 7, 3), (9, 7, 20), 3)
    assert tiles.tolist() == [[0, 0, 1, 8], [1, 1, 3, 0], [1, 4, 3, 3], [1, 7, 1, 6], [2, 8, 3, 17]]


def splits(keys, units=132):
    return paged_split.count_splits(np.array(keys), 8, units).tolist()


def test_each_sequence_has_its_own_splits():
    assert splits([100_000]) == [32] and splits([1000]) == [3] and splits([100]) == [1]
    assert splits([100_000] * 1000) == [1] * 1000
    pieces = [64] * 8  # a prompt piece of 511 tokens in 8 tiles, beside it one token that reads 100,000
    assert splits([*pieces, 100_000]) == [1] * 8 + [32]


def test_the_work_of_programs_and_where_partial_results_lie():
    tiles = np.array([(0, 0, 1, 8), (1, 1, 3, 0)])
    programs, tokens = paged_split.share_work(tiles, np.array([3, 2]))
    second = [[*tiles[1], split, 2, 3 + 3 * split] for split in range(2)]
    assert programs.tolist() == [[*tiles[0], split, 3, split] for split in range(3)] + second
    assert tokens.tolist() == [[0, 1, 3], [3, 3, 2], [4, 3, 2], [5, 3, 2]]


@given(
    keys=st.lists(st.integers(1, 200_000), min_size=1, max_size=20),
    units=st.integers(1, 150),
    kv_heads=st.integers(1, 16),
    wanted=st.none() | st.integers(1, 9),
)
def test_a_graph_has_programs_for_every_step(keys, units, kv_heads, wanted):
    """However the lengths of a step are, its splits are at most what the graph was recorded for."""
    decode = paged_triton.TritonDecode(len(keys), kv_heads, units, wanted)
    rows = np.arange(len(keys)) + 7
    numbers = decode.plan(rows, np.array(keys))
    work, places = np.split(numbers, [7 * decode.programs])
    work, places = work.reshape(-1, 7), places.reshape(-1, 3)
    assert numbers.shape == (decode.plan_size,) and places[:, 2].max() <= decode.most
    needed = work[work[:, 2] > 0]
    assert sorted(set(needed[:, 0])) == rows.tolist() and len(needed) == places[:, 2].sum()
    assert sorted(needed[:, 6]) == list(range(len(needed)))  # each partial result has one writer
    assert not work[len(needed) :, :5].any() and (work[:, 5] > 0).all()


def test_the_default_backend(monkeypatch):
    model = Transformer(ModelConfig(50, 32, 64, 1, 4, 2, max_seq_len=16))
    assert LLM(model).backend is default_backend("cpu") is (gathered if missing() else cpp_decode)
    for spec, expected in ((None, gathered), ("found", triton_split_kv)):
        monkeypatch.setattr("minillm.model.paged.backend.find_spec", lambda name, spec=spec: spec)
        assert default_backend(torch.device("cuda:0")) is expected
        assert default_backend("cuda", torch.float64) is gathered


def test_without_triton_or_a_gpu_one_sentence_says_so(monkeypatch):
    parts, pools, tables = scattered(0, [(1, 5)], 2, 1, 4)
    call = partial(triton_split_kv, parts[0][0], *pools, tables, [1], [5], window=None)
    if find_spec("triton") and os.environ.get("TRITON_INTERPRET") != "1":
        with pytest.raises(
            ValueError, match="on a CUDA GPU, not on cpu: use backend=gathered, or set TRITON_INTERPRET"
        ):
            call()
    with pytest.raises(ValueError, match="splits 0 must be at least 1"):
        TritonSplitKV(0)
    monkeypatch.setattr(kernels, "triton", None)
    with pytest.raises(ValueError, match="pip install triton"):
        call()


on_a_gpu = [pytest.mark.cuda, needs_triton, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]


class TestOnAGpu:
    pytestmark = on_a_gpu

    @pytest.mark.parametrize("window", [None, 100])
    @pytest.mark.parametrize("block_size", [1, 4, 16])
    @pytest.mark.parametrize("head_dim", [24, 32, 128])
    @pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
    def test_equals_the_loop_over_blocks(self, dtype, tolerance, head_dim, block_size, window):
        lengths = [(1, 700), (70, 300), (1, 1), (33, 33)]
        parts, pools, tables = scattered(0, lengths, 6, 2, block_size, head_dim)
        q, pools = torch.cat([part[0] for part in parts]).to(dtype), [pool.to(dtype) for pool in pools]
        lens = list(zip(*lengths, strict=True))
        exact = paged_attention(
            q.double(), *(p.double() for p in pools), tables, *lens, window=window, backend=block_by_block
        )
        for splits in (None, 1, 4):
            backend = TritonSplitKV(splits)
            y = paged_attention(
                q.cuda(), *(p.cuda() for p in pools), tables.cuda(), *lens, window=window, backend=backend
            )
            assert y.dtype is dtype and y.is_cuda
            torch.testing.assert_close(y.cpu().double(), exact, rtol=tolerance, atol=tolerance)

    @pytest.mark.parametrize("name", KV_FORMATS)
    def test_keys_and_values_in_8_bits(self, name):
        lengths, format = [(1, 700), (70, 300), (1, 1)], KV_FORMATS[name]
        parts, pools, tables = scattered(0, lengths, 6, 2, 16, 64)
        q, lens = torch.cat([part[0] for part in parts]).half(), list(zip(*lengths, strict=True))
        coded = [format.encode_rows(pool.float()) for pool in pools]
        rounded = (format.decode_rows(codes, scale.double()) for codes, scale in coded)
        exact = paged_attention(q.double(), *rounded, tables, *lens, window=None, backend=block_by_block)
        there = (QuantizedPool(codes.cuda(), scale.cuda(), format) for codes, scale in coded)
        y = paged_attention(q.cuda(), *there, tables.cuda(), *lens, window=None, backend=triton_split_kv)
        torch.testing.assert_close(y.cpu().double(), exact, rtol=5e-3, atol=5e-3)

    @pytest.mark.parametrize("block_size", [1, 16])
    @pytest.mark.parametrize("window", [None, 5])
    def test_greedy_tokens_of_the_engine(self, window, block_size):
        config = ModelConfig(50, 48, 64, 2, 4, 2, head_dim=24, max_seq_len=64, init_std=0.2, sliding_window=window)
        model = Transformer(config, seed=3, device="cuda")
        prompts = [[1, 2, 3, 4, 5, 6, 7], [10], [1, 2, 3, 4, 9], list(range(40))]
        expected = [list(generate(model, prompt, 20)) for prompt in prompts]
        assert default_backend("cuda") is triton_split_kv
        for backend in (None, triton_split_kv, gathered):
            llm = LLM(model, block_size=block_size, chunk=16, backend=backend)
            outputs = llm.generate(prompts, SamplingParams(max_tokens=20))
            assert [o.answers[0].ids for o in outputs] == expected
