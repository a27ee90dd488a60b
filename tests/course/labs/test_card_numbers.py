"""Numbers on the cards, computed a second time from data sheets, papers and plain arithmetic."""

import math
import re

import pytest

from course.lab24_interview import deck

P8, P70, P7 = 8.03e9, 70.55e9, 6.74e9  # parameters of Llama 3 8B and 70B, Llama 2 7B: their model cards
KV8, KV70 = 2 * 32 * 8 * 128 * 2, 2 * 80 * 8 * 128 * 2  # bytes of a cached token
H100, HBM, LINK, PORT = 989e12, 3.35e12, 450e9, 50e9
MTBF = 54 * 86400 / 419


def young(save, mtbf):
    """Where save/t + t/(2 · mtbf) is least, found by trying."""
    return min(range(1, 40000), key=lambda t: save / t + t / (2 * mtbf))


def wasted(save, restart, mtbf):
    t = young(save, mtbf)
    return save / t + (t / 2 + restart) / mtbf


def goodput(gpus):
    """Share of the time that is useful at the best interval, found by trying. Failures are exponential and strike
    restarts, too (Daly 2006, equation 13)."""
    mtbf = MTBF * 16384 / gpus
    per_interval = {t: mtbf * math.exp(600 / mtbf) * math.expm1((t + 30) / mtbf) for t in range(10, 6000, 5)}
    return max(t / took for t, took in per_interval.items())


def in_queue(load):
    """Mean number of exponential services ahead, term by term."""
    return sum(k * load**k * (1 - load) for k in range(4000))


def accepted(alpha, k):
    """Tokens of a pass: one, and each draft token if all before it were accepted."""
    return sum(alpha**i for i in range(k + 1))


def nodes_reached(experts, nodes, k):
    each = experts // nodes
    return nodes * (1 - math.prod((experts - each - i) / (experts - i) for i in range(k)))


def dropped(tokens, experts, capacity):
    """Expected share above the capacity, over a binomial load."""
    p, total = 1 / experts, 0.0
    for load in range(tokens + 1):
        chance = math.comb(tokens, load) * p**load * (1 - p) ** (tokens - load)
        total += chance * max(0, load - capacity)
    return total * experts / tokens


def harmonic_by_integral(count):
    """Expected maximum of exponential lengths: the integral of 1 - (1 - e^-x)^n."""
    return sum(0.001 * (1 - (1 - math.exp(-x / 1000)) ** count) for x in range(30000))


