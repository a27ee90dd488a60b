"""minillm's serving engine against transformers: the same weights, requests and greedy tokens.

    uniform, skewed        all answers equally long; few long ones among many short ones; all requests come at once
    + shared prefix        every prompt begins with the same 512 tokens
    against                `generate` in static batches of 1, 16 and 32, and the continuous-batching manager; vLLM where
                           it is installed and there is a GPU (what was not compared stands under the table)

Before anything is timed every answer has to be the same on both sides, token by token. Tokens per second count useful
tokens only: those that were asked for. Each side runs each trace on the number of threads that suits it best. Further
rows: tokens per second of each of 1 to 64 streams (16 and 64 against static batches, too), the first token after a
shared prefix with and without the prefix cache, decoding alone against what reading the weights costs at the measured
memory bandwidth, a queue of 1,000 requests, and the scheduler without a model.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from minillm.bench import decode, scheduler
from minillm.bench.harness import BenchRow, Comparison, bench_row, check_repeats, side_by_side
from minillm.bench.load import Arrival, skewed, uniform
from minillm.bench.serve_installed import installed, missing
from minillm.bench.serve_peers import Continuous, Limits, Ours, Served, Static, timed, twin
from minillm.data import Tokenizer, corpus, tokenize
from minillm.measure import machine
from minillm.model import Transformer, load_hf
from minillm.model.generate import folder_of
from minillm.predict.model import kv_bytes_per_token

CONTEXT, PREFIX = 1024, 512
STREAMS = (1, 2, 4, 8, 16, 32, 64)
BATCHES = (16, 64)  # of static batches that are compared with equally many streams
TIE = 1e-3  # logits that differ by less may come in either order: float32 sums in another order
METRICS: dict[str, tuple[str, float, Callable[[Served], float]]] = {  # what -> unit, scale, value
    "useful tokens": ("tokens/s", 1.0, lambda served: served.tokens_per_s),
    "TTFT p50": ("ms", 1e3, lambda served: served.ttft.p50),
    "TTFT p99": ("ms", 1e3, lambda served: served.ttft.p99),
    "TPOT p50": ("ms", 1e3, lambda served: served.tpot.p50),
    "TPOT p99": ("ms", 1e3, lambda served: served.tpot.p99),
}


def run(
    requests: int = 80, queued: int = 1000, repeats: int = 5, device: str | None = None, model: str | None = None
) -> list[BenchRow]:
    """All rows for the committed target model in float32. requests: of a trace, 2 in 5 of them with a prefix.

    model: another one, whose decoding is compared with the roofline and with peers instead (`decode.py`).
    """
    check_repeats(repeats)
    if model is not None:
        return decode.rows(model, repeats, device=device)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    target = load_hf(folder_of("target"), device=device, dtype=torch.float32)
    target.config = replace(target.config, max_seq_len=CONTEXT)
    peer, limits, text = twin(target), Limits(), tokenize(corpus(), Tokenizer.load()).array

    def trace(kind: Callable[..., list[Arrival]], count: int, longest: int, prefix: int = 0) -> list[Arrival]:
        options = {"prompt_tokens": (prefix + 16, prefix + 48), "shared_prefix": prefix, "text": text}
        return kind(count, max_tokens=longest, **options)

    ours, alone, continuous = Ours(target, limits), Static(peer, 1), Continuous(peer, limits)
    others, rows = [Static(peer, 16), Static(peer, 32), continuous, *installed(target, limits)], []
    for prefix, count, shorter in ((0, requests, 1), (PREFIX, requests * 2 // 5, 2)):
        for name, kind, longest in (("uniform", uniform, 32), ("skewed", skewed, 192)):
            label = name if not prefix else f"{name}, {prefix} tokens shared"
            each = trace(kind, count, longest // shorter, prefix)
            for side in (ours, alone, *others):
                side.threads = best_threads(side, each[: len(each) // (8 if side is alone else 2)])
            for other in others:
                rows += compare(label, ours, other, each, repeats)
            few = each[: len(each) // 8]
            rows += compare(f"{label}, {len(few)} requests", ours, alone, few, repeats)
    rows.append(prefix_row(target, limits, trace(uniform, 9, 1, PREFIX), repeats))
    ours.threads = best_threads(ours, trace(uniform, 1, 64))
    rows.append(roofline_row(ours, trace(uniform, 1, 128), repeats))
    rows += frontier_rows(ours, continuous, lambda streams: trace(uniform, streams, 64), repeats)
    for streams in BATCHES:  # as many run at once on both sides
        static = Static(peer, streams, ours.threads)
        rows += frontier_rows(ours, static, lambda number: trace(uniform, number, 64), repeats, (streams,))
    for side in (ours, continuous):
        side.threads = best_threads(side, trace(skewed, max(1, queued // 20), 64))
    rows.append(queue_row(ours, continuous, trace(skewed, queued, 64)))
    return rows + scheduler.rows(repeats)


def notes() -> list[str]:
    """What stands under the table: the engines that were not compared, and why."""
    return missing()


def compare(label: str, ours: Ours, other, arrivals: Sequence[Arrival], repeats: int = 5) -> list[BenchRow]:
    """One row for each of METRICS, from the same runs. Ratios: times better, whether more or less is."""
    found = side_by_side(
        lambda: same_answers(ours.model, arrivals, timed(ours, arrivals), timed(other, arrivals)),
        lambda: timed(ours, arrivals),
        lambda: timed(other, arrivals),
        repeats,
        warmup=0,  # the check was one
    )
    rows = []
    for what, (unit, scale, value) in METRICS.items():
        pairs = tuple((value(mine), value(theirs)) for mine, theirs in found.pairs)
        faster = what == "useful tokens"
        each = Comparison(found.correct, pairs)
        rows.append(bench_row(f"{label}: {what}", other.title, each, unit, scale, higher_is_better=faster))
    return rows


@torch.no_grad()
def same_answers(model: Transformer, arrivals: Sequence[Arrival], mine: Served, other: Served) -> bool:
    """Whether all tokens are the same, up to a tie of the two likeliest, as the model run anew says."""
    for arrival, a, b in zip(arrivals, mine.answers, other.answers, strict=True):
        if not len(a) == len(b) == arrival.params.max_tokens:
            return False
        at = next((at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if at is not None:
            tokens = torch.tensor([arrival.prompt + a[:at]], device=model.embedding.weight.device)
            logits = model(tokens)[0, -1]
            if float(logits.max() - logits[[a[at], b[at]]].min()) > TIE:
                return False
    return True


def best_threads(side, arrivals: Sequence[Arrival]) -> int:
    """1, or as many as torch takes by itself: the faster, each run twice."""
    seconds = {}
    for threads in {1, torch.get_num_threads()}:
        side.threads = threads
        seconds[threads] = min(timed(side, arrivals).seconds for _ in range(2))
    return min(seconds, key=seconds.get)


def prefix_row(model: Transformer, limits: Limits, arrivals: Sequence[Arrival], repeats: int) -> BenchRow:
    """TTFT of requests that come one by one, after a first one with the same prefix: with and without the cache."""
    sides = [Ours(model, limits, prefix_cache=cached, threads=torch.get_num_threads()) for cached in (True, False)]

    def sample(side: Ours) -> Callable[[], float]:
        return lambda: statistics.median(ttft for _, ttft in side.one_by_one(arrivals)[1:])

    def check() -> bool:
        first, second = ([tokens for tokens, _ in side.one_by_one(arrivals)] for side in sides)
        return first == second

    found = side_by_side(check, *map(sample, sides), repeats, warmup=1)
    return bench_row(f"{PREFIX} tokens shared, in the cache: TTFT", "the same without prefix cache", found, "ms", 1e3)


def roofline_row(ours: Ours, arrivals: Sequence[Arrival], repeats: int) -> BenchRow:
    """One request alone. The bound: weights, and keys and values so far, read once for each token."""
    [arrival] = arrivals
    weight, keys = ours.model.embedding.weight, len(arrival.prompt) + arrival.params.max_tokens / 2
    kv_bytes = kv_bytes_per_token(ours.model.config, weight.element_size()) * keys
    weight_bytes = sum(parameter.nbytes for parameter in ours.model.parameters())
    rate = machine().gpu.memory_bandwidth_bytes_per_s if weight.is_cuda else machine().memory_bandwidth_bytes_per_s
    bound = rate / (weight_bytes + kv_bytes)
    served = [timed(ours, arrivals) for _ in range(1 + repeats)][1:]
    found = Comparison(True, tuple((1 / each.tpot.p50, bound) for each in served))
    peer = f"roofline: all weights and keys read at {rate / 1e9:.1f} GB/s (measured)"
    return bench_row("one request alone: decoding", peer, found, "tokens/s", higher_is_better=True)


def frontier_rows(
    ours: Ours, other, make: Callable[[int], list[Arrival]], repeats: int, streams: Sequence[int] = STREAMS
) -> list[BenchRow]:
    """Tokens/s of each stream while so many run at once: the median of 1 / TPOT. Times the streams, the throughput."""
    rows = []
    for number in streams:
        arrivals = make(number)
        found = side_by_side(
            lambda each=arrivals: same_answers(ours.model, each, timed(ours, each), timed(other, each)),
            lambda each=arrivals: 1 / timed(ours, each).tpot.p50,
            lambda each=arrivals: 1 / timed(other, each).tpot.p50,
            repeats,
            warmup=0,
        )
        name = f"{number} streams at once: tokens/s of each"
        rows.append(bench_row(name, other.title, found, "tokens/s", higher_is_better=True))
    return rows


def queue_row(ours: Ours, other: Continuous, arrivals: Sequence[Arrival]) -> BenchRow:
    """Far more requests than seats, once: every one of them ends with its answer."""
    mine, theirs = timed(ours, arrivals), timed(other, arrivals)
    found = Comparison(same_answers(ours.model, arrivals, mine, theirs), ((mine.tokens_per_s, theirs.tokens_per_s),))
    name = f"{len(arrivals):,} requests queued at once: useful tokens"
    if not found.correct:
        return bench_row(name, other.title, found, "tokens/s")
    ratio = mine.tokens_per_s / theirs.tokens_per_s
    return BenchRow(name, other.title, mine.tokens_per_s, theirs.tokens_per_s, "tokens/s", ratio, None, 1, True)
