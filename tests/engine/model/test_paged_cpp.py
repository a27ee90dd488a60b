"""The C++ kernel for single queries: in float32 against float64, across sizes, threads and steps, and without one."""

import contextlib
import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_paged import scattered
from test_paged_quantized import pool_of

from minillm.cli.doctor import decode_kernel
from minillm.model import ModelConfig, Transformer, compiler
from minillm.model.generate import generate
from minillm.model.paged import block_by_block, cpp, default_backend, gathered, paged_attention
from minillm.model.paged.cpp import FEW, CppDecode, cpp_decode
from minillm.quantize.kv import KV_FORMATS
from minillm.serve import LLM, SamplingParams

needs_compiler = pytest.mark.skipif(bool(cpp.missing()), reason=cpp.missing())
DIMS = (1, 24, 32, 64, 128)  # three of them are known to the compiler


@needs_compiler
@settings(max_examples=100)
@given(
    seed=st.integers(0, 99),
    lengths=st.lists(
        st.integers(1, 70).flatmap(lambda c: st.tuples(st.integers(1, min(c, FEW + 2)), st.just(c))),
        min_size=1,
        max_size=5,
    ),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.sampled_from(DIMS),
    block_size=st.sampled_from([1, 5, 16]),
    window=st.none() | st.integers(1, 80),
    threads=st.integers(1, 3),
)
def test_float32_is_float64_rounded(seed, lengths, kv_heads, group, head_dim, block_size, window, threads):
    """Slots that hold no key of a sequence are nan, and threads share sequences, or the heads of few of them."""
    parts, pools, tables = scattered(seed, lengths, kv_heads * group, kv_heads, block_size, head_dim)
    q, where = torch.cat([part[0] for part in parts]), (tables, *zip(*lengths, strict=True))
    exact = paged_attention(q, *pools, *where, window=window, backend=block_by_block)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        y = paged_attention(q.float(), *(p.float() for p in pools), *where, window=window, backend=cpp_decode)
    finally:
        torch.set_num_threads(before)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-5)


@needs_compiler
def test_a_sequence_does_not_depend_on_its_neighbours():
    """To the bit: gathered pads it to the longest of its group, whose sums are in another order."""
    lengths = [(1, 700), (1, 3), (2, 41), (1, 700), (1, 250)]
    parts, pools, tables = scattered(0, lengths, 4, 2, 16, 32)
    q, pools = [part[0].float() for part in parts], [pool.float() for pool in pools]
    together = paged_attention(torch.cat(q), *pools, tables, *zip(*lengths, strict=True), backend=cpp_decode)
    alone = [
        paged_attention(mine, *pools, tables[row : row + 1], [queries], [keys], backend=cpp_decode)
        for row, (mine, (queries, keys)) in enumerate(zip(q, lengths, strict=True))
    ]
    assert torch.equal(together, torch.cat(alone))


@needs_compiler
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 40.0, 1e4])
def test_scores_of_any_size(scale):
    """Weights that vanish, all alike, and one that takes everything."""
    parts, pools, tables = scattered(1, [(1, 60)], 2, 1, 4, 32)
    q = scale * parts[0][0]
    exact = paged_attention(q, *pools, tables, [1], [60], backend=block_by_block)
    y = paged_attention(q.float(), *(p.float() for p in pools), tables, [1], [60], backend=cpp_decode)
    torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("broken", ["query", "key", "value"])
def test_what_is_not_a_number_stays_so(broken):
    """A model whose numbers overflow must not look as if it had worked."""
    (part,), pools, tables = scattered(1, [(1, 60)], 2, 1, 4, 32)
    q, k, v = part[0].float(), *(pool.float() for pool in pools)
    if broken == "query":
        q[0, 0, 3] = float("nan")
    else:
        {"key": k, "value": v}[broken][tables[0, 5], 1, 0, 3] = float("nan")
    assert paged_attention(q, k, v, tables, [1], [60], backend=cpp_decode)[0, 0].isnan().any()


