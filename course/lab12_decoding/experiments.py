"""Lab 12's measurements: passes under this machine's roof, tokens per second by batch, a token with and without cache.

The device is one core, as in lab 02. Weights are random and larger than the processor's caches (`WIDE`), in bfloat16
where the processor multiplies that faster than float32: with few rows torch's float32 products stay far below either
line of the roof, bfloat16's follow it.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from course.kit.answers import answers_of
from course.lab12_decoding import formulas as predict
from course.lab12_decoding.decoders import Cache
from course.lab12_decoding.formulas import Work
from course.lab12_decoding.traffic import MemoryTraffic
from course.shared.measuring import count_flops, one_thread, text_tokens
from minillm.data import Tokenizer
from minillm.model import ModelConfig, Transformer, dense, load_hf
from minillm.model.generate import KVCache, folder_of
from minillm.predict.model import forward_flops

ANSWERS = answers_of("12_decoding")


WIDE = ModelConfig(4096, 1536, 4096, 2, 12, 2, max_seq_len=8192, tie_embeddings=True)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
PROMPTS = (16, 64, 256)
CONTEXT = 64

# Real shapes, for arithmetic: vocabulary, hidden, intermediate, layers, heads, kv heads.
MODELS = {
    "Llama 2 7B": ModelConfig(32000, 4096, 11008, 32, 32, 32),
    "Llama 3 8B": ModelConfig(128256, 4096, 14336, 32, 32, 8),
    "Llama 3 70B": ModelConfig(128256, 8192, 28672, 80, 64, 8),
}


@dataclass(frozen=True)
class Gpu:
    """Datasheet numbers: FLOP/s in bf16 without sparsity, bytes/s, bytes."""

    peak_flops: float
    bandwidth: float
    memory_bytes: float
    source: str


GPUS = {
    "A100 80GB SXM": Gpu(312e12, 2.039e12, 80e9, "NVIDIA A100 Tensor Core GPU datasheet, 2021"),
    "H100 SXM": Gpu(989e12, 3.35e12, 80e9, "NVIDIA H100 Tensor Core GPU datasheet, 2023 (1,979 is with sparsity)"),
    "H200 SXM": Gpu(989e12, 4.8e12, 141e9, "NVIDIA H200 Tensor Core GPU datasheet, 2024 (1,979 is with sparsity)"),
}


@dataclass(frozen=True)
class Roof:
    """The two lines of one core, measured as the machine card measures them, in `dtype`."""

    dtype: torch.dtype
    peak_flops: float
    bandwidth: float

    @property
    def ridge(self) -> float:
        return self.peak_flops / self.bandwidth


@dataclass(frozen=True)
class Point:
    """One kind of pass, what it costs by the closed form, and the best of its times."""

    kind: str  # prefill or decode
    batch: int
    new: int
    kept: int
    work: Work
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.batch * self.new / self.seconds

    @property
    def flops_per_s(self) -> float:
        return self.work.flops / self.seconds


@cache
def roof() -> Roof:
    """Square products and the triad a = b + s·c, as for the machine card, but now and on the clock of `fastest`."""
    with one_thread():
        best = {}
        for dtype in (torch.float32, torch.bfloat16):
            squares = [torch.ones(n, n, dtype=dtype) for n in (512, 1024)]
            took = fastest([partial(torch.mm, square, square) for square in squares], sweeps=8)
            best[dtype] = max(2 * len(square) ** 3 / t for square, t in zip(squares, took, strict=True))
        a, b, c = (torch.ones(2**24) for _ in range(3))
        triad = 3 * a.nbytes / fastest([partial(torch.add, b, c, alpha=0.5, out=a)], sweeps=8)[0]
    dtype = max(best, key=best.__getitem__)
    return Roof(dtype, best[dtype], triad)


@cache
def wide_model() -> Transformer:
    """`WIDE` with random weights (uniform: drawn faster than normal)."""
    model = Transformer(WIDE, seed=None, dtype=roof().dtype)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.uniform_(-0.03, 0.03, generator=draw)
    return model


def prepare(model: Transformer, batch: int, new: int, kept: int) -> Callable[[], Any]:
    """A pass of `new` tokens for each of `batch` sequences that keep `kept`; logits of the last, as when serving."""
    weight, config = model.embedding.weight, model.config
    cache = KVCache(config, kept + new, batch=batch, dtype=weight.dtype)
    for part in (cache.keys, cache.values):
        part.fill_(0.1)
    tokens = torch.arange(batch * new).view(batch, new) % config.vocab_size
    positions, last = torch.arange(kept, kept + new), torch.tensor([new - 1])
    return partial(model, tokens, positions, attention=cache, rows=last)


@one_thread()
@torch.no_grad()
def fastest(runs: Sequence[Callable[[], Any]], sweeps: int) -> list[float]:
    """The best time of each, in sweeps over all. Processor time of this thread: other work is not in it."""
    best = [float("inf")] * len(runs)
    for _ in range(sweeps):
        for i, run in enumerate(runs):
            start = time.thread_time()
            run()
            best[i] = min(best[i], time.thread_time() - start)
    return best


def points(passes: Iterable[tuple[str, int, int, int]], sweeps: int = 3) -> list[Point]:
    """Measures passes (kind, batch, new, kept) of the wide model."""
    model, asked = wide_model(), list(passes)
    seconds = fastest([prepare(model, *shape) for _, *shape in asked], sweeps)
    size = roof().dtype.itemsize
    return [Point(*each, predict.work(WIDE, *each[1:], size), took) for each, took in zip(asked, seconds, strict=True)]


@cache
def sweep(sweeps: int = 3) -> list[Point]:
    """Decoding at growing batches, prefill of growing prompts."""
    decode = [("decode", batch, 1, CONTEXT - 1) for batch in BATCHES]
    return points([*decode, *(("prefill", 1, prompt, 0) for prompt in PROMPTS)], sweeps)


def prefill_together(prompt: int = 128) -> list[Point]:
    """1, 2 and 4 prompts in one pass."""
    return points([("prefill", batch, prompt, 0) for batch in (1, 2, 4)], sweeps=2)


# The course's small model, on real text.


@cache
def target(dtype: torch.dtype = torch.float32) -> Transformer:
    return load_hf(folder_of("target"), dtype=dtype)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(folder_of("target"))


def windows(count: int, length: int) -> Tensor:
    """[count, length] tokens of files that the model has not seen."""
    return torch.from_numpy(text_tokens().array[: count * length].astype("int64")).view(count, length)


@cache
def one_more_token(lengths: tuple[int, ...] = (31, 127, 383)) -> dict[int, dict[str, dict[str, float]]]:
    """{tokens so far: {"cached" or "recomputed": FLOPs counted and predicted, best seconds}} of the next token.

    Attention is `dense`, whose score matrix is whole, so that torch's counter sees all of it.
    """
    model, ids = target(), windows(1, max(lengths) + 1)
    found: dict[int, dict[str, dict[str, float]]] = {}
    for kept in lengths:
        size, config = kept + 1, model.config
        cache = Cache(config, size, ANSWERS.attend)
        with torch.no_grad():
            model(ids[:, :kept], torch.arange(kept), attention=cache)

        def with_cache(kept: int = kept, cache: Cache = cache) -> Tensor:
            cache.entries = kept
            return model(ids[:, kept : kept + 1], torch.tensor([kept]), attention=cache)

        ways = {"cached": with_cache, "recomputed": lambda size=size: model(ids[:, :size], attention=dense)}
        with torch.no_grad():
            flops = [count_flops(way) for way in ways.values()]
            same = (ways["cached"]()[0, -1] - ways["recomputed"]()[0, -1]).abs().max().item()
        each = forward_flops(config, size).total
        found[size] = {
            name: {"flops": counted, "predicted": times * each, "seconds": took, "apart": same}
            for name, counted, times, took in zip(ways, flops, (1, size), fastest(list(ways.values()), 2), strict=True)
        }
    return found


def bytes_of_a_step(batch: int, context: int) -> dict[str, tuple[float, int]]:
    """{"weights" or "cache": (bytes read by the closed form, counted)} of a decode step of the small model."""
    model = target()
    cost = predict.work(model.config, batch, 1, context - 1, 4)
    run = prepare(model, batch, 1, context - 1)
    cache = run.keywords["attention"]
    with torch.no_grad(), MemoryTraffic(weights=model.parameters(), cache=(cache.keys, cache.values)) as traffic:
        run()
    return {
        "weights": (cost.weight_bytes, traffic.read["weights"]),
        "cache": (cost.kv_read_bytes, traffic.read["cache"]),
    }
