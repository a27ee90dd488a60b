"""The Triton kernels of tiled attention: in the interpreter, compiled for GPUs that are not there, and on one."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from minillm.model import dense, kernels
from minillm.model.attention import tiled_kernels, tiled_triton
from tests.engine.triton_interpreter import check_in_the_interpreter, needs_triton


@pytest.mark.full
@needs_triton
def test_in_the_interpreter():
    check_in_the_interpreter(Path(__file__).with_name("interpreted_tiles.py"))


@needs_triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", ["forward", "backward_keys", "backward_queries"])
@pytest.mark.parametrize(
    ("dtype", "tensor_cores"), [("bf16", True), pytest.param("fp32", False, marks=pytest.mark.full)]
)
def test_compiles_without_a_gpu(name, dtype, tensor_cores, tmp_path, monkeypatch):
    """For compute capability 8.0: half precision on tensor cores, float32 exactly, without them."""
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(tiled_kernels, name)
    types = dict.fromkeys(("q", "k", "v", "out", "d_out", "dq", "dk", "dv"), f"*{dtype}")
    types |= {"lse": "*fp32", "delta": "*fp32", "scale": "fp32"}
    types |= dict.fromkeys(("positions", "key_positions", "documents", "key_documents"), "*i32")
    constants = {"GROUP": 2, "HEAD_DIM": 24, "DIMS": 32, "ROWS": 64, "COLUMNS": 64}
    constants["FACTORS"] = {"bf16": tl.bfloat16, "fp32": tl.float32}[dtype]
    constants["ADD"] = True
    names = kernel.arg_names
    constants = {each: value for each, value in constants.items() if each in names}
    types = {each: "constexpr" if each in constants else types.get(each, "i32") for each in names}
    places = {(names.index(each),): value for each, value in constants.items()}
    built = compile(ASTSource(kernel, types, places), target=GPUTarget("cuda", 80, 32))
    assert ("mma.sync" in built.asm["ptx"]) == tensor_cores
    assert built.metadata.shared <= 99 << 10  # what the smallest cards of that generation give a program


def test_without_triton_or_a_gpu_one_sentence_says_so(monkeypatch):
    q, k, v = torch.randn(3, 1, 2, 4, 8).unbind()
    if find_spec("triton") and os.environ.get("TRITON_INTERPRET") != "1":
        with pytest.raises(ValueError, match="on a CUDA GPU, not on cpu: use attention=tiled, or set TRITON_INTERPRET"):
            tiled_triton.tiled_triton(q, k, v)
    monkeypatch.setattr(kernels, "triton", None)
    with pytest.raises(ValueError, match="pip install triton"):
        tiled_triton.tiled_triton(q, k, v)


@pytest.mark.cuda
@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("head_dim", [24, 64, 128])
@pytest.mark.parametrize("window", [None, 300])
def test_on_a_gpu(window, head_dim, dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 6, 700, head_dim), *[(2, 2, 700, head_dim)] * 2]
    inputs = [torch.randn(shape, generator=generator).to(dtype).cuda().requires_grad_() for shape in shapes]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    segments = torch.randint(3, (2, 700), generator=generator).sort(dim=1).values.cuda()
    out = tiled_triton.tiled_triton(*inputs, window=window, segments=segments)
    right = dense(*wide, window=window, segments=segments)
    torch.testing.assert_close(out.double(), right, rtol=tolerance, atol=tolerance)
    weights = torch.randn(out.shape, generator=generator).cuda()
    found, exact = (torch.autograd.grad((y * weights.to(y.dtype)).sum(), x) for y, x in ((out, inputs), (right, wide)))
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=10 * tolerance, atol=10 * tolerance)