@needs_compiler
def test_small_numbers_are_small_after_the_library_is_loaded():
    """Flags for fast sums make some linkers switch subnormal numbers off for the whole process."""
    assert torch.tensor([1e-40]).mul(0.5).item() > 0


def sampled_by(llm, prompts, params):
    return [[answer.ids for answer in output.answers] for output in llm.generate(prompts, params)]


HOW = {  # what moves blocks or puts several tokens of a sequence into a step
    "plain": {},
    "small pieces": {"chunk": 3, "token_budget": 9, "max_num_seqs": 6},
    "recomputed": {"num_blocks": 14, "preemption": "recompute"},
    "swapped": {"num_blocks": 14, "preemption": "swap"},
    "replayed": {"graphs": True},
    "asynchronous": {"async_scheduling": True},
    "in 8 bits": {"kv_dtype": "int8"},
    "in 8 bits with an exponent": {"kv_dtype": "fp8"},
}


@needs_compiler
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("how", HOW)
def test_the_engine_s_tokens_are_those_of_gathered(how, window):
    """Greedy and forked: two prompts share a prefix, and one is asked for three samples."""
    config = ModelConfig(50, 48, 64, 2, 4, 2, max_seq_len=64, init_std=0.2, sliding_window=window)
    model = Transformer(config, seed=3)
    prompts = [[1, 2, 3, 4, 5, 6, 7], [10], [1, 2, 3, 4, 9], list(range(20))]
    params = [SamplingParams(max_tokens=12, temperature=0.0)] * 3 + [SamplingParams(max_tokens=12, n=3, seed=5)]
    options = {"num_blocks": 40, "block_size": 4, "preemption": "recompute"} | HOW[how]
    expected = sampled_by(LLM(model, **options, backend=gathered), prompts, params)
    llm = LLM(model, **options)
    assert llm.backend is cpp_decode
    assert sampled_by(llm, prompts, params) == expected
    if "kv_dtype" not in options:
        assert [ids for [ids] in expected[:3]] == [list(generate(model, prompt, 12)) for prompt in prompts[:3]]


NOT_TAKEN = {  # what is done to the pools, the dtype of the queries, options
    "capped": (torch.Tensor.float, torch.float32, {"soft_cap": 0.5}),
    "a strided pool": (lambda pool: torch.stack((pool.float(),) * 2, dim=-1)[..., 0], torch.float32, {}),
    "float64": (lambda pool: pool, torch.float64, {}),
    "bfloat16": (torch.Tensor.bfloat16, torch.bfloat16, {}),
    "float16": (torch.Tensor.half, torch.float16, {}),
    "int8": (lambda pool: pool_of(pool.nan_to_num(0.0), KV_FORMATS["int8"]), torch.float32, {}),
    "fp8": (lambda pool: pool_of(pool.nan_to_num(0.0), KV_FORMATS["fp8"]), torch.float32, {}),
}


@pytest.mark.parametrize("what", NOT_TAKEN)
def test_what_the_kernel_does_not_take_is_gathered(what, monkeypatch):
    change, dtype, options = NOT_TAKEN[what]
    parts, pools, tables = scattered(1, [(1, 9), (3, 4)], 4, 2, 4)
    q, lens, pools = torch.cat([part[0] for part in parts]).to(dtype), ([1, 3], [9, 4]), [change(p) for p in pools]
    expected = paged_attention(q, *pools, tables, *lens, **options)
    monkeypatch.setattr(cpp, "_library", lambda: pytest.fail("the kernel was asked for"))
    assert torch.equal(paged_attention(q, *pools, tables, *lens, **options, backend=cpp_decode), expected)


@needs_compiler
def test_values_that_lie_otherwise_than_the_keys_are_refused():
    (part,), pools, tables = scattered(1, [(1, 9)], 4, 2, 4)
    q, k, v = (each.float() for each in (part[0], *pools))
    with pytest.raises(ValueError, match=r"cpp_decode wants both torch\.float32 and contiguous"):
        paged_attention(q, k, torch.stack((v, v), dim=-1)[..., 0], tables, [1], [9], backend=cpp_decode)


