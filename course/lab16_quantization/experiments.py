"""What lab 16 measures on the committed target: bytes, bits per byte of held-out text, CPU seconds of one thread.

The target has no outliers of its own, so `planted` gives it some without changing what it computes.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course.shared.measuring import one_thread, text_tokens
from minillm.data import TokenDataset, Tokenizer, corpus, tokenize
from minillm.model import Transformer, load_hf
from minillm.model.attention.causal import sdpa
from minillm.model.generate import folder_of, generate
from minillm.predict.model import bits_per_byte
from minillm.quantize import NF4, Float8, Format, Int, QuantizedLinear, Settings, nbytes, quantize
from minillm.quantize.calibrate import block_by_block, groups_of, windows_of

WINDOWS, SEQ = 8, 256  # of held-out text
CALIBRATION = 8, 128  # windows and tokens of the training text
LOUDER, EVERY = 30.0, 16  # planted outliers: how much larger, and one channel of so many
INT4 = Int(bits=4, group=128)
PLAIN = "torch's linear"
FORMATS: dict[str, Format | None] = {
    "float32": None,
    "int8": Int(),
    "e4m3": Float8(),
    "int4, groups of 32": Int(bits=4, group=32),
    "int4, groups of 128": INT4,
    "NF4": NF4(),
}


def target(name: str = "target") -> Transformer:
    """A fresh copy of a committed model, float32 on the CPU."""
    return load_hf(folder_of(name), dtype=torch.float32)


@lru_cache(maxsize=1)
def held_out() -> tuple[Tensor, Tensor]:
    """(inputs, targets): [WINDOWS, SEQ] ids, evenly spread over the held-out files."""
    dataset = TokenDataset(text_tokens(), SEQ)
    return dataset.batch([index * len(dataset) // WINDOWS for index in range(WINDOWS)])


@lru_cache(maxsize=1)
def calibration() -> Tensor:
    """[windows, tokens] ids of the training text."""
    return windows_of(tokenize(corpus(), Tokenizer.load(), "train"), *CALIBRATION)


@cache
@torch.no_grad()
@one_thread()
def original() -> Tensor:
    """[tokens, vocab_size]: log-probabilities that the target gives after each held-out token."""
    return target()(held_out()[0]).float().log_softmax(-1).flatten(0, 1)


@torch.no_grad()
@one_thread()
def divergence(model: nn.Module) -> float:
    """KL to the target, Σ p · log(p / q) of the next token in nats: the mean over the held-out windows."""
    theirs = model(held_out()[0]).float().log_softmax(-1).flatten(0, 1)
    return float(F.kl_div(theirs, original(), reduction="batchmean", log_target=True))


@torch.no_grad()
@one_thread()
def text_bits(model: nn.Module, attention: Callable = sdpa) -> float:
    """Bits per byte of the held-out windows."""
    inputs, targets = held_out()
    loss = F.cross_entropy(model(inputs, attention=attention).float().flatten(0, 1), targets.flatten())
    return bits_per_byte(float(loss), len(text_tokens()), text_tokens().text_bytes)


@cache
def plain_bits() -> float:
    """Bits per byte of the target as it is."""
    return text_bits(target())


@torch.no_grad()
@one_thread()
def token_seconds(models: Sequence[Transformer], new: int = 8, repeats: int = 4) -> list[float]:
    """CPU seconds of a token in each model when one sequence is decoded: the least of runs that take turns."""
    found: list[list[float]] = [[] for _ in models]
    for repeat in range(repeats + 1):  # the first is a warm-up
        for model, own in zip(models, found, strict=True):
            start = time.process_time()
            count = len(list(generate(model, [5, 6, 7, 8], new if repeat else 2)))
            if repeat:
                own.append((time.process_time() - start) / count)
    return [min(own) for own in found]


# Formats.


@dataclass(frozen=True)
class Measured:
    """A model in some format. kl: to the target, in nats. seconds: of a decoded token."""

    name: str
    bytes: int
    bits_per_byte: float
    kl: float
    seconds: float
    kernel: str


@cache
@one_thread()
def in_format(name: str) -> tuple[Transformer, str]:
    """The target, every layer rounded to nearest, and the kernel that multiplies."""
    model, format = target(), FORMATS[name]
    if format is None:
        return model, PLAIN
    [kernel] = quantize(model, Settings(format)).kernels
    return model, kernel


def formats() -> list[Measured]:
    """The target in every format, rounded to nearest; at the end the draft, which is a smaller model instead."""
    models = {name: in_format(name) for name in FORMATS} | {"draft, float32": (target("draft"), PLAIN)}
    times = token_seconds([model for model, _ in models.values()])
    return [
        Measured(name, nbytes(model), text_bits(model), divergence(model), seconds, kernel)
        for (name, (model, kernel)), seconds in zip(models.items(), times, strict=True)
    ]


def layers() -> dict[str, Tensor]:
    """Name -> weight of every layer of the target that is quantized."""
    return {name: m.weight.detach() for name, m in target().blocks.named_modules() if type(m) is nn.Linear}


def snr_db(weight: Tensor, rounded: Tensor) -> float:
    """10 · log10 of the mean squares of weights and errors."""
    return 10 * math.log10(float(weight.square().sum() / (rounded - weight).square().sum()))


def noise_by_group(groups: tuple[int, ...]) -> dict[str, list[tuple[float, float]]]:
    """{format: (bits per weight, signal to noise in dB) for each group} over all of the target's layers together."""
    everything = torch.cat([weight.flatten() for weight in layers().values()]).view(-1, 256)
    found: dict[str, list[tuple[float, float]]] = {}
    for bits in (4, 8):
        for group in groups:
            format = Int(bits=bits, group=group)
            rounded = format.nearest(everything, format.grid(everything))
            found.setdefault(f"int{bits}", []).append((bits + 16 / group, snr_db(everything, rounded)))
    return found


