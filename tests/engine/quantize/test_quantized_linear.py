"""One layer in place of `nn.Linear`: what it computes, by every kernel, what it takes, and what moves do to it."""

import copy

import pytest
import torch
from torch import nn

from minillm.quantize import kernels
from minillm.quantize.formats import NF4, Float8, Int
from minillm.quantize.linear import QuantizedLinear

FORMATS = (
    (Int(), kernels.INT8),
    (Int(bits=4, group=32), kernels.INT4),
    (Int(bits=4, group=64, symmetric=False), kernels.INT4),
    (Int(bits=4), kernels.DEQUANTIZE),
    (Int(bits=8, group=64), kernels.DEQUANTIZE),
    (NF4(), kernels.DEQUANTIZE),
    (Float8(), kernels.DEQUANTIZE),
)
packed = pytest.mark.skipif(not kernels.has_packed_kernels(), reason="this CPU has no packed kernels")


def linear(inputs=128, outputs=48, bias=True, seed=1):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layer = nn.Linear(inputs, outputs, bias=bias)
        layer.weight.data *= seed
        return layer


def some(*shape, seed=2):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@packed
@pytest.mark.parametrize(("format", "kernel"), FORMATS, ids=str)
def test_every_kernel_multiplies_with_the_weights_that_the_codes_stand_for(format, kernel):
    layer, x = linear(), some(3, 7, 128)
    quantized = QuantizedLinear.of(layer, format)
    assert quantized.kernel == kernel
    expected = x.double() @ quantized.weight.double().T + layer.bias.double()
    relative = (quantized(x).double() - expected).norm() / expected.norm()
    assert relative < (4e-3 if kernel in (kernels.INT8, kernels.INT4) else 1e-6)  # the packed ones round to bfloat16
    quantized.use(kernels.DEQUANTIZE)
    assert torch.allclose(quantized(x).double(), expected, atol=1e-5)


@packed
@pytest.mark.parametrize(("format", "kernel"), FORMATS[:3], ids=str)
def test_a_row_has_the_same_result_alone_and_in_a_batch(format, kernel):
    quantized, x = QuantizedLinear.of(linear(), format), some(67, 128)
    assert torch.equal(quantized(x), torch.cat([quantized(row[None]) for row in x]))
    assert torch.equal(quantized(x)[0], quantized(x[0]))


@pytest.mark.parametrize(("format", "bits"), [(Int(), 8 + 16 / 128), (Int(bits=4, group=32), 4 + 16 / 32)])
def test_its_bytes_are_codes_and_scales(format, bits):
    assert QuantizedLinear.of(linear(bias=False), format).nbytes == bits / 8 * 128 * 48
    assert QuantizedLinear.of(linear(), format).nbytes == bits / 8 * 128 * 48 + 4 * 48


@pytest.mark.parametrize(("format", "_"), FORMATS, ids=str)
def test_casts_and_copies_do_not_change_what_the_codes_stand_for(format, _):
    quantized = QuantizedLinear.of(linear(), format)
    weight, x = quantized.weight, some(5, 128)
    expected = quantized(x)
    for other in (copy.deepcopy(quantized), copy.deepcopy(quantized).to(torch.float64), quantized.to(torch.bfloat16)):
        assert torch.equal(other.weight, weight)
        assert torch.allclose(other(x).float(), expected, atol=2e-2)
    assert quantized.bias.dtype == torch.bfloat16 and quantized(x.bfloat16()).dtype == torch.bfloat16


@torch.no_grad()
@pytest.mark.parametrize("quantizes_inputs", [False, True])
@pytest.mark.parametrize("format", [*(each for each, _ in FORMATS), Int(scale_dtype=torch.float32)], ids=str)
def test_a_layer_that_loads_a_state_computes_what_the_other_does(format, quantizes_inputs):
    first, second = (
        QuantizedLinear.of(linear(seed=seed), format, quantizes_inputs=quantizes_inputs) for seed in (1, 2)
    )
    x = some(5, 128)
    assert not torch.allclose(second(x), first(x), rtol=0.1)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(x), first(x))


@pytest.mark.parametrize("shape", [(16, 64), (48, 96), (64, 128), (144, 32), (256, 64)])
def test_codes_come_back_from_the_layout_of_the_int4_kernel(shape):
    codes = torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(0)).to(torch.int8)
    packed, _ = kernels.int4_layout(codes, torch.ones(shape[0], 1), None)
    assert torch.equal(kernels.codes_of_int4_layout(packed), codes)


@pytest.mark.parametrize(("format", "_"), FORMATS, ids=str)
def test_gradients_flow_to_the_inputs_and_nothing_else(format, _):
    quantized, x = QuantizedLinear.of(linear(), format), some(4, 128).requires_grad_()
    quantized(x).square().sum().backward()
    y = x.detach() @ quantized.weight.T + quantized.bias
    assert torch.allclose(x.grad, 2 * y @ quantized.weight, rtol=1e-4, atol=1e-4)
    assert not any(parameter.requires_grad for parameter in quantized.parameters())


def test_inputs_rounded_to_int8_have_a_scale_for_each_token():
    layer, x = linear(), some(6, 128) * torch.tensor([1e-3, 1, 10, 1, 1, 100])[:, None]
    quantized = QuantizedLinear.of(layer, Int(), quantizes_inputs=True)
    assert quantized.kernel == kernels.W8A8
    expected = torch.empty(6, 48, dtype=torch.float64)
    for row in range(6):
        scale = x[row].abs().max() / 127.5
        expected[row] = (torch.round(x[row] / scale).clamp(-128, 127) * scale).double() @ quantized.weight.double().T
    expected += layer.bias.double()
    assert torch.allclose(quantized(x).double(), expected, rtol=1e-4, atol=1e-4)
    quantized.use(kernels.DEQUANTIZE)
    assert torch.allclose(quantized(x).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [0, 1, 17])
def test_any_number_of_rows(rows):
    for format, _ in FORMATS:
        assert QuantizedLinear.of(linear(), format)(some(rows, 128)).shape == (rows, 48)


def test_a_cpu_without_packed_kernels_dequantizes(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert QuantizedLinear.of(linear(), Int()).kernel == kernels.DEQUANTIZE