def test_without_a_compiler_keys_are_gathered_and_the_reason_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "COMPILERS", ("no-such-compiler",))
    cpp._library.cache_clear()
    try:
        assert cpp.missing() == "there is no C++ compiler: install g++."
        assert default_backend("cpu") is gathered
        parts, pools, tables = scattered(0, [(1, 5)], 2, 1, 4)
        with pytest.raises(ValueError, match=r"install g\+\+. Or use backend=gathered."):
            q, k, v = (each.float() for each in (parts[0][0], *pools))
            paged_attention(q, k, v, tables, [1], [5], backend=CppDecode())
    finally:
        cpp._library.cache_clear()
    assert default_backend("cpu", torch.bfloat16) is gathered


@needs_compiler
def test_a_library_is_compiled_once_and_kept(monkeypatch, tmp_path):
    source = tmp_path / "twice.cpp"
    source.write_text('extern "C" double twice(double x) { return 2 * x; }')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library = compiler.shared_library(source)
    library.twice.restype, library.twice.argtypes = ctypes.c_double, [ctypes.c_double]
    assert library.twice(1.5) == 3.0
    [kept] = (tmp_path / "cache" / "minillm" / "compiled").iterdir()
    assert kept.name.startswith("twice-") and kept.suffix == ".so"
    monkeypatch.setattr(compiler, "COMPILERS", ())
    compiler.shared_library(source)
    source.write_text("not C++")
    with pytest.raises(ValueError, match="no C"):
        compiler.shared_library(source)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"cannot compile twice\.cpp: "):
        compiler.shared_library(source)
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]  # no draft is left


@pytest.mark.full
@needs_compiler
def test_processes_that_compile_at_the_same_time_keep_one_library(tmp_path):
    source = tmp_path / "seven.cpp"
    source.write_text('extern "C" int seven() { return 7; }')
    script = (
        "import pathlib, sys\nfrom minillm.model.compiler import shared_library\nprint('ready', flush=True)\ninput()\n"
        "print(shared_library(pathlib.Path(sys.argv[1])).seven())"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", script, str(source)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen(command, **pipes)) for _ in range(2)]
        assert [process.stdout.readline() for process in started] == ["ready\n"] * 2
        for process in started:
            process.stdin.write("\n")
            process.stdin.flush()
        assert [process.communicate(timeout=120)[0] for process in started] == ["7\n"] * 2
    [kept] = (tmp_path / "cache" / "minillm" / "compiled").iterdir()
    assert kept.name.startswith("seven-") and kept.suffix == ".so"


@needs_compiler
def test_a_kept_library_that_is_damaged_is_not_loaded(monkeypatch, tmp_path):
    source = tmp_path / "five.cpp"
    source.write_text('extern "C" int five() { return 5; }')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiler.shared_library(source)
    [kept] = (tmp_path / "cache" / "minillm" / "compiled").iterdir()
    kept.unlink()  # the file that this process has loaded stays as it is
    kept.write_bytes(b"damaged")
    assert compiler.shared_library(source).five() == 5


def test_a_compiler_that_does_not_start_is_no_compiler(monkeypatch, tmp_path):
    broken = tmp_path / "c++"
    broken.write_bytes(b"\x7fELF of another machine")
    broken.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "COMPILERS", (str(broken),))
    cpp._library.cache_clear()
    try:
        assert "decode.cpp cannot be compiled or loaded" in cpp.missing()
        assert default_backend("cpu") is gathered
        assert cpp.missing() in decode_kernel().found
    finally:
        cpp._library.cache_clear()


@needs_compiler
def test_a_cache_folder_that_cannot_be_written_costs_time_only(monkeypatch, tmp_path):
    occupied, source = tmp_path / "file", tmp_path / "once.cpp"
    occupied.write_text("in the way")
    source.write_text('extern "C" int once() { return 1; }')
    monkeypatch.setenv("XDG_CACHE_HOME", str(occupied))
    assert compiler.shared_library(source).once() == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "once.cpp"]


def test_the_source_is_in_the_package():
    assert cpp.SOURCE.is_file() and cpp.SOURCE.parent == Path(cpp.__file__).parent
