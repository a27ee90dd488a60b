"""Numbers of the cards on serving, computed a second time from data sheets, papers and plain arithmetic."""

import math
import random

from card_formulas import drafted, mean_wait, tail
from card_numbers import Worked

# parameters of Llama 3 8B and 70B: their model cards; layers, kv heads and head sizes: their config.json
P8, P70 = 8.03e9, 70.55e9
KV8, KV70 = 2 * 32 * 8 * 128 * 2, 2 * 80 * 8 * 128 * 2  # bytes of a cached token
PEAK, MEMORY, PORT = 989e12, 3.35e12, 50e9  # an H100's FLOP/s and bytes/s, and a 400 Gb/s port


def longest_exponential(count: int) -> float:
    """Expected maximum of so many exponential lengths: the integral of 1 - (1 - e^-x)^n."""
    return sum(0.001 * (1 - (1 - math.exp(-x / 1000)) ** count) for x in range(30000))


def longest_uniform(count: int) -> float:
    """Of lengths between 0 and 2: the integral of 1 - (x/2)^n."""
    return sum(0.001 * (1 - (x / 2000) ** count) for x in range(2000))


def mean_waste(block: int) -> float:
    """Empty places of the last block, over all lengths."""
    return sum(-length % block for length in range(1, 64 * block + 1)) / (64 * block)


def best_k(alpha: float, draft: float) -> int:
    return max(range(1, 40), key=lambda k: drafted(alpha, k) / (1 + draft * k))


def accepted_by_drawing(p: tuple[float, ...], q: tuple[float, ...]) -> float:
    draw, kept = random.Random(1), 0
    for token in draw.choices(range(len(q)), q, k=200_000):
        kept += draw.random() < min(1.0, p[token] / q[token])
    return kept / 200_000


def equal_work(layer: float, heads_times_dim: int) -> int:
    """Thousands of tokens from which causal attention does more FLOPs than a layer's weights, by trying."""
    return next(s for s in range(1, 999) if 4 * heads_times_dim * 1000 * s / 2 >= 2 * layer) - 1


LAYER8 = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336  # weights of a layer of Llama 3 8B, from its config.json
LORA8 = (
    32
    * 16
    * sum(  # q, o, k, v, gate, up, down: rank · (inputs + outputs)
        a + b for a, b in [(4096, 4096)] * 2 + [(4096, 1024)] * 2 + [(4096, 14336)] * 2 + [(14336, 4096)]
    )
)
WEIGHTS4 = 3e9 * 4.5 / 8

