"""The W4A16 kernel in Triton's interpreter, against the dequantized weights in float64. Run by test_w4a16.py, which
sets TRITON_INTERPRET for this process: it is read when a kernel is defined, and would stay for every other test."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from minillm.model import ModelConfig, Transformer, load_hf
from minillm.quantize import Settings, kernels, quantize, quantized_layers
from minillm.quantize.folder import save_quantized
from minillm.quantize.formats import NF4, Int
from minillm.quantize.linear import QuantizedLinear
from minillm.quantize.triton import multiply_w4a16

# relative to ‖x‖ ‖w‖ of each result: sums in float32, then the type of the inputs; NF4's levels are rounded to it, too
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def compare(seed, rows, outputs, inputs, format, dtype, layout="rows", bias=False):
    draw = torch.Generator().manual_seed(seed)
    linear = nn.Linear(inputs, outputs, bias=bias)
    linear.weight.data = torch.randn(outputs, inputs, generator=draw) * torch.rand(outputs, 1, generator=draw)
    layer = QuantizedLinear.of(linear, format).to(dtype)
    layer.use(kernels.W4A16)
    x = torch.randn(rows, inputs, generator=draw).to(dtype)
    given = {"rows": x, "columns": x.T.contiguous().T, "apart": torch.full((2 * rows, 3 * inputs), torch.nan).to(dtype)}
    given["apart"][::2, 1::3] = x
    given = given[layout] if layout != "apart" else given["apart"][::2, 1::3]
    assert torch.equal(given, x) and (layout == "rows" or rows == 1 or not given.is_contiguous())
    y, weight = layer(given), layer.weight.double()
    exact = x.double() @ weight.T + (layer.bias.double() if bias else 0)
    size = x.double().norm(dim=1)[:, None] * weight.norm(dim=1) + exact.abs()
    assert y.dtype is dtype and y.shape == (rows, outputs)
    assert ((y.double() - exact).abs() <= TOLERANCE[dtype] * size).all()


FORMATS = st.one_of(
    st.builds(Int, bits=st.just(4), group=st.sampled_from([None, 32, 64, 96, 128]), symmetric=st.booleans()),
    st.builds(NF4, group=st.sampled_from([None, 32, 64, 128]), double=st.booleans()),
)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 99),
    rows=st.integers(1, 70),
    outputs=st.integers(1, 70),
    groups=st.integers(1, 3),
    odd=st.integers(1, 150),
    format=FORMATS,
    dtype=st.sampled_from(list(TOLERANCE)),
    layout=st.sampled_from(["rows", "columns", "apart"]),
    bias=st.booleans(),
)
def test_drawn_shapes(seed, rows, outputs, groups, odd, format, dtype, layout, bias):
    inputs = 2 * odd if format.group is None else groups * format.group
    compare(seed, rows, outputs, inputs, format, dtype, layout, bias)


@pytest.mark.parametrize("rows", [1, 16, 17, 129])
@pytest.mark.parametrize("format", [Int(bits=4, group=128), Int(bits=4, symmetric=False), NF4()], ids=str)
def test_several_tiles(rows, format):
    compare(1, rows, 130, 384, format, torch.float32)


@pytest.mark.parametrize("format", [Int(bits=4, group=32, symmetric=False), Int(bits=4, group=32)], ids=str)
def test_a_layer_of_a_folder(format, tmp_path):
    """What was read from a file has other strides than what was just rounded."""
    model = Transformer(ModelConfig(64, 64, 96, 1, 4, max_seq_len=16), seed=0)
    quantize(model, Settings(format))
    save_quantized(model, tmp_path / "folder")
    for layer in quantized_layers(loaded := load_hf(tmp_path / "folder")).values():
        x = torch.randn(3, layer.in_features)
        exact = x.double() @ layer.weight.double().T
        layer.use(kernels.W4A16)
        torch.testing.assert_close(layer(x).double(), exact, rtol=1e-5, atol=1e-5)
    assert len(quantized_layers(loaded)) == 7


def test_float64_is_multiplied_dequantized():
    layer = QuantizedLinear.of(nn.Linear(64, 8), Int(bits=4, group=32))
    layer.use(kernels.W4A16)
    x = torch.randn(2, 64, dtype=torch.float64)
    assert torch.equal(layer(x), x @ layer.weight.double().T + layer.bias)


def test_rows_do_not_depend_on_what_lies_beside_them():
    layer = QuantizedLinear.of(nn.Linear(128, 48), Int(bits=4, group=32))
    layer.use(kernels.W4A16)
    x = torch.randn(3, 128)
    x[1] = torch.nan
    y = layer(x)
    assert y[1].isnan().all() and torch.equal(y[[0, 2]], layer(x[[0, 2]]))


def test_what_the_kernel_cannot_take_is_refused():
    layer = QuantizedLinear.of(nn.Linear(64, 8), Int(bits=4, group=32))
    with pytest.raises(ValueError, match="takes float32, bfloat16 or"):
        multiply_w4a16(torch.zeros(1, 64, dtype=torch.float64), layer.codes, layer.scale)
