"""Lab 12, bytes and seconds: the cache, what a decode step reads and computes, the latencies that users feel.

Bytes are counted on a real forward pass, by operation (`traffic.py`); FLOPs by torch's counter. Latencies are
compared with the engine's own, on a clock that the check moves, and with those of a log made up by hand.
"""

import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from numbers import Real
from typing import Any

import torch

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, Row, receipt, row
from course.lab12_decoding.decoders import Cache
from course.lab12_decoding.traffic import MemoryTraffic
from course.shared.measuring import count_flops, one_thread
from minillm.model import ModelConfig, Transformer
from minillm.model.generate import KVCache
from minillm.predict.model import kv_bytes_per_token, matmul_parameters
from minillm.serve import LLM, SamplingParams

ANSWERS = answers_of("12_decoding")


Log = list[tuple[float, str, str]]


# The size of the cache.


@exercise(
    "kv-bytes",
    minutes=10,
    difficulty=1,
    hints=(
        "How many tokens are in the cache (you have just counted them)? What is kept of one, and in how many layers?",
        "A key and a value for every kv head of every layer, each head_dim numbers. The last token never went in.",
    ),
)
@one_thread()
def check_kv_bytes(learner: Any) -> list[Row]:
    rows, found, wrong = [], [], []
    for kv_heads, dtype in ((8, torch.float32), (2, torch.bfloat16), (1, torch.float64)):
        layers, d = random.choice((3, 5)), 2 * random.randint(2, 6)
        config = ModelConfig(61, 32, 48, layers, 8, kv_heads, d, max_seq_len=64)
        prompt, answer = random.randint(3, 12), random.randint(3, 8)
        cache, model = Cache(config, 40, ANSWERS.attend, dtype), Transformer(config, dtype=dtype)
        with torch.no_grad():
            ANSWERS.generate(model, list(range(prompt)), answer, cache)
        found.append(learner(config, prompt, answer, dtype.itemsize))
        if not _number(found[-1]):
            raise CheckFailed(f"you returned {found[-1]!r}; the exercise asks for a number of bytes")
        rows.append(row(f"8 heads, {kv_heads} kv heads, {dtype}: your prediction", found[-1], cache.bytes, "B"))
        if rows[-1].verdict == "off":
            wrong.append(f"the cache holds {cache.bytes:,} bytes, you predict {found[-1]:,}.")
    if wrong:
        raise CheckFailed(wrong[0], rows, evidence=found)
    return rows


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


# Bytes and FLOPs of a step.


@exercise(
    "decode-step",
    minutes=15,
    difficulty=2,
    hints=(
        "Which bytes do the sequences of a batch share, and which does each have for itself?",
        "Every weight is read once per step, however many sequences use it; every sequence reads its own cache. A "
        "weight multiplies and adds once per sequence. The step takes as long as the slower of the two.",
    ),
)
@one_thread()
def check_decode_step(learner: Callable) -> Receipt:
    rows, evidence = [], []
    cases = [(1, 9, 4, torch.float32), (3, 300, 4, torch.float64), (64, 5, 1, torch.float32)]
    cases.append((random.randint(2, 9), random.randint(20, 90), 2, torch.bfloat16))
    for batch, context, kv_heads, dtype in cases:
        peak, bandwidth = random.uniform(50e9, 90e9), random.uniform(8e9, 15e9)
        config = ModelConfig(256, 128, 384, 2, 4, kv_heads, max_seq_len=512, tie_embeddings=True)
        weights, kv = matmul_parameters(config), kv_bytes_per_token(config, dtype.itemsize)
        found = learner(weights, kv, batch, context, dtype.itemsize, peak, bandwidth)
        if not isinstance(found, tuple | list) or len(found) != 3 or not all(map(_number, found)):
            raise CheckFailed("the exercise asks for a tuple or list of three: (bytes read, FLOPs, tokens per second)")
        evidence.append(list(found))
        read, flops = one_step(config, batch, context, dtype)
        most = ANSWERS.decode_step(weights, kv, batch, context, dtype.itemsize, peak, bandwidth)[2]
        rows += [
            row(f"batch {batch}, context {context}, {dtype}: bytes read", found[0], read, "B", tolerance=0.02),
            row("    FLOPs with the weights", found[1], flops),
            row("    tokens per second at most", most, found[2], "tok/s", tolerance=1e-6),
        ]
    for place, each in enumerate(rows):
        if each.verdict == "off":
            case, what = rows[place - place % 3].name.partition(":")[0], each.name.strip().rpartition(": ")[2]
            right, mine = (each.measured, each.predicted) if place % 3 < 2 else (each.predicted, each.measured)
            raise CheckFailed(f"{case}: {what}: you say {mine:,.7g}, but it is {right:,.7g}.", rows, evidence=evidence)
    return receipt("a decode step, counted on a real one", rows)


