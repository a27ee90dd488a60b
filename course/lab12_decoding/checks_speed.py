"""Lab 12, bytes and seconds: the cache, what a decode step reads and computes, the two latencies that a user feels.

Bytes are counted on a real forward pass, by operation (`labkit/traffic.py`); FLOPs by torch's counter. Latencies are
compared with the engine's own, on a clock that the check moves.
"""

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import torch

from course.lab12_decoding.decoders import Cache
from course.lab12_decoding.traffic import Traffic
from course.shared.measuring import count_flops, one_thread
from minillm.labkit.answers import answers_of
from minillm.labkit.exercises import CheckFailed, exercise
from minillm.labkit.receipts import Receipt, Row, receipt, row
from minillm.model import ModelConfig, Transformer
from minillm.model.generate import KVCache
from minillm.predict.model import kv_bytes_per_token, matmul_parameters
from minillm.serve import LLM, SamplingParams

ANSWERS = answers_of("12_decoding")


Log = list[tuple[float, str, str]]


# What the cache weighs.


@exercise(
    "kv-bytes",
    minutes=5,
    difficulty=1,
    hints=(
        "How many tokens are in the cache (you have just counted them)? What is kept of one, and in how many layers?",
        "A key and a value for every kv head of every layer, each head_dim numbers. The last token was never put in.",
        "(prompt + answer - 1) * 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize",
    ),
)
@one_thread()
def check_kv_bytes(learner: Any) -> list[Row]:
    rows: list[Row] = []
    kinds = {"multi-head": 8, "grouped-query": 2, "multi-query": 1}
    for (name, kv_heads), dtype in zip(kinds.items(), (torch.float32, torch.bfloat16, torch.float64), strict=True):
        layers, d = random.choice((3, 5)), 2 * random.randint(2, 6)
        config = ModelConfig(61, 32, 48, layers, 8, kv_heads, d, max_seq_len=64)
        prompt, answer = random.randint(3, 12), random.randint(3, 8)
        cache, model = Cache(config, 40, ANSWERS.attend, dtype), Transformer(config, dtype=dtype)
        with torch.no_grad():
            ANSWERS.generate(model, list(range(prompt)), answer, cache)
        found = learner(config, prompt, answer, dtype.itemsize)
        if not _number(found):
            raise CheckFailed(f"you returned {found!r}; asked for is a number of bytes")
        rows.append(row(f"{name}, {8 // kv_heads} query heads to a kv head: your prediction", found, cache.bytes, "B"))
        if rows[-1].verdict == "off":
            raise CheckFailed(_say_bytes(found, cache, config, dtype.itemsize), rows)
    return rows


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _say_bytes(found: Any, cache: Cache, config: ModelConfig, itemsize: int) -> str:
    said = f"the cache holds {cache.bytes:,} bytes, you predict {found!r}"
    token = cache.bytes // cache.entries
    known = {
        (cache.entries + 1) * token: ": one entry too many. The token drawn last never goes through the model",
        cache.bytes * config.num_heads // config.num_kv_heads: ": query heads counted, but only kv heads are kept",
        cache.bytes // 2: ": keys or values, but both are kept",
        cache.bytes * 2: ": twice as much. Keys and values are the factor 2; there is no other",
        cache.bytes // config.num_layers: ": one layer's. Every layer keeps its own",
        cache.bytes // itemsize: ": numbers, not bytes",
    }
    return said + known.get(found, "")


# Bytes and FLOPs of a step.