# Methods.


@dataclass(frozen=True)
class Method:
    """output_error: mean over layers, on the calibration's text. change: of the bits per byte, relative."""

    output_error: float
    change: float


@torch.no_grad()
def planted() -> Transformer:
    """The target with outliers: some channels LOUDER times larger in what norms and up_proj give, and the weights that
    meet them as much smaller. It computes the same."""
    model = target()
    for block in model.blocks:
        for group in groups_of(block):
            if group.divide is None or group.shared:
                continue
            factors = torch.ones(next(iter(group.layers.values())).in_features)
            factors[::EVERY] = 1 / LOUDER
            group.divide(factors)
            for layer in group.layers.values():
                layer.weight *= factors
    return model


METHODS = ("rtn", "awq", "gptq")


def methods() -> dict[str, dict[str, Method]]:
    """{model: {method: what int4 in groups of 128 did to it}}."""
    return {
        name: {method: with_method(make(), method) for method in METHODS}
        for name, make in (("as trained", target), ("planted outliers", planted))
    }


@one_thread()
def with_method(model: Transformer, method: str, format: Format = INT4) -> Method:
    """Quantizes the model in place."""
    errors = quantize(model, Settings(format, method), calibration()).errors.values()
    return Method(sum(errors) / len(errors), text_bits(model) / plain_bits() - 1)


# The cache.


class Rounding:
    """An attention function whose keys and values have gone through `quantize_kv` and back."""

    def __init__(self, quantize_kv: Callable):
        self.quantize_kv = quantize_kv

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        return sdpa(q, self._rounded(k), self._rounded(v), **options)

    def _rounded(self, heads_first: Tensor) -> Tensor:
        """[batch, heads, seq, head_dim]."""
        rows = heads_first.transpose(1, 2)
        codes, scale = self.quantize_kv(rows.flatten(0, 1))
        return (codes * scale[..., None]).view(rows.shape).transpose(1, 2)


# Leaving out.


@cache
@one_thread()
def grams() -> dict[str, Tensor]:
    """Layer -> Σ x xᵀ of its inputs in the target as it is."""
    found = {}
    for number, (_, groups) in enumerate(block_by_block(target(), calibration())):
        for group in groups:
            found |= {f"{number}.{name}": group.inputs.gram for name in group.layers}
    return found


@torch.no_grad()
@one_thread()
def with_weights(change: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Relative change of the bits per byte, if every layer's weight becomes change(weight, Σ x xᵀ of its inputs)."""
    model = target()
    for name, layer in model.blocks.named_modules():
        if type(layer) is nn.Linear:
            layer.weight.copy_(change(layer.weight, grams()[name]))
    return text_bits(model) / plain_bits() - 1


@torch.no_grad()
def with_program(model: Transformer, program: Callable[[Tensor, int], Tensor], group: int) -> float:
    """Relative change of the bits per byte, if every layer becomes program(weight, group)."""
    for layer in model.blocks.modules():
        if type(layer) is nn.Linear:
            layer.weight.copy_(program(layer.weight, group))
    return text_bits(model) / plain_bits() - 1


@dataclass(frozen=True)
class Spectrum:
    """Of one layer. values: singular values; points: {format: (bits per weight, relative error)}."""

    name: str
    shape: tuple[int, int]
    values: list[float]
    points: dict[str, tuple[float, float]]


def spectrum(name: str = "2.mlp.gate_proj") -> Spectrum:
    weight = layers()[name]
    points = {}
    for label, format in (("int8", Int()), ("int4, groups of 128", INT4)):
        rounded = format.nearest(weight, format.grid(weight))
        bits = 8 * QuantizedLinear.of(_linear(weight), format).nbytes / weight.numel()
        points[label] = bits, float((rounded - weight).norm() / weight.norm())
    return Spectrum(name, tuple(weight.shape), torch.linalg.svdvals(weight).tolist(), points)


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


# Speed of one layer.


@torch.no_grad()
@one_thread()
def layer_seconds(rows: tuple[int, ...], size: int = 2048, repeats: int = 5) -> dict[int, tuple[float, float]]:
    """{rows at once: CPU seconds of a layer in float32, and in int8}: the least of runs that take turns."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        plain = nn.Linear(size, size, bias=False)
        quantized = QuantizedLinear.of(plain, Int())
        inputs = {count: torch.randn(count, size) for count in rows}
    found = {}
    for count, x in inputs.items():
        times: tuple[list[float], list[float]] = [], []
        for repeat in range(repeats + 1):
            for layer, own in zip((plain, quantized), times, strict=True):
                start = time.process_time()
                layer(x)
                if repeat:
                    own.append(time.process_time() - start)
        found[count] = min(times[0]), min(times[1])
    return found
