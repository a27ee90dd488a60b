"""The Triton kernel for weights of 4 bits: in its interpreter, compiled for a GPU that is not there, and where it is
chosen."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from minillm.quantize import kernels
from minillm.quantize import triton as w4a16
from minillm.quantize.formats import NF4, Float8, Int
from minillm.quantize.linear import QuantizedLinear
from tests.engine.triton_interpreter import check_in_the_interpreter, needs_triton


@pytest.mark.full
@needs_triton
def test_in_the_interpreter():
    check_in_the_interpreter(Path(__file__).with_name("interpreted_w4a16.py"))


@needs_triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.drawn(3)
@pytest.mark.parametrize("dtype, tensor_cores", [("bf16", True), ("fp16", True), ("fp32", False)])
@pytest.mark.parametrize("kind", ["symmetric", "asymmetric", "nf4"])
def test_compiles_without_a_gpu(dtype, tensor_cores, kind, tmp_path, monkeypatch):
    """For compute capability 8.0: half precision on tensor cores, float32 exactly, without them."""
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tensors = {"x": f"*{dtype}", "y": f"*{dtype}", "codes": "*u8", "scale": "*bf16", "zero": "*i8", "levels": "*fp32"}
    constants = {"SIZE": 4096, "GROUPS": 32, "ROWS": 16, "OUTPUTS": 32, "HALF": 64, "column_stride": 1}
    constants["FACTORS"] = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[dtype]
    constants |= {} if kind == "asymmetric" else {"zero": None}
    constants |= {} if kind == "nf4" else {"levels": None}
    names = w4a16._w4a16.arg_names
    types = {name: "constexpr" if name in constants else tensors.get(name, "i32") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    built = compile(ASTSource(w4a16._w4a16, types, places), target=GPUTarget("cuda", 80, 32))
    assert ("mma.sync" in built.asm["ptx"]) == tensor_cores
    assert built.metadata.shared <= 99 << 10  # what the smallest cards of that generation give a program


@pytest.mark.parametrize(
    ("format", "fits"),
    [
        (Int(bits=4, group=128), True),
        (Int(bits=4, symmetric=False), True),
        (NF4(), True),
        (Int(bits=4, group=16), False),
        (Int(), False),
        (Float8(), False),
    ],
    ids=str,
)
def test_where_it_is_chosen(format, fits, monkeypatch):
    groups, cuda = 1 if format.group is None else 4, torch.device("cuda")
    monkeypatch.setattr(w4a16, "triton", object())
    assert kernels.choose(format, 48, groups, cuda) == (kernels.W4A16 if fits else kernels.DEQUANTIZE)
    assert kernels.choose(format, 48, groups, torch.device("cpu")) != kernels.W4A16
    assert kernels.choose(format, 48, groups, cuda, quantizes_inputs=True) == kernels.DEQUANTIZE
    monkeypatch.setattr(w4a16, "triton", None)
    assert kernels.choose(format, 48, groups, cuda) == kernels.DEQUANTIZE


@pytest.mark.cuda
@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("format", [Int(bits=4, group=128), Int(bits=4, group=32, symmetric=False), NF4()], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_on_a_gpu(format, rows):
    layer = QuantizedLinear.of(nn.Linear(512, 200), format).cuda()
    assert layer.kernel == kernels.W4A16
    x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
    exact = x.double() @ layer.weight.double().T + layer.bias.double()
    assert (layer(x).double() - exact).norm() < 1e-2 * exact.norm()
