"""Numbers of lab 21's model answers, computed a second time; tables as in answer_tables_training.py.

A node of 8 H100 that serves is written down once more here in one page, from the sentences of the lab: a decode step
reads the rank's weights and caches or computes, whichever takes longer, and waits for two all-reduces per layer.
"""

import math
from dataclasses import dataclass, replace

from card_formulas import drafted, mean_wait, tail
from card_tables_serving import LORA8, best_k

GIB = 2**30
USABLE = (80 - 3) * 0.95 * GIB  # of an H100: 3 GiB reserved, 5 % lost
PEAK, MEMORY, LINK = 989e12, 3.35e12, 0.8 * 450e9  # NVIDIA's data sheet; 80 % of the link for collectives
WIDE, HALF, ATTENTION = 0.59, 82, 0.45  # the planner's fit: shares of the peak, and the width with half of the rate
SMALL = 5 * 2.5e-6  # seconds of a layer's small kernels in a decode step


@dataclass(frozen=True)
class Model:
    parameters: float
    layers: int
    hidden: int
    kv_bytes: int


EIGHT = Model(32 * (2 * 4096 * 5120 + 3 * 4096 * 14336) + 2 * 128256 * 4096, 32, 4096, 2 * 32 * 8 * 128 * 2)
SEVENTY = Model(80 * (2 * 8192 * 9216 + 3 * 8192 * 28672) + 2 * 128256 * 8192, 80, 8192, 2 * 80 * 8 * 128 * 2)


@dataclass(frozen=True)
class Replica:
    """tp · pp cards of a node of 8; prompts and answers of so many tokens."""

    model: Model
    tp: int
    pp: int
    prompt: int
    output: int

    def rate(self) -> float:
        width = self.model.hidden / self.tp
        return PEAK * WIDE * width / (width + HALF)

    def all_reduce(self, size: float) -> float:
        if self.tp == 1:
            return 0.0
        ring = 2 * (self.tp - 1) * (8e-6 + size / self.tp / LINK)
        return min(ring, 8e-6 + (self.tp - 1) * size / LINK)

    def first(self) -> float:
        its = self.model
        products = 2 * its.parameters * self.prompt / self.tp / self.rate()
        pairs = self.prompt * (self.prompt + 1) / 2
        attention = its.layers * 4 * its.hidden * pairs / (self.tp * PEAK * ATTENTION)
        weights = 2 * its.parameters / self.tp / MEMORY
        waits = 2 * its.layers * self.all_reduce(2 * self.prompt * its.hidden)
        return max(products + attention, weights) + waits

    def held(self) -> float:
        """Bytes of a sequence on one card, half of its answer written."""
        return (self.prompt + self.output / 2) * self.model.kv_bytes / self.pp / self.tp

    def room(self) -> float:
        return USABLE - 2 * self.model.parameters / self.tp / self.pp

    def gap(self, group: int) -> float:
        """Seconds between two tokens, with so many sequences in each of pp groups."""
        its = self.model
        read = (2 * its.parameters / self.tp / self.pp + group * self.held()) / MEMORY
        compute = 2 * its.parameters * group / self.tp / self.pp / self.rate()
        waits = its.layers / self.pp * (2 * self.all_reduce(2 * group * its.hidden) + SMALL)
        return self.pp * (max(read, compute) + waits) + group * self.first() / self.output

    def most(self, limit: float = math.inf) -> int:
        group = 0
        while (group + 1) * self.pp * self.held() <= self.room() and self.gap(group + 1) <= limit:
            group += 1
        return group

    def node_speed(self, group: int) -> float:
        return 8 / self.tp / self.pp * self.pp * group / self.gap(group) if group else 0.0


def best(model: Model, prompt: int, output: int, limit: float = math.inf) -> Replica:
    """The fastest of all ways to cut a node."""
    ways = [(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) if tp * pp <= 8]
    replicas = [Replica(model, tp, pp, prompt, output) for tp, pp in ways]
    return max((each for each in replicas if each.room() > 0), key=lambda each: each.node_speed(each.most(limit)))


def until(tokens: int) -> float:
    return Replica(EIGHT, 1, 1, tokens, 1).first()


def of_queue(places: int, load: float) -> tuple[float, float]:
    """(p99 of those let in, share refused) of a server with so many places before it."""
    shares = [load**k for k in range(places + 2)]
    refused = shares[-1] / sum(shares)
    inside = [share / sum(shares[:-1]) for share in shares[:-1]]

    def exceeds(t: float) -> float:
        terms = [math.exp(-t) * t**i / math.factorial(i) for i in range(places + 1)]
        return sum(inside[k] * sum(terms[:k]) for k in range(1, places + 1))

    return next(t / 100 for t in range(10_000) if exceeds(t / 100) <= 0.01), refused