def one_step(config: ModelConfig, batch: int, context: int, dtype: torch.dtype = torch.float32) -> tuple[int, int]:
    """(bytes of weights and cache read, FLOPs with the weights) of a decode step at the last place of `context`."""
    model = Transformer(config, dtype=dtype)
    cache = KVCache(config, context, batch=batch, dtype=dtype)
    cache.keys.zero_(), cache.values.zero_()
    tokens, positions = torch.zeros(batch, 1, dtype=torch.long), torch.tensor([context - 1])
    with torch.no_grad():
        with MemoryTraffic(weights=model.parameters(), cache=(cache.keys, cache.values)) as traffic:
            model(tokens, positions, attention=cache)
        flops = count_flops(lambda: model(tokens, positions, attention=lambda q, k, v, **_: q))
    return traffic.read.total(), flops


# Latencies.


@exercise(
    "ttft-and-tpot",
    minutes=15,
    difficulty=1,
    hints=(
        "What does the user wait for first, and from when on? And how many gaps lie between n tokens?",
        "TTFT: first token minus arrival, the queue included. TPOT: from the first token to the last, over the n - 1 "
        "gaps between them; a single token has none.",
    ),
)
@one_thread()
def check_latencies(learner: Callable) -> Receipt:
    first, second = served(), served([random.randint(2, 5) for _ in range(random.randint(6, 8))] + [1])
    rows = [each for log in (first, second, several_at_once()) for each in _judge_latencies(learner, *log)]
    return receipt("two logs of the engine, and one with several tokens per pass", rows)


def _judge_latencies(learner: Callable, log: Log, timings: dict) -> list[Row]:
    found = learner(list(log))
    if not isinstance(found, dict) or set(found) != set(timings):
        raise CheckFailed(f"the exercise asks for a dict with a pair for each of {sorted(timings)}")
    rows, wrong = [], []
    for request, (ttft, tpot) in timings.items():
        pair = found[request]
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise CheckFailed(f"{request}: you returned {pair!r}; the exercise asks for (TTFT, TPOT)")
        for what, mine, due in (("TTFT", pair[0], ttft), ("TPOT", pair[1], tpot)):
            if isinstance(mine, str):
                raise CheckFailed(
                    f"{request}: you say {what} {mine!r}, a text; give seconds, or None where there is none"
                )
            mine, due = ("none" if each is None else each for each in (mine, due))
            rows.append(row(f"{request}: {what}, right and yours", due, mine, "s", 1e-9))
            if rows[-1].verdict == "off":
                wrong.append(f"{request}: you say {what} {mine}, but it is {due}.")
    if wrong:
        raise CheckFailed(wrong[0], rows, evidence={name: list(pair) for name, pair in found.items()})
    return rows


def served(answers: Sequence[int] = (6, 1, 4, 2, 3)) -> tuple[Log, dict[str, tuple[float, float | None]]]:
    """A log of minillm's engine and its own latencies. Two run at a time, so others wait; the clock moves by steps."""
    now = [random.uniform(5, 50)]
    model = Transformer(ModelConfig(61, 16, 32, 1, 2, max_seq_len=64))
    engine, log, timings, requests = LLM(model, clock=lambda: now[0], max_num_seqs=2), [], {}, len(answers)
    while answers or engine.unfinished:
        for answer in answers[:2]:
            prompt = [random.randrange(61) for _ in range(random.randint(2, 7))]
            name = f"request {requests + 1 - len(answers)}"
            answers = answers[1:]
            engine.add(prompt, SamplingParams(max_tokens=answer, ignore_eos=True), request_id=name)
            log.append((now[0], name, "arrived"))
            now[0] += random.uniform(0.001, 0.01)
        now[0] += random.uniform(0.02, 0.2)
        for output in engine.step():
            timings[output.request_id] = (output.timing.ttft, output.timing.tpot(len(output.answers[0].tokens)))
        # prompts are short, so every sequence in the step has one token more
        log += [(now[0], name.split("/")[0], "token") for name, _, _ in engine.records[-1].batch]
    return log, dict(sorted(timings.items()))


def several_at_once() -> tuple[Log, dict[str, tuple[float, float]]]:
    """Two requests whose passes yield one token or two, as in lab 15: those come at one time."""
    at = list(accumulate([random.uniform(0.02, 0.3) for _ in range(4)], initial=0.0))
    log = [(at[0], "a", "arrived"), (at[1], "b", "arrived")]
    for when, request, tokens in ((2, "a", 2), (2, "b", 1), (3, "a", 1), (3, "b", 2), (4, "a", 1)):
        log += [(at[when], request, "token")] * tokens
    return log, {"a": (at[2] - at[0], (at[4] - at[2]) / 3), "b": (at[2] - at[1], (at[3] - at[2]) / 2)}
