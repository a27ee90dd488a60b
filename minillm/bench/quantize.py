"""Decoding one sequence with weights in 8 and 4 bits, against float32, bfloat16 and torchao's layers.

    target              the committed model: 23 MB in float32, so much of a step is not reading weights
    Llama of 1024       hidden size 1024, 8 layers, random: 0.43 GB in float32, which no cache of a laptop holds

A row's name says what the memory roofline allows, if nothing else took time: bytes of weights before, over after.
Results are right if the logits are those of the same codes dequantized, to bfloat16's rounding.
"""

import copy
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import nn

from minillm.bench.harness import BenchRow, bench_row, check_repeats, seconds_per_call, side_by_side
from minillm.model import ModelConfig, Transformer, load_hf
from minillm.model.generate import folder_of, generate
from minillm.quantize import Format, Int, Settings, kernels, nbytes, quantize, quantized_layers

TARGET, LARGE, LARGEST = 0, 1024, 4096
FORMATS: dict[str, Format] = {"int8": Int(), "int4, group 128": Int(bits=4, group=128)}
NEW = 24  # tokens of a sample
TOLERANCE = 0.05  # of logits, relative: bfloat16 through all layers


def run(repeats: int = 7, sizes: Sequence[int] = (TARGET, LARGE)) -> list[BenchRow]:
    """sizes: hidden sizes of random Llamas, 0 = the committed target."""
    check_repeats(repeats)
    return [row for size in sizes for row in of_model(size, repeats)]


def of_model(size: int, repeats: int) -> list[BenchRow]:
    name, original = model_of(size)
    rows = []
    for what, format in FORMATS.items():
        ours = copy.deepcopy(original)
        quantize(ours, Settings(format))
        peers = {"float32": original, "bfloat16": copy.deepcopy(original).bfloat16()}
        if what == "int8" and find_spec("torchao"):
            peers["torchao int8"] = by_torchao(original)
        for peer, theirs in peers.items():
            least = "" if "torchao" in peer else f" (roofline {nbytes(theirs) / nbytes(ours):.1f})"
            rows.append(compare(f"decode, {name}, {what}{least}", ours, peer, theirs, repeats))
    return rows


def compare(title: str, ours: Transformer, peer: str, theirs: Transformer, repeats: int) -> BenchRow:
    samples = [seconds_per_call(lambda model=model: list(generate(model, [1, 2, 3], NEW))) for model in (ours, theirs)]
    times = side_by_side(lambda: agrees(ours), *samples, repeats=repeats)
    return bench_row(title, peer, times, "ms/token", scale=1e3 / NEW)


@torch.no_grad()
def agrees(model: Transformer) -> bool:
    """Whether the kernels compute what the dequantized weights do."""
    tokens = torch.arange(1, 33)[None]
    exact = copy.deepcopy(model)
    for layer in quantized_layers(exact).values():
        layer.use(kernels.DEQUANTIZE)
    expected = exact(tokens)
    return bool((model(tokens) - expected).norm() < TOLERANCE * expected.norm())


def model_of(size: int) -> tuple[str, Transformer]:
    if size == TARGET:
        return "target", load_hf(folder_of("target"), dtype=torch.float32)
    if not 0 < size <= LARGEST or size % 128:
        raise ValueError(f"size {size} must be a multiple of 128 up to {LARGEST}, or 0 for the committed target")
    heads = size // 64
    config = ModelConfig(4096, size, 11 * size // 4 // 128 * 128, 8, heads, max_seq_len=256, tie_embeddings=True)
    return f"Llama of {size}", Transformer(config)


def by_torchao(model: Transformer) -> Transformer:
    """A copy whose layers in the blocks are torchao's, int8 weights per channel."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    copied = copy.deepcopy(model).bfloat16()  # what its kernel on the CPU is for
    quantize_(copied, Int8WeightOnlyConfig(), lambda module, name: isinstance(module, nn.Linear) and "blocks" in name)
    return copied