WORKED = {
    "Static batches of 8 with exponential": Worked(
        (longest_exponential(8), longest_uniform(8), 16 / 9), chosen=(0, 16, 9)
    ),
    "Uniform lengths from 1 to 2": Worked((longest_uniform(8),), chosen=(8, 9)),
    "Preempt by recomputation": Worked((2000 * KV8, 1e3 * (2000 * KV8 / 25e9 + 2000 * KV8 / 25e9)), (2000, 25e9)),
    "Little's law for a server": Worked((sum(20 for second in range(6)),), chosen=(20, 6)),
    "Mean wait of a random queue": Worked(
        (*map(mean_wait, (0.5, 0.85, 0.95)), tail(0.5, 0.01), tail(0.85, 0.01), tail(0.95, 0.01))
    ),
    "p99 of the wait at 85 % load": Worked((tail(0.85, 0.01), tail(0.85, 0.01) / mean_wait(0.85))),
    "How many bytes per token does the cache of Llama 3 70B": Worked((KV70, 32768 * KV70), chosen=(8,)),
    "Most tokens per second of one sequence: 70B": Worked((MEMORY / (2 * P70), 8 * MEMORY / (2 * P70))),
    "What ends the linear growth": Worked((PEAK / MEMORY, 2 * P8 / (8192 * KV8))),
    "At which batch do caches of 4,096": Worked((2 * P8, KV8, next(b for b in range(99) if b * 4096 * KV8 > 2 * P8))),
    "Prefill of 4,096 tokens": Worked(
        (2 * 8e9 * 4096 / (PEAK * 2 / 3) * 1e3, 1e3 * equal_work(LAYER8, 4096)), chosen=(2, 8e9, 3, 989e12)
    ),
    "How much does a contiguous cache waste": Worked((mean_waste(16),), chosen=(16,)),
    "100 requests share a prefix": Worked((len(range(16, 1001, 16)), 99 * len(range(16, 1001, 16)))),
    "Why does a decode kernel split": Worked((1 * 8,), chosen=(1, 8)),
    "How many sequences of 8,192 tokens fit on 80 GB": Worked(
        (0.9 * 80e9, 2 * P8, 8192 * KV8, max(n for n in range(99) if 2 * P8 + n * 8192 * KV8 <= 72e9))
    ),
    "Multi-query, grouped and multi-head": Worked((len(range(0, 32, 8)),), chosen=(8, 32)),
    "How many bits per weight does int4": Worked(((128 * 4 + 16) / 128, (32 * 4 + 16) / 32), chosen=(4,)),
    "What does 4-bit weight-only": Worked((16 * 32 / (4 * 32 + 16), (4 * 32 + 16) / 32)),
    "How many parameters does LoRA": Worked((16 * 4096 + 4096 * 16, 16 * 2 / 4096), chosen=(4096,)),
    "What does LoRA save in training memory": Worked((7e9 * (4 + 4 + 4 + 4), 7e9 * (2 + 4 + 4 + 4 + 4))),
    "How large is a 70B base in NF4": Worked(
        ((64 * 4 + 32) / 64, 70e9 * (64 * 4 + 32) / 64 / 8, 32 / 64 - (256 * 8 + 32) / 256 / 64), chosen=(4,)
    ),
    "How do many adapters share": Worked((1000 * LORA8 * 2, LORA8 * 2)),
    "200 requests per second of 300": Worked(
        (200 * 300, 200 * 300 / 2800, next(n for n in range(99) if n * 3500 * 0.8 >= 200 * 300))
    ),
    "How long does a replica of 70B": Worked((2 * P70 / 2e9,)),
    "40 requests per second arrive": Worked((sum(40 - 25 for second in range(130)), 1950 / (2 * 25 - 40))),
    "When does splitting prefill": Worked((2000 * KV70, 2000 * KV70 / PORT * 1e3), chosen=(2000, 50e9)),
    "What does a million output tokens": Worked((16 * 1e6 / 3500 / 3600, 16 * 1e6 / 3500 / 3600 / 0.4, 1 / 0.4)),
    "3B weights in 4.5 bits": Worked((WEIGHTS4, 60e9 / WEIGHTS4)),
    "What is the acceptance rate": Worked((accepted_by_drawing((0.6, 0.4), (0.8, 0.2)),), (0.6, 0.4, 0.2)),
    "Tokens per pass with acceptance": Worked((drafted(0.8, 4), drafted(0.8, 8), drafted(0.8, 200))),
    "Speedup with acceptance 0.8": Worked(
        (drafted(0.8, 4), 1 + 4 * 0.05, drafted(0.8, 4) / (1 + 4 * 0.05), best_k(0.8, 0.05))
    ),
    "Which K is best for acceptance 0.6": Worked((best_k(0.6, 0.1), best_k(0.9, 0.1))),
    "Why does speculation slow down": Worked((drafted(0.7, 4) / (5 + 4 * 0.1),), chosen=(0.7, 4)),
}  # fmt: skip

COUNTS = {  # whole things and units that the text names, and sizes without which it would say nothing
    "Why is decoding slow": {2: "FLOPs per weight: a product and a sum; bytes of a 16-bit weight"},
    "3B weights in 4.5 bits": {2: "FLOPs per weight: a product and a sum"},
    "What does temperature do": {0: "the limit of greedy", 1: "the temperature that changes nothing"},
    "Greedy tokens differ": {64: "bits of a double"},
    "Why does speculation slow down": {0: "no drafting at all"},
    "How long does a replica of 70B": {8: "bits of a narrower weight"},
}