@exercise(
    "decode-step",
    minutes=10,
    difficulty=2,
    hints=(
        "Which bytes do the sequences of a batch share, and which does each have for itself?",
        "Every weight is read once per step, however many sequences use it; every sequence reads its own cache. A "
        "weight multiplies and adds once per sequence. The step takes as long as the slower of the two.",
        "read = weights * itemsize + batch * context * kv_bytes; flops = 2 * weights * batch; "
        "seconds = max(read / bandwidth, flops / peak_flops); batch tokens come out of it.",
    ),
)
@one_thread()
def check_decode_step(learner: Callable) -> Receipt:
    rows: list[Row] = []
    peak, bandwidth = random.uniform(50e9, 90e9), random.uniform(8e9, 15e9)
    for batch, context, kv_heads in ((1, 9, 4), (3, 300, 4), (64, 5, 1)):
        config = ModelConfig(256, 128, 384, 2, 4, kv_heads, max_seq_len=512, tie_embeddings=True)
        weights, kv = matmul_parameters(config), kv_bytes_per_token(config, 4)
        found = learner(weights, kv, batch, context, 4, peak, bandwidth)
        if not isinstance(found, tuple | list) or len(found) != 3 or not all(map(_number, found)):
            raise CheckFailed("asked for are three numbers: (bytes read, FLOPs, tokens per second)")
        read, flops = one_step(config, batch, context)
        right = ANSWERS.decode_step(weights, kv, batch, context, 4, peak, bandwidth)
        who = f"batch {batch}, context {context}"
        rows += [
            row(f"{who}: bytes read", found[0], read, "B", tolerance=0.02),
            row("    FLOPs with the weights", found[1], flops),
            row("    tokens per second at most", right[2], found[2], "tok/s", tolerance=1e-6),
        ]
        if any(each.verdict == "off" for each in rows[-3:]):
            said = _say_step(found, right, (weights, kv, batch, context, 4, peak, bandwidth))
            raise CheckFailed(f"{who}: {said}", rows)
    return receipt("a decode step, counted on a real one", rows)


def one_step(config: ModelConfig, batch: int, context: int) -> tuple[int, int]:
    """(bytes of weights and cache read, FLOPs with the weights) of a decode step at the last place of `context`."""
    model = Transformer(config)
    cache = KVCache(config, context, batch=batch)
    cache.keys.zero_(), cache.values.zero_()
    tokens, positions = torch.zeros(batch, 1, dtype=torch.long), torch.tensor([context - 1])
    with torch.no_grad():
        with Traffic(weights=model.parameters(), cache=(cache.keys, cache.values)) as traffic:
            model(tokens, positions, attention=cache)
        flops = count_flops(lambda: model(tokens, positions, attention=lambda q, k, v, **_: q))
    return traffic.read.total(), flops


def _say_step(found: tuple, right: tuple, case: tuple) -> str:
    weights, kv, batch, context, itemsize, peak, bandwidth = case
    shared, own = weights * itemsize, context * kv
    for what, mine, due, known in (
        (
            "bytes",
            found[0],
            right[0],
            {
                2 * shared + batch * own: "a weight is read once; the factor 2 belongs to FLOPs (multiply and add)",
                2 * (shared + batch * own): "everything is read once; the factor 2 belongs to FLOPs (multiply and add)",
                batch * (shared + own): "the weights are read once per step, for all sequences together",
                shared: "the cache is missing: every sequence reads its own keys and values",
                shared + own: "one sequence's cache; each of the batch reads its own",
                shared + batch * kv: "each sequence reads its whole context, not one token",
                shared / itemsize + batch * own: "numbers, not bytes",
            },
        ),
        (
            "FLOPs",
            found[1],
            right[1],
            {
                weights * batch: "a multiplication and an addition per weight: two FLOPs",
                2 * weights: "of one sequence; the batch does as many each",
                6 * weights * batch: "6 is training; forward alone is 2",
            },
        ),
    ):
        if not math.isclose(mine, due, rel_tol=1e-9):
            said = next(
                (said for wrong, said in known.items() if math.isclose(mine, wrong, rel_tol=1e-9)), "see the row"
            )
            return f"{what}: you predict {mine:,.0f}, it is {due:,.0f}: {said}"
    read, flops = right[0] / bandwidth, right[1] / peak
    known = {
        1 / max(read, flops): "that is one sequence's; a step gives a token to each of the batch",
        batch / (read + flops): "reading and computing overlap: the slower of the two, not their sum",
        batch / min(read, flops): "the slower of the two decides, not the faster",
        batch / read: "computing takes longer here, so memory is not the bound",
        batch / flops: "reading takes longer here, so compute is not the bound",
    }
    said = next((said for wrong, said in known.items() if math.isclose(found[2], wrong, rel_tol=1e-9)), "see the row")
    return f"tokens per second: {said}"


# Latencies.