def regular_wait(load: float) -> float:
    """Of evenly spaced arrivals: an arrival finds k before it with share (1 - s) s^k, where s = e^(-(1 - s)/load)."""
    s = 0.5
    for _ in range(500):
        s = math.exp(-(1 - s) / load)
    return s / (1 - s)


def chat_gpus(prompt: int, output: int) -> int:
    """For 200 requests per second with a fifth of headroom, whole nodes."""
    way = best(SEVENTY, prompt, output, 0.05)
    return 8 * math.ceil(200 * output / way.node_speed(way.most(0.05)) / 0.8)


CHAT = best(SEVENTY, 1000, 300, 0.05)
SERVED = CHAT.most(0.05)
SPEED = CHAT.node_speed(SERVED)
BOUGHT = chat_gpus(1000, 300) // CHAT.tp
RUNNING = next(n for n in range(1, 200) if BOUGHT * n >= 60000 * CHAT.gap(n))
NARROW = Replica(SEVENTY, 2, 1, 1000, 300)
NIGHT, QUICK = best(SEVENTY, 500, 500), best(SEVENTY, 500, 500, 0.02)
EIGHT_BIT = replace(NIGHT, model=replace(SEVENTY, kv_bytes=SEVENTY.kv_bytes // 2))
TWICE = EIGHT_BIT.node_speed(EIGHT_BIT.most())
NIGHT_SPEED = NIGHT.node_speed(NIGHT.most())
QUICK_SPEED = QUICK.node_speed(QUICK.most(0.02))
ROOM24 = (24 - 3) * 0.95 * GIB - 2 * EIGHT.parameters
LONG = Replica(SEVENTY, 8, 1, 32000, 500)
SCORES = 80 * 4 * 8192 * 16000 * 32000
PROMPT = 2 * SEVENTY.parameters * 32000 + SCORES
# three quarters cached: a quarter of the products, and the pairs of the last quarter's queries
AFTER = LONG.first() * ((1 - SCORES / PROMPT) / 4 + SCORES / PROMPT * (1 - 0.75**2))
LOAD = 2 * SEVENTY.parameters / 2e9
SPLIT = Replica(SEVENTY, 8, 1, 2000, 300)
MOVED = 2000 * SEVENTY.kv_bytes
RATE8 = PEAK * WIDE * 4096 / (4096 + HALF)
BOUNDED = of_queue(10, 0.85)

COMPUTED = {
    "chat_70b": {
        "demand": 200 * 300, "layout": (CHAT.tp, CHAT.pp), "node": SPEED, "gpus": 8 * math.ceil(60000 / SPEED / 0.8),
        "inside": 200 * (CHAT.first() + 300 * CHAT.gap(SERVED)), "weights": 2 * SEVENTY.parameters / CHAT.tp,
        "cache": SERVED * CHAT.held(), "sequences": SERVED, "ttft": 1e3 * CHAT.first(), "tpot": 1e3 * CHAT.gap(SERVED),
        "kv": SEVENTY.kv_bytes, "single": 2 * MEMORY / (2 * SEVENTY.parameters),
        "running": RUNNING, "calm": 1e3 * CHAT.gap(RUNNING), "planned": 200 * (CHAT.first() + 300 * CHAT.gap(RUNNING)),
        "narrow": NARROW.node_speed(NARROW.most(0.05)),
        "prompts": chat_gpus(2000, 300), "answers": chat_gpus(1000, 600),
    },
    "eight_on_24gb": {
        "weights": 2 * EIGHT.parameters, "room": ROOM24, "tokens": ROOM24 / EIGHT.kv_bytes,
        "sequences": ROOM24 // EIGHT.kv_bytes // 4096, "long": ROOM24 // EIGHT.kv_bytes // 8192, "kv": EIGHT.kv_bytes,
        "four": (ROOM24 + (2 - 4.5 / 8) * EIGHT.parameters) / EIGHT.kv_bytes, "single": 2e3 * EIGHT.parameters / 300e9,
        "single4": 4.5 / 8 * 1e3 * EIGHT.parameters / 300e9,
    },
    "rag_32k": {
        "cached": 32000 * SEVENTY.kv_bytes, "flops": PROMPT, "ttft": LONG.first(), "share": SCORES / PROMPT,
        "sequences": LONG.most(), "after": AFTER,
    },
    "offline_batch": {
        "twice": TWICE, "gain": TWICE / NIGHT_SPEED - 1,
        "layout": (NIGHT.tp, NIGHT.pp, NIGHT.pp * NIGHT.most()), "speed": NIGHT_SPEED,
        "hours": 1e9 / NIGHT_SPEED / 3600,        "price": 16 * 1e6 / NIGHT_SPEED / 3600,
        "quick": QUICK_SPEED, "ratio": NIGHT_SPEED / QUICK_SPEED,
        "tpot": 1e3 * NIGHT.gap(NIGHT.most()), "nodes": math.ceil(1e9 / NIGHT_SPEED / 36000),
    },
    "many_adapters": {
        "copies": 1000 * 2 * EIGHT.parameters, "adapter": 2 * LORA8, "all": 2000 * LORA8,
        "share": LORA8 / EIGHT.parameters, "load": 2e3 * LORA8 / 25e9, "hot": EIGHT.parameters / LORA8,
    },
    "at_the_edge": {
        "size": 3e9 * 4.5 / 8, "speed": 60e9 / (3e9 * 4.5 / 8), "wide": 60e9 / 6e9, "prefill": 1000 * 6e9 / 30e12,
        "naive": 30e12 / 6e9,
    },
    "tail_at_85": {
        "half": tail(0.5, 0.01), "high": tail(0.85, 0.01), "higher": tail(0.95, 0.01), "mean": mean_wait(0.85),
        "sixty": tail(0.6, 0.01), "seventy_five": tail(0.75, 0.01), "three": 2 * 0.85 / 3, "bounded": BOUNDED[0],
        "rejected": BOUNDED[1], "regular": regular_wait(0.85),
    },
    "bursts": {
        "load": LOAD, "start": 60 + LOAD, "backlog": 15 * (60 + LOAD), "drain": 15 * (60 + LOAD) / (50 - 40),
        "peer": 2 * SEVENTY.parameters / 25e9, "load80": 40 / 50,
    },
    "blocked_by_a_prompt": {
        "whole": until(32000), "chunk": 1e3 * until(2048), "last": 1e3 * (until(15 * 2048) - until(14 * 2048)),
        "chunks": 15, "fits_first": max(n for n in range(64, 4096, 64) if until(n) <= 0.05),
        "fits_last": max(n for n in range(64, 4096, 64) if until(32000) - until(32000 - n) <= 0.05),
    },
    "does_speculation_pay": {
        "alone": drafted(0.7, 4) / 1.4, "tokens": drafted(0.7, 4), "ridge": WIDE * PEAK / MEMORY, "peak": PEAK / MEMORY,
        "full": drafted(0.7, 4) / 5.4, "best": best_k(0.7, 0.1), "batch": WIDE * PEAK / MEMORY / 5,
    },
    "does_quantization_pay": {
        "one": 16 / 4.5, "many": 1.0, "weights": EIGHT.parameters * 4.5 / 8, "wide": 2 * EIGHT.parameters,
        "end": RATE8 / MEMORY, "cross": RATE8 / MEMORY * 4.5 / 16,
    },
    "split_prefill_decode": {
        "moved": MOVED, "efficiency": 0.8, "one": 1e3 * MOVED / (0.8 * 50e9), "eight": 1e3 * MOVED / (8 * 0.8 * 50e9),
        "ttft": 1e3 * SPLIT.first(), "share": MOVED / (8 * 0.8 * 50e9) / SPLIT.first(),
    },
}  # fmt: skip

LITERAL = {
    "chat_70b": [0.8, 60, 80, 0.9, 2 * 70e9, 300 * 0.05, 8],
    "eight_on_24gb": [4.5, 8192, 2 * 8e9, 24, 2, 8, 32, (24 - 3) * 0.95 * 1e9],
    "rag_32k": [64, 80, 2, 128, SEVENTY.kv_bytes],
    "offline_batch": [20],
    "many_adapters": [32, 7, 2, 1024, 16],
    "at_the_edge": [1000, 30, 32, 4.5 / 8],
    "tail_at_85": [99, 0.95, 0.6, 0.75, 1, 1 - 0.85, 0.01],
    "bursts": [25e9, 2 * 25, 429, 2, 2 * SEVENTY.parameters],
    "blocked_by_a_prompt": [2048, 50, 2, 32000 / 2],
    "does_speculation_pay": [1 + 4 * 0.1, 4 * 0.1, 1, 0.1, 2],
    "does_quantization_pay": [4, 16],
    "split_prefill_decode": [64, 8, SEVENTY.kv_bytes],
}
