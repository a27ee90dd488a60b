import copy

import pytest

from minillm.bench import bench, quantize
from minillm.quantize import Int, Settings, quantized_layers
from minillm.quantize import quantize as quantized


def test_a_row_for_each_format_and_peer():
    report = bench("quantize", sizes=(128,), repeats=5)
    assert report.ok and {row.peer for row in report.rows} >= {"float32", "bfloat16"}
    assert [row.name for row in report.rows if row.peer == "float32"] == [
        "decode, Llama of 128, int8 (roofline 2.1)",
        "decode, Llama of 128, int4, group 128 (roofline 2.6)",
    ]


def test_a_kernel_that_computes_something_else_is_found():
    _, model = quantize.model_of(128)
    quantized(model, Settings(Int()))
    assert quantize.agrees(model)
    wrong = copy.deepcopy(model)
    for layer in quantized_layers(wrong).values():
        layer._multiply = lambda rows, layer=layer: 2 * layer._dequantize_and_multiply(rows)
    assert not quantize.agrees(wrong)


def test_a_size_without_a_model_is_refused():
    with pytest.raises(ValueError, match="size 100 must be a multiple of 128"):
        bench("quantize", sizes=(100,))
