"""Prefill and decode: what a forward pass reads, writes and computes, and how fast it can be at most.

    a pass        batch sequences, each with `kept` tokens in the cache, bring `new` tokens each
    prefill       new = prompt, kept = 0         FLOPs ~ 2 · P · prompt     bytes ~ P · b          compute-bound
    decode        new = 1, kept = context        FLOPs ~ 2 · P · batch      bytes ~ P · b + batch · context · KV
    intensity     FLOP per byte ~ (2 / b) · tokens in the pass, as long as the cache is small beside the weights

P matmul parameters, b bytes per element, KV = 2·L·H_kv·d·b bytes per token (`model.kv_bytes_per_token`). Every weight
is read once per pass, whatever the batch: that is why a batch decodes faster than one sequence (Pope et al. 2022,
"Efficiently Scaling Transformer Inference", §2). Bytes are compulsory traffic: activations are taken to stay in caches.
"""

from __future__ import annotations

from dataclasses import dataclass

from minillm.predict.model import Shape, causal_context, kv_bytes_per_token, matmul_parameters, parameters
from minillm.predict.roofline import ridge_point


@dataclass(frozen=True)
class Work:
    """What one pass costs. FLOPs, and bytes to and from memory: of weights, of cached keys and values."""

    tokens: int
    flops: float
    weight_bytes: float
    kv_read_bytes: float
    kv_written_bytes: float

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_read_bytes + self.kv_written_bytes

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes

    def seconds(self, peak_flops: float, bandwidth: float) -> float:
        """At least so long: max(FLOPs / peak_flops, bytes / bandwidth)."""
        ridge_point(peak_flops, bandwidth)  # refuses what is not above zero
        return max(self.flops / peak_flops, self.bytes / bandwidth)

    def bound(self, peak_flops: float, bandwidth: float) -> str:
        """ "memory" or "compute": which of the two takes longer."""
        return "compute" if self.intensity > ridge_point(peak_flops, bandwidth) else "memory"


def work(shape: Shape, batch: int, new: int, kept: int, itemsize: int = 2) -> Work:
    """A forward pass of `batch` sequences that bring `new` tokens each to `kept` cached ones; logits of the last only.

    Exact for `minillm.model` with a contiguous cache: each weight once, of the embedding the rows looked up; a key and
    a value written per new token, all of kept + new read. Scores are counted as a causal kernel computes them.
    """
    _at_least(1, batch=batch, new=new, itemsize=itemsize)
    _at_least(0, kept=kept)
    count, h = parameters(shape), shape.hidden_size
    head = shape.vocab_size * h
    every = kept + new
    keys = every * causal_context(every, shape.sliding_window)
    keys -= kept * causal_context(kept, shape.sliding_window) if kept else 0
    scores = 4 * shape.num_layers * shape.num_heads * shape.head_dim * keys
    entry = kv_bytes_per_token(shape, itemsize)
    return Work(
        tokens=batch * new,
        flops=batch * (2 * (matmul_parameters(shape) - head) * new + 2 * head + scores),
        weight_bytes=(count.total - count.embedding + (head if not count.head else 0) + batch * new * h) * itemsize,
        kv_read_bytes=batch * every * entry,
        kv_written_bytes=batch * new * entry,
    )


def kv_entries(prompt: int, answer: int) -> int:
    """Tokens in the cache after `answer` generated ones: prompt + answer - 1.

    The token drawn last was never put through the model; its keys would appear in the next pass.
    """
    _at_least(1, prompt=prompt, answer=answer)
    return prompt + answer - 1


def kv_bytes(shape: Shape, entries: int, itemsize: int = 2) -> int:
    """Bytes of so many cached tokens: entries · 2·L·H_kv·d·b."""
    return entries * kv_bytes_per_token(shape, itemsize)


def tokens_that_fit(shape: Shape, memory_bytes: float, itemsize: int = 2) -> int:
    """Cached tokens, of all requests together, that fit beside the weights; below 0: not even the weights fit."""
    return int((memory_bytes - parameters(shape).total * itemsize) // kv_bytes_per_token(shape, itemsize))


def answer_flops(shape: Shape, prompt: int, answer: int, *, cached: bool) -> float:
    """FLOPs of a whole answer: one pass over the prompt and one per further token; without a cache each pass again
    brings all tokens so far, and the cost of a token grows with its place."""
    _at_least(1, prompt=prompt, answer=answer)
    if cached:
        later = (work(shape, 1, 1, prompt + i) for i in range(answer - 1))
        return work(shape, 1, prompt, 0).flops + sum(each.flops for each in later)
    return sum(work(shape, 1, prompt + i, 0).flops for i in range(answer))


def decode_tokens_per_s(
    weight_bytes: float, kv_bytes_per_token: float, batch: int, context: float, bandwidth: float
) -> float:
    """Tokens per second of all sequences at most, while memory is the bound: B / ((P·b + B·ctx·KV) / BW).

    Grows with the batch: linearly at first, towards `kv_ceiling` when the caches outweigh the weights.
    """
    _at_least(1, batch=batch)
    return batch * bandwidth / (weight_bytes + batch * context * kv_bytes_per_token)


def kv_ceiling(kv_bytes_per_token: float, context: float, bandwidth: float) -> float:
    """Tokens per second that no batch exceeds: BW / (ctx · KV). Every sequence reads its own cache for every token."""
    return bandwidth / (context * kv_bytes_per_token)


def decode_rate(
    shape: Shape, batch: int, context: int, peak_flops: float, bandwidth: float, itemsize: int = 2
) -> float:
    """Tokens per second at most, compute included; the new token is the last of `context`."""
    return batch / work(shape, batch, 1, context - 1, itemsize).seconds(peak_flops, bandwidth)


def turning_batch(shape: Shape, context: int, peak_flops: float, bandwidth: float, itemsize: int = 2) -> float | None:
    """The batch from which decoding is compute-bound; None if never, since the caches' bytes grow as fast as the FLOPs.

    Solves B · FLOPs / peak = (weights + B · cache) / bandwidth. Without a cache it is about ridge · b / 2.
    """
    one = work(shape, 1, 1, context - 1, itemsize)
    own = one.kv_read_bytes + one.kv_written_bytes + shape.hidden_size * itemsize
    shared = one.bytes - own
    per_sequence = one.flops / peak_flops - own / bandwidth
    return shared / bandwidth / per_sequence if per_sequence > 0 else None


def request_seconds(queue: float, ttft_work: float, answer: int, tpot: float) -> float:
    """End to end: waiting, prefill (which gives the first token), then answer - 1 tokens at `tpot` seconds each."""
    _at_least(1, answer=answer)
    return queue + ttft_work + (answer - 1) * tpot


def _at_least(least: int, **values: float) -> None:
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} is {value}; give at least {least}")
