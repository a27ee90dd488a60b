import copy

import pytest
import torch

from minillm.bench import bench, quantize
from minillm.bench.quantize_peers import has_llama_cpp
from minillm.quantize import Int, Settings, kernels, quantized_layers
from minillm.quantize import quantize as quantized


@pytest.mark.full
def test_a_row_for_each_format_and_peer():
    report = bench("quantize", sizes=(128,), repeats=5)
    assert report.ok and {row.peer for row in report.rows} >= {"float32", "bfloat16"}
    assert [row.name for row in report.rows if row.peer == "float32"] == [
        f"decode, Llama of 128, int8 by {kernel_of(Int())} (2.1 times fewer bytes)",
        f"decode, Llama of 128, int4, group 128 by {kernel_of(Int(bits=4, group=128))} (2.6 times fewer bytes)",
    ]


def kernel_of(format):
    return kernels.choose(format, 128, 1, torch.device("cpu"))


@pytest.mark.skipif(not has_llama_cpp(), reason="llama-cpp-python or gguf is not installed")
@pytest.mark.parametrize("name, kind, off", [("F32", "F32", 1e-3), ("int8", "Q8_0", 0.03), ("int4", "Q4_0", 0.5)])
def test_llama_cpp_computes_with_the_same_weights(name, kind, off):
    _, model = quantize.model_of(128)
    tokens = [5, 1, 400, 77, 2, 9, 31]
    with quantize.llama_cpp_of(model, kind) as theirs:
        found = theirs.logits(tokens)
    expected = model(torch.tensor([tokens]))[0, -1].detach()
    assert (found - expected).norm() < off * expected.norm()


def test_a_kernel_that_computes_something_else_is_found():
    _, model = quantize.model_of(128)
    quantized(model, Settings(Int()))
    assert quantize.agrees(model)
    wrong = copy.deepcopy(model)
    for layer in quantized_layers(wrong).values():
        layer.multiply = lambda rows, layer=layer: 2 * layer._dequantize_and_multiply(rows)
    assert not quantize.agrees(wrong)


def test_a_size_without_a_model_is_refused():
    with pytest.raises(ValueError, match="size 100 must be a multiple of 128"):
        bench("quantize", sizes=(100,))