@exercise(
    "ttft-and-tpot",
    minutes=10,
    difficulty=1,
    hints=(
        "What does the user wait for first, and from when on? And how many gaps lie between n tokens?",
        "TTFT: first token minus arrival, the queue included. TPOT: from the first token to the last, over the n - 1 "
        "gaps between them; a single token has none.",
        "For each request: at = its token times; (at[0] - arrived, (at[-1] - at[0]) / (len(at) - 1) if len(at) > 1 "
        "else None).",
    ),
)
@one_thread()
def check_latencies(learner: Callable) -> Receipt:
    log, timings = served()
    found = learner(list(log))
    if not isinstance(found, dict) or set(found) != set(timings):
        raise CheckFailed(f"asked for is a dict with a pair for each of {sorted(timings)}")
    rows: list[Row] = []
    for request, (ttft, tpot) in timings.items():
        pair = found[request]
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise CheckFailed(f"{request}: you returned {pair!r}; asked for is (TTFT, TPOT)")
        rows += [
            row(f"{request}: TTFT, the engine's and yours", ttft, pair[0], "s", 1e-9),
            row("    TPOT", "none" if tpot is None else tpot, "none" if pair[1] is None else pair[1], "s", 1e-9),
        ]
        if any(each.verdict == "off" for each in rows[-2:]):
            raise CheckFailed(f"{request}: {_say_latency(request, pair, (ttft, tpot), log)}", rows)
    return receipt("a log of the engine", rows)


def served() -> tuple[Log, dict[str, tuple[float, float | None]]]:
    """A log of minillm's engine and its own latencies. Two run at a time, so others wait; the clock moves by steps."""
    now = [random.uniform(5, 50)]
    model = Transformer(ModelConfig(61, 16, 32, 1, 2, max_seq_len=64))
    engine, log, timings, answers = LLM(model, clock=lambda: now[0], max_num_seqs=2), [], {}, [6, 1, 4, 2, 3]
    while answers or engine.unfinished:
        for answer in answers[:2]:
            prompt = [random.randrange(61) for _ in range(random.randint(2, 7))]
            name = f"request {6 - len(answers)}"
            answers = answers[1:]
            engine.add(prompt, SamplingParams(max_tokens=answer, ignore_eos=True), request_id=name)
            log.append((now[0], name, "arrived"))
            now[0] += random.uniform(0.001, 0.01)
        now[0] += random.uniform(0.02, 0.2)
        for output in engine.step():
            timings[output.request_id] = (output.timing.ttft, output.timing.tpot(len(output.answers[0].tokens)))
        # prompts are short, so whoever took part in the step has one token more
        log += [(now[0], name.split("/")[0], "token") for name, _, _ in engine.records[-1].batch]
    return log, dict(sorted(timings.items()))


def _say_latency(request: str, found: tuple, right: tuple, log: Log) -> str:
    arrived = next(at for at, who, event in log if who == request and event == "arrived")
    at = [when for when, who, event in log if who == request and event == "token"]
    began = max([when for when, _, _ in log if when < at[0]], default=arrived)
    if found[0] is None or not math.isclose(found[0], right[0], rel_tol=1e-9):
        known = {
            at[-1] - arrived: "that is the whole request; TTFT ends with the first token",
            at[0]: "that is a time on the clock, not a wait: subtract the arrival",
            at[0] - log[0][0]: "counted from the first line of the log, not from this request's arrival",
            at[0] - began: "the wait in the queue counts: the user does not see when the prefill starts",
        }
        said = next((said for wrong, said in known.items() if found[0] and math.isclose(found[0], wrong)), "")
        return f"TTFT is {found[0]}, the engine says {right[0]:.4f}: {said or 'from arrival to the first token'}"
    if right[1] is None:
        return f"TPOT is {found[1]}, but a single token has no time per further token: None"
    known = {
        (at[-1] - at[0]) / len(at): f"{len(at)} tokens have {len(at) - 1} gaps between them",
        (at[-1] - arrived) / len(at): "the time to the first token is in it; TPOT is what comes after",
        (at[-1] - arrived) / (len(at) - 1): "it is counted from the arrival; TPOT begins with the first token",
        at[-1] - at[0]: "that is the whole time of decoding; per token is asked for",
        max(b - a for a, b in itertools.pairwise(at)): "that is the longest gap; TPOT is the mean",
    }
    said = next((said for wrong, said in known.items() if found[1] and math.isclose(found[1], wrong)), "see the row")
    return f"TPOT is {found[1]}, the engine says {right[1]:.4f}: {said}"
