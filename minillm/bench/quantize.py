"""Decoding one sequence with weights in 8 and 4 bits, against float32, bfloat16, torchao's layers and llama.cpp.

    target              the committed model: 23 MB in float32, so much of a step is not reading weights. Where there is
                        a C++ compiler, once more with compiled passes, of ours and of the peers that are torch's.
                        "and head": the logits, too, come from int8, as llama.cpp's do, not from float32
    Llama of 1024       hidden size 1024, 8 layers, random: 0.43 GB in float32, which few caches hold
    Llama of 1792       319 million parameters, 1.3 GB in float32

A row's name says how many times fewer bytes the weights take than the peer's: what would be won, if a step did nothing
but read them from memory. Results are right if the logits are those of the same codes dequantized, to bfloat16's
rounding. torchao and llama.cpp (the packages llama-cpp-python and gguf) are peers where they are installed; llama.cpp
reads the same weights from a GGUF file in its own formats, Q8_0 beside int8 and Q4_0 beside int4.
"""

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch

from minillm.bench.harness import BenchRow, bench_row, check_repeats, seconds_per_call, side_by_side
from minillm.bench.quantize_peers import LlamaCpp, by_torchao, has_llama_cpp, write_gguf
from minillm.model import ModelConfig, Transformer, load_hf
from minillm.model.compiler import check_compiler
from minillm.model.generate import folder_of, generate
from minillm.quantize import Format, Int, Settings, kernels, nbytes, quantize, quantize_head, quantized_layers
from minillm.quantize.head import HeadInCodes

TARGET, LARGEST = 0, 4096
FORMATS: dict[str, Format] = {"int8": Int(), "int4, group 128": Int(bits=4, group=128)}
GGUF = {"int8": "Q8_0", "int4, group 128": "Q4_0"}
NEW = 24  # tokens of a sample
PROMPT = [1, 2, 3]
TOLERANCE = 0.05  # of logits, relative: bfloat16 through all layers


def run(repeats: int = 7, sizes: Sequence[int] = (TARGET, 1024, 1792)) -> list[BenchRow]:
    """sizes: hidden sizes of random Llamas, 0 = the committed target."""
    check_repeats(repeats)
    return [row for size in sizes for row in of_model(size, repeats)]


def of_model(size: int, repeats: int) -> list[BenchRow]:
    name, original = model_of(size)
    ways = {"decode": False} | ({"decode, compiled": True} if size == TARGET and has_compiler() else {})
    rows = []
    for what, format in FORMATS.items():
        ours = copy.deepcopy(original)
        kernel = next(iter(quantize(ours, Settings(format)).kernels))
        both = copy.deepcopy(ours)
        quantize_head(both)
        for way, compiled in ways.items():
            for part, model in ({"": ours} | ({" and head": both} if size == TARGET else {})).items():
                rows += [
                    compare(f"{way}, {name}, {what}{part} by {kernel}{fewer}", model, peer, decode, repeats, compiled)
                    for peer, fewer, decode in peers_of(original, model, what, compiled)
                ]
    return rows


def has_compiler() -> bool:
    try:
        check_compiler(torch.device("cpu"))
    except ValueError:
        return False
    return True


def peers_of(
    original: Transformer, ours: Transformer, what: str, compiled: bool
) -> Iterator[tuple[str, str, Callable[[], list[int]]]]:
    """(name, how many times fewer bytes ours has, what decodes), one after the other: few are in memory at once."""

    def row(peer: str, model: Transformer, bytes_known: bool = True) -> tuple[str, str, Callable[[], list[int]]]:
        fewer = f" ({bytes_read(model) / bytes_read(ours):.1f} times fewer bytes)" if bytes_known else ""
        return peer, fewer, lambda: list(generate(model, PROMPT, NEW, compiled=compiled))

    yield row("float32", original)
    yield row("bfloat16", copy.deepcopy(original).bfloat16())
    if what == "int8" and find_spec("torchao"):
        yield row("torchao int8", by_torchao(original), bytes_known=False)
    if has_llama_cpp():
        with llama_cpp_of(original, GGUF[what]) as theirs:
            yield f"llama.cpp {GGUF[what]}", "", lambda: theirs.generate(PROMPT, NEW)


def bytes_read(model: Transformer) -> int:
    """Of weights, for a token: of an embedding that is not the head, too, it is one row."""
    is_head = model.head is None and not isinstance(model.head_logits, HeadInCodes)
    return nbytes(model) - (0 if is_head else model.embedding.weight.nbytes)


@contextmanager
def llama_cpp_of(model: Transformer, kind: str) -> Iterator[LlamaCpp]:
    with tempfile.TemporaryDirectory(prefix="minillm-") as folder:
        write_gguf(model, Path(folder) / "model.gguf", kind)
        theirs = LlamaCpp(Path(folder) / "model.gguf", model.config.max_seq_len)
        try:
            yield theirs
        finally:
            theirs.close()


def compare(
    title: str, ours: Transformer, peer: str, theirs: Callable[[], list[int]], repeats: int, compiled: bool
) -> BenchRow:
    calls = (lambda: list(generate(ours, PROMPT, NEW, compiled=compiled)), theirs)
    samples = [seconds_per_call(call) for call in calls]
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