AGAIN = {  # beginning of the question: numbers that the answer must hold
    "Static batches of 8 with exponential": [harmonic_by_integral(8)],
    "Preempt by recomputation": [2000 * KV8, 2 * 2000 * KV8 / 25e9 * 1e3],
    "Little's law for a server": [sum(20 for _ in range(6))],
    "Mean wait of a random queue": [in_queue(0.5), in_queue(0.85), in_queue(0.95)],
    "p99 of the wait at 85 % load": [-math.log(0.01 / 0.85) / 0.15],
    "Uniform lengths from 1 to 2": [sum(0.001 * (1 - (x / 1000) ** 8) for x in range(1000)) * 2],
    "How many bytes does each rank send in a ring all-reduce of P": [14 * 0.125e9],
    "What is a reduce-scatter": [7 * 0.125e9],
    "How many rounds does a ring all-reduce take on 16": [15 + 15, math.log2(16)],
    "Why is a parameter server slower": [(63 + 63) / (4 * 63 / 64)],
    "A two-level all-reduce on 16 nodes of 8": [7 + 15 + 15 + 7, 127 * 2],
    "What crosses a node in a two-level": [7 * 2 / 8, 63 * 2 / 64],
    "What does in-network reduction": [2 * 63 / 64],
    "What is bus bandwidth": [14 / 8],
    "What does a contiguous cut of a causal": [1 / 16, 7 / 16],
    "Bytes of keys and values of 1 million tokens": [1e6 * KV8 / 32],
    "All-to-all bytes per rank: 4,096": [4096 * 8 * 7168 * 2 * 63 / 64],
    "Why does the fullest expert": [1.5],
    "256 experts on 8 nodes": [nodes_reached(256, 8, 8), 1 - nodes_reached(256, 8, 8) / 8],
    "Which share is dropped": [dropped(64, 8, 8), dropped(64, 8, 10)],
    "Batch of 16 tokens, top 2 of 8": [8 - 8 * 0.75**16],
    "How many tokens per second does a node": [400e12 * 8 / 6 / 8e9, 4 * 400e12 * 8 / 6 / 8e9],
    "Bits per byte from a loss": [math.log2(math.e) / 4],
    "How many bytes are 15 trillion": [4 * 15e12, 2 * 15e12],
    "Chinchilla": [6 * 70e9 * 20 * 70e9],
    "How many bytes does a rank send per step for a 1B": [4e9 * 2 * 7 / 8],
    "Bytes per rank of a 7B model's states": [
        7e9 * (6 + 12 / 64), 7e9 * (2 + 16 / 64), 7e9 * 18 / 64, 7e9 * 18
    ],
    "Why may a gradient norm be wrong": [64**0.5],
    "Offloading Adam to the host": [2 * 7e9, 14 / 25],
    "FSDP or tensor parallelism": [4.5 * 4096],
    "How many bytes per token does the cache of Llama 3 70B": [KV70],
    "Most tokens per second of one sequence: 70B": [HBM / (2 * P70)],
    "At which batch do caches of 4,096": [2 * P8, KV8, 2 * P8 / (4096 * KV8)],
    "Prefill of 4,096 tokens": [2 * 8e9 * 4096 / (H100 * 2 / 3) * 1e3],
    "100 requests share a prefix": [99 * (1000 // 16)],
    "How many sequences of 8,192 tokens fit on 80 GB": [(72e9 - 2 * P8) // (8192 * KV8)],
    "How large is a full checkpoint of a 70B": [12 * P70, 2 * P70],
    "What is Young's interval": [young(30, 10800) / 60],
    "Meta reports 419 interruptions": [MTBF / 3600, MTBF * 16384 / 86400 / 365],
    "Save 30 s, restart 10 minutes": [wasted(30, 600, 10800), 600 / 10800],
    "What does a ten-minute timeout": [16384 / 6],
    "Saves of 30 s and restarts of 10 minutes": [goodput(16384), goodput(131072)],
    "What are the three numbers that bound": [H100, HBM, LINK],
    "What is arithmetic intensity": [H100 / HBM],
    "How many FLOPs does a matmul": [sum(2 * 4096 for _ in range(1024)) * 4096],
    "How much slower is a 400 Gb/s": [HBM * 8 / 400e9],
    "Bits or bytes": [80 / 100],
    "Latency 20 µs, bandwidth 50 GB/s": [1e6],
    "How long does an H100 need to read": [2 * P8, 2 * P8 / HBM * 1e3],
    "How much energy": [30e6 * 0.7 * 1.1 / 1e6],
    "What does a training step hold": [18 * P8],
    "How many training FLOPs per token": [6 * (P8 - 128256 * 4096)],
    "What does full recomputation cost": [8 / 6],
    "Activation bytes of one GPT layer per token in": [34 * 12288],
    "Logits of 8,192 tokens": [8192 * 128256 * 4],
    "How large is a 70B model in 16, 8": [2 * P70, P70, P70 / 2],
    "How large is Adam's state for a 7B": [7e9 * 8, 7e9 * 2],
    "A 13B model on one 80 GB card": [18 * 13e9, 2 * 13e9],
    "What share of the step is bubble": [3 / 11],
    "What does interleaving with v chunks": [7 / 15, 7 / 39],
    "How many microbatches keep the bubble": [next(m for m in range(1, 99) if 7 / (m + 7) <= 0.25)],
    "How many bytes move in a pipeline step": [2 * 7 * 64 * 4096 * 4096 * 2],
    "Stages are uneven": [3 + 1.5 + 7 * 1.5, 4.5 / 4 * (4 + 7)],
    "When do you choose pipeline over tensor": [next(m for m in range(1, 999) if 15 / (m + 15) <= 0.1)],
    "16 stages, 16 microbatches: what do 8 chunks": [15 / 31, 15 / (128 + 15)],
    "States of a 70B model at 18": [18 * P70, 18 * P70 / 64],
    "Days for 1 trillion tokens of a 7B": [6 * 7e9 * 1e12 / (64 * H100 * 0.4) / 86400],
    "A pipeline of 16 stages, 2 microbatches": [15 / 47, 15 / (4 * 32 + 15)],
    "Fine-tune 70B fully on 8": [18 * P70, 8 * 80e9],
    "Tensor parallelism over 8 GPUs in one node": [LINK / PORT],
    "A 70B model, 64 GPUs, TP 8, PP 2": [2 * P70 / 16, 2 * P70, (2 * 63 / 64) / (2 * 3 / 4 / 16)],
    "How many bits per weight does int4": [(128 * 4 + 16) / 128],
    "What does 4-bit weight-only": [16 / 4.5],
    "How many parameters does LoRA": [16 * 4096 * 2, 16 * 2 / 4096],
    "What does LoRA save in training memory": [16 * 7e9, 18 * 7e9],
    "How large is a 70B base in NF4": [4.5, 70e9 * 4.5 / 8],
    "200 requests per second of 300": [60000 / 2800],
    "How long does a replica of 70B": [2 * P70 / 2e9],
    "40 requests per second arrive": [15 * 130, 15 * 130 / 10],
    "When does splitting prefill": [2000 * KV70, 2000 * KV70 / PORT * 1e3],
    "What does a million output tokens": [16 / 3600 / 3500 * 1e6],
    "3B weights in 4.5 bits": [3e9 * 4.5 / 8, 60e9 / (3e9 * 4.5 / 8)],
    "What is the acceptance rate": [1 - (0.2 + 0.2) / 2],
    "Tokens per pass with acceptance": [accepted(0.8, 4)],
    "Speedup with acceptance 0.8": [accepted(0.8, 4), accepted(0.8, 4) / 1.2],
    "Which K is best for acceptance 0.6": [max(range(1, 20), key=lambda k: accepted(0.6, k) / (1 + 0.1 * k))],
    "Why does speculation slow down": [accepted(0.7, 4) / (5 + 0.4)],
    "Bytes per rank of those collectives": [4 * 32 * 2 * 7 / 8 * 8192 * 4096 * 2],
    "Gathering logits for 8,192": [7 / 8 * 8192 * 128256 * 4],
    "How many all-reduces does a decode step": [2 * 80, 32 * 8192 * 2],
}  # fmt: skip
POWERS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def numbers(text):
    """Those of an answer, with their prefix or per cent."""
    pattern = r"(\d[\d,]*(?:\.\d+)?)(e\d+)?(?: ?([kMGTP])(?=B|FLOP)| ?(%))?"
    return [
        float(digits.replace(",", "") + exponent) * POWERS.get(prefix, 0.01 if percent else 1)
        for digits, exponent, prefix, percent in re.findall(pattern, text)
    ]


@pytest.mark.parametrize("start", AGAIN)
def test_a_card_says_what_another_computation_gives(start):
    cards = [card for card in deck.deck() if card.question.startswith(start)]
    assert len(cards) == 1, start
    said = numbers(cards[0].answer)
    for expected in AGAIN[start]:
        printed = 0.005 if 0.1 <= expected < 1 else 0.0  # whole per cent
        near = [value for value in said if abs(value - expected) <= max(printed, 0.02 * abs(expected))]
        assert near, f"{expected:.5g} is not in {cards[0].answer!r}"


def test_that_is_many_numbers():
    assert sum(map(len, AGAIN.values())) >= 120
