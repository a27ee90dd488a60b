"""P105-P107, P109, P113: closed forms of quantization against what the formats keep, and against random weights."""

import math

import pytest
import torch

from minillm.predict.serving.quantization import (
    batch_of_full_speedup,
    batch_without_speedup,
    bits_per_weight,
    cache_bits_per_number,
    gptq_output_error,
    low_rank_error,
    low_rank_saves,
    mean_squared_error,
    nearest_output_error,
    speedup,
)
from minillm.quantize import NF4, Float8, Int, QuantizedLinear


@pytest.mark.parametrize(
    ("format", "group", "more"),
    [
        (Int(), 256, {}),
        (Int(bits=4, group=128), 128, {}),
        (Int(bits=4, group=32, symmetric=False), 32, {"zero_bits": 8}),
        (NF4(double=False), 64, {"scale_bits": 32}),
        (Float8(), 256, {}),
    ],
    ids=str,
)
def test_bits_are_those_that_a_layer_takes(format, group, more):
    layer = QuantizedLinear.of(torch.nn.Linear(256, 64, bias=False), format)
    assert 8 * layer.nbytes / (256 * 64) == bits_per_weight(format.bits, group, **more)


def test_bits_of_double_quantization():
    assert bits_per_weight(4, 64, scale_bits=8 + 32 / 256) == pytest.approx(4.127, abs=5e-4)
    layer = QuantizedLinear.of(torch.nn.Linear(256, 64, bias=False), NF4())
    mean = 32 / (256 * 64)  # one number for the whole layer
    assert 8 * layer.nbytes / (256 * 64) == pytest.approx(4 + (8 + 32 / 256) / 64 + mean)


def test_error_of_rounding_is_a_twelfth_of_the_squared_step_and_a_bit_is_6_db():
    weight = torch.rand(400, 512, generator=torch.Generator().manual_seed(0)) * 2 - 1
    measured = {}
    for bits in (4, 8):
        format = Int(bits=bits, scale_dtype=torch.float32)
        grid = format.grid(weight)
        error = (format.nearest(weight, grid) - weight).square()
        expected = sum(mean_squared_error(float(step)) for step in grid.scale) / len(grid.scale)
        assert float(error.mean()) == pytest.approx(expected, rel=0.06)
        measured[bits] = 10 * math.log10(float(weight.square().mean() / error.mean()))
    assert measured[8] - measured[4] == pytest.approx(4 * 6.02, abs=0.6)  # 15 and 255 steps, not 16 and 256


def test_speedup_is_the_ratio_of_bits_and_ends_at_the_ridge():
    flops, bandwidth = 1000e12, 3.35e12  # about an H100 in 16 bits
    full, none = batch_of_full_speedup(4.125, flops, bandwidth), batch_without_speedup(16, flops, bandwidth)
    assert none == pytest.approx(flops / bandwidth) and full == pytest.approx(none * 4.125 / 16)
    assert speedup(1, 4.125, 16, flops, bandwidth) == pytest.approx(16 / 4.125)
    assert speedup(int(full), 4.125, 16, flops, bandwidth) == pytest.approx(16 / 4.125)
    assert 1 < speedup(int(full) + 40, 4.125, 16, flops, bandwidth) < 16 / 4.125
    assert speedup(math.ceil(none), 4.125, 16, flops, bandwidth) == pytest.approx(1)


def test_a_pool_in_int8_holds_nearly_twice_the_tokens():
    assert 16 / cache_bits_per_number(8, 128) == pytest.approx(2 / (1 + 1 / 64))


def test_the_error_of_low_rank_is_what_the_singular_values_say():
    matrix = torch.randn(30, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    for rank in (0, 1, 7, 20):
        best = u[:, :rank] * values[:rank] @ v[:rank]
        assert low_rank_error(values.tolist(), rank) == pytest.approx(float((matrix - best).norm()), abs=1e-9)
    rank = low_rank_saves(30, 20)
    assert rank * 50 < 600 <= (rank + 1) * 50


def test_the_output_error_of_gptq_is_what_the_pivots_say():
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(24, 24, dtype=torch.float64, generator=generator)
    hessian = mix @ mix.T / 24 + 0.05 * torch.eye(24, dtype=torch.float64)
    weight = torch.randn(4000, 24, dtype=torch.float64, generator=generator)
    step, left, rounded = 0.1, weight.clone(), torch.empty_like(weight)
    for j in range(24):  # without Cholesky: what is left of H is inverted anew for each column
        inverse = torch.linalg.inv(hessian[j:, j:])
        rounded[:, j] = torch.round(left[:, j] / step) * step
        left[:, j:] -= ((left[:, j] - rounded[:, j]) / inverse[0, 0])[:, None] * inverse[0]

    def output_error(found):
        return float((((found - weight) @ hessian) * (found - weight)).sum(1).mean())

    pivots = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True).diagonal().tolist()
    expected = gptq_output_error(step, pivots)
    assert output_error(rounded) == pytest.approx(expected, rel=0.03)
    assert float((((rounded - weight) @ hessian) * (rounded - weight)).sum(1).max()) < 3 * expected
    nearest = nearest_output_error(step, hessian.diagonal().tolist())
    assert output_error(torch.round(weight / step) * step) == pytest.approx(nearest, rel=0.03)
    assert expected < nearest


@pytest.mark.parametrize(
    "call",
    [
        lambda: bits_per_weight(4, 0),
        lambda: mean_squared_error(0),
        lambda: speedup(0, 4, 16, 1e12, 1e11),
        lambda: low_rank_error([1.0], 2),
        lambda: nearest_output_error(0, [1.0]),
    ],
)
def test_bad_input_is_named(call):
    with pytest.raises(ValueError, match=r"(group|step|batch|rank) (is )?\d"):
        call()
