"""Lab 12's claims and tables, each a function that the notebook calls in one line; CLAIMS need no learner."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from course.kit.answers import answers_of
from course.kit.receipts import Receipt, receipt, row
from course.lab12_decoding import experiments, experiments_breaks, experiments_peers
from course.lab12_decoding import formulas as predict
from course.lab12_decoding.experiments import GPUS, MODELS, WIDE, Point
from course.shared.table import Table, seconds, table
from minillm.model import generate as decoder
from minillm.predict import roofline
from minillm.predict.model import kv_bytes_per_token, parameters

ANSWERS = answers_of("12_decoding")
H100 = GPUS["H100 SXM"]
THESIS_PROMPTS = [("prefill", 1, prompt, 0) for prompt in (64, 256)]


def first_guess(guess: float) -> Table:
    """Tokens per second of a 70B model by batch and context, the reader's guess beside the first."""
    weights, kv = 70e9 * 2, kv_bytes_per_token(MODELS["Llama 3 70B"])
    lines = []
    for place, (batch, context) in enumerate(((1, 0), (8, 0), (64, 0), (64, 4096))):
        limit = predict.decode_tokens_per_s(weights, kv, batch, context, H100.bandwidth)
        lines.append((f"batch {batch}, {context:,} tokens in each cache", None if place else guess, f"{limit:,.1f}"))
    return table("70B in 16 bits at 3.35 TB/s: tokens per second", ("", "your guess", "formula"), lines)


def yours(model: Any, prompt: Sequence[int], answer: Sequence[int], cache: Any) -> Receipt:
    """The learner's loop and attention on the small model, beside minillm's."""
    theirs = list(decoder.generate(model, list(prompt), len(answer)))
    same = sum(a == b for a, b in zip(answer, theirs, strict=True))
    return receipt(
        "yours on the small model",
        [
            row("tokens equal to minillm.model.generate's", len(answer), same),
            row("entries in the cache", predict.kv_entries(len(prompt), len(answer)), cache.entries),
        ],
    )


def cache_weights(kv_bytes: Callable) -> Table:
    """The cache per token and at 4,096 tokens for three real models, by the learner's formula and minillm's."""
    lines = []
    for name, shape in MODELS.items():
        full = replace(shape, num_kv_heads=shape.num_heads)
        lines.append(
            (f"{name}: {shape.num_heads} heads, {shape.num_kv_heads} kv heads", f"{kv_bytes(shape, 1, 1, 2):,}",
             f"{kv_bytes_per_token(shape):,}", f"{kv_bytes_per_token(full):,}", shape.num_heads // shape.num_kv_heads,
             f"{predict.kv_bytes(shape, 4096) / 1e9:.2f} GB")
        )  # fmt: skip
    columns = ("bytes per token, 16 bits", "yours", "formula", "without grouping", "saved, times", "4,096 tokens")
    return table("the cache", columns, lines)


def by_hand(nucleus: Callable, guess_warm: int, guess_cold: int) -> Table:
    """The nucleus of five tokens at two temperatures."""
    five = torch.tensor([0.42, 0.23, 0.17, 0.11, 0.07])
    cold = five**2 / (five**2).sum()
    sums = (f"0.42 + 0.23 + 0.17 = {five[:3].sum():.2f}", f"{cold[0]:.2f} + {cold[1]:.2f} = {cold[:2].sum():.2f}")
    lines = [
        (f"temperature {t}: {text}", guess, int(nucleus(each, 0.8).sum()))
        for t, text, guess, each in zip((1, 0.5), sums, (guess_warm, guess_cold), (five, cold), strict=True)
    ]
    return table("tokens kept at top_p = 0.8", ("", "your guess", "your function"), lines)


def samples(distribution: Callable, model: Any, prompt: Sequence[int]) -> Table:
    """What may follow a prompt, by the sampling parameters, and six samples."""
    tokenizer, lines = experiments.tokenizer(), []
    with torch.no_grad():
        logits = model(torch.tensor([list(prompt)]))[0, -1]
    for setting in ((1.0, None, 1.0), (1.0, None, 0.9), (0.7, None, 0.9), (1.5, None, 0.9), (1.5, 20, 0.9)):
        shares = distribution(logits, *setting)
        generator = torch.Generator().manual_seed(0)
        drawn = torch.multinomial(shares, 6, replacement=True, generator=generator).tolist()
        text = " ".join(repr(tokenizer.decode([token])) for token in drawn)
        lines.append(
            (f"temperature {setting[0]}, top_k {setting[1]}, top_p {setting[2]}", int((shares > 0).sum()), text)
        )
    ending = tokenizer.decode(list(prompt))[-15:]
    return table(
        f"what may follow {ending!r}, of {len(logits):,} tokens", ("", "possible tokens", "six samples"), lines
    )


def two_latencies(latencies: Callable) -> Table:
    """TTFT and TPOT of three prompts on the small model, one after the other."""
    log = []
    for length in (16, 128, 448):
        ids = experiments.windows(1, length)[0].tolist()
        log.append((time.perf_counter(), f"prompt of {length}", "arrived"))
        for _ in decoder.generate(experiments.target(), ids, 12):
            log.append((time.perf_counter(), f"prompt of {length}", "token"))
    lines = [(request, seconds(ttft), seconds(tpot)) for request, (ttft, tpot) in latencies(log).items()]
    return table("the small model on this machine", ("", "TTFT, measured", "TPOT, measured"), lines)


def one_more_token() -> Receipt:
    """FLOPs of the next token with a cache and without: formula and counted."""
    found = []
    for size, ways in experiments.one_more_token().items():
        for way, numbers in ways.items():
            found.append(row(f"{size} tokens, {way}: FLOPs of the next", numbers["predicted"], numbers["flops"]))
        found.append(row("    both ways: logits within 0.001", True, ways["cached"]["apart"] < 1e-3))
    return receipt("the small model, float32", found, show="cached|recomputed")


def whole_answer(prompt: int = 1000, answer: int = 200) -> Table:
    """An answer with and without a cache, by formula."""
    shape = MODELS["Llama 3 8B"]
    kept, again = (predict.answer_flops(shape, prompt, answer, cached=cached) for cached in (True, False))
    lines = [
        ("TFLOP with a cache", kept / 1e12),
        ("TFLOP without", again / 1e12),
        ("    times as many", again / kept),
        ("what the cache holds for it, MB", predict.kv_bytes(shape, predict.kv_entries(prompt, answer)) / 1e6),
    ]
    return table(f"Llama 3 8B, a prompt of {prompt:,} and an answer of {answer}", ("", "formula"), lines)


def under_the_roof(points: Sequence[Point]) -> Table:
    """Five passes of the wide model: intensity, the least time of the roof, and what they took."""
    roof, lines = experiments.roof(), []
    decode, prefill = ([p for p in points if p.kind == kind] for kind in ("decode", "prefill"))
    for point in (decode[0], decode[4], decode[-1], prefill[0], prefill[-1]):
        name = f"decode, batch {point.batch}" if point.kind == "decode" else f"prefill, {point.new} tokens"
        lines.append(
            (name, point.work.intensity, point.work.bound(roof.peak_flops, roof.bandwidth),
             seconds(point.work.seconds(roof.peak_flops, roof.bandwidth)), seconds(point.seconds),
             f"{point.flops_per_s / roof.peak_flops:.1%}", f"{point.work.bytes / point.seconds / roof.bandwidth:.0%}",
             seconds(point.seconds / (point.batch * point.new)))
        )  # fmt: skip
    return table(
        f"one core, {str(roof.dtype).split('.')[1]}, ridge at {roof.ridge:.1f} FLOP/byte",
        ("", "FLOP/byte", "bound", "at least, formula", "measured", "of peak FLOP/s", "of bandwidth", "per token"),
        lines,
    )


def thesis(points: Sequence[Point] | None = None) -> Receipt:
    """What the lab claims, with a verdict: ratios, so that the distance from the roof does not matter."""
    points = points or experiments.points([*[("decode", n, 1, 63) for n in (1, 4)], *THESIS_PROMPTS])
    decode = {p.batch: p.seconds for p in points if p.kind == "decode"}
    prefill = {p.new: p.seconds for p in points if p.kind == "prefill"}
    few, many = decode[4] / decode[1], prefill[256] / prefill[64]
    return receipt(
        "prefill is limited by compute, decode by memory",
        [
            row("decode: a step of 4 takes less than 3 steps of 1", True, few < 3, noisy=True),
            row("    times as long, measured", None, few),
            row("prefill: 256 tokens take 2 to 8 times as long as 64", True, 2 < many < 8, noisy=True),
            row("    times as long, measured", None, many),
        ],
        open_rows=4,
    )


def intensities() -> Table:
    """One layer's product with many tokens and with one, beside the ridge of an H100."""
    return table(
        "a product [tokens, 8192] · [8192, 32768] in 16 bits",
        ("", "FLOP/byte, formula"),
        [
            ("2,048 tokens", roofline.matmul_intensity(2048, 8192, 32768, 2)),
            ("1 token", roofline.matmul_intensity(1, 8192, 32768, 2)),
            ("ridge of an H100 SXM: 989 TFLOP/s over 3.35 TB/s", H100.peak_flops / H100.bandwidth),
        ],
    )


def by_batch(points: Sequence[Point]) -> Table:
    """Tokens per second by batch: at most, by the roof, and measured."""
    decode, roof = [p for p in points if p.kind == "decode"], experiments.roof()
    turn = predict.turning_batch(WIDE, experiments.CONTEXT, roof.peak_flops, roof.bandwidth, roof.dtype.itemsize)
    lines = []
    for p in decode:
        least = p.work.seconds(roof.peak_flops, roof.bandwidth)
        rates = (f"{p.batch / least:,.0f}", f"{p.tokens_per_s:,.0f}", f"{least / p.seconds:.0%}")
        lines.append((f"batch {p.batch}", *rates, seconds(p.seconds)))
    title = f"tokens per second of all sequences (by the roof compute takes over at batch {turn:.0f})"
    return table(title, ("", "at most, formula", "measured", "of the roof", "a step, measured"), lines)


def prefill_together() -> Table:
    """1, 2 and 4 prompts in one pass."""
    lines = [
        (f"{p.batch} × {p.new} tokens in one pass", f"{p.tokens_per_s:,.0f}", seconds(p.seconds))
        for p in experiments.prefill_together()
    ]
    return table("prefill together", ("", "tokens per second, measured", "TTFT of each, measured"), lines)


def bytes_of_a_step() -> Receipt:
    """Bytes that a decode step of the small model reads, operation by operation."""
    found = []
    for batch, context in ((1, 64), (8, 64), (8, 512)):
        for what, (predicted, counted) in experiments.bytes_of_a_step(batch, context).items():
            found.append(row(f"batch {batch}, context {context}: {what} read", predicted, counted, "B"))
    return receipt("bytes of a decode step, float32", found)


def broken_decoders() -> Table:
    """Four decoders beside the right one on one text."""
    symptoms = experiments_breaks.all_symptoms()
    lines = [(name, seen.nll, seen.apart, f"{seen.agree:.0%}") for name, seen in symptoms.items()]
    columns = ("", "loss, nats per token", "largest difference of a logit", "same greedy tokens")
    return table(
        f"{experiments_breaks.LENGTH - experiments_breaks.PROMPT} tokens after a prompt of {experiments_breaks.PROMPT}",
        columns,
        lines,
    )


def diagnosis(yours: dict[str, str]) -> Table:
    """The learner's diagnosis beside what each decoder does, and what tells them apart."""
    lines = []
    for name, by_room in experiments_breaks.patients().items():
        means = (sum(seen.kl) / len(seen.kl) for seen in by_room.values())
        lines.append((name, yours[name], experiments_breaks.DISEASES[name], *means))
    rooms = (f"mean KL, {room} places" for room in next(iter(experiments_breaks.patients().values())))
    return table("three decoders", ("", "your diagnosis", "what it does", *rooms), lines)


def other_passes(batch: int = 4) -> Receipt:
    """The same sequences in one pass and in pieces, in three precisions."""
    found = []
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        seen, name = experiments_breaks.in_other_passes(dtype, batch), str(dtype).split(".")[1]
        due = 0 if dtype is torch.float64 else None
        found.append(row(f"{name}: greedy tokens changed, of {seen.tokens}", due, seen.changed))
        found.append(row("    largest difference of a logit", None, seen.apart))
        if dtype is torch.bfloat16:
            found.append(row("    largest lead that was lost, places with an exact tie", None, (seen.gap, seen.ties)))
    found.append(row("    float64: below 1e-9", True, seen.apart < 1e-9))
    return receipt("the same tokens in other passes", found, show="greedy tokens changed")


def transformers() -> Receipt:
    """transformers with a DynamicCache beside the loop of exercise 2, where it is installed."""
    both = experiments_peers.beside_transformers()
    if both is None:
        return receipt("transformers is not installed here: pip install 'minillm[test]'", [])
    theirs, ours = both["transformers, DynamicCache"], both["exercise 2"]
    same = sum(a == b for a, b in zip(theirs["tokens"], ours["tokens"], strict=True))
    found = [row("the same tokens", len(theirs["tokens"]), same)]
    for what in ("passes", "entries", "bytes"):
        found += [row(f"{what} here, {ours[what]:,}: as many as theirs", True, theirs[what] == ours[what])]
    found += [row("seconds: theirs, here", None, (seconds(theirs["seconds"]), seconds(ours["seconds"])))]
    return receipt("transformers with a DynamicCache, and the loop of exercise 2", found)


def interview() -> Table:
    """Numbers that the questions rest on."""
    large, small = MODELS["Llama 3 70B"], MODELS["Llama 3 8B"]
    roof = H100.peak_flops, H100.bandwidth
    turns = (predict.turning_batch(small, context, *roof) for context in (128, 512, 1024))
    batches = tuple(round(turn) if turn else "never" for turn in turns)
    sizes = tuple(round(kv_bytes_per_token(replace(large, num_kv_heads=heads)) / 1e6, 2) for heads in (8, 64, 1))
    return table(
        "by formula, one H100 SXM",
        ("quantity", "formula"),
        [
            ("8B in bf16: tokens/s of one sequence at most, context 1,024", predict.decode_rate(small, 1, 1024, *roof)),
            ("    prefill of 1,024 tokens at the peak", seconds(predict.work(small, 1, 1024, 0).seconds(*roof))),
            ("70B: MB of cache per token with 8, 64 and 1 kv heads", sizes),
            ("8B, 80 GB: tokens of cache beside 16-bit weights", predict.tokens_that_fit(small, 80e9)),
            ("8B: batch at which decode is compute-bound, context 128, 512, 1,024", batches),
            ("8B, context 4,096: tokens/s that no batch exceeds",
             predict.kv_ceiling(kv_bytes_per_token(small), 4096, H100.bandwidth)),
            ("20 ms queue, 80 ms prefill, 300 tokens at 25 ms: end to end",
             seconds(predict.request_seconds(0.02, 0.08, 300, 0.025))),
        ],
    )  # fmt: skip


def design_contexts(cards: int = 2, context: int = 32768) -> Table:
    """D1: 70B on two H200s with contexts of 32,768 tokens, keys and values in 16 and in 8 bits."""
    card, shape = GPUS["H200 SXM"], MODELS["Llama 3 70B"]
    read, lines = predict.work(shape, 1, 1, 0).weight_bytes, []  # in memory all of the embedding stands, too
    for bits in (16, 8):
        kv = kv_bytes_per_token(shape) * bits / 16
        room = int((0.9 * cards * card.memory_bytes - 2 * parameters(shape).total) / (kv * context))
        for batch in (1, 8, room):
            step = (read + batch * context * kv) / (cards * card.bandwidth)
            lines.append((f"{bits}-bit cache, batch {batch}", room, seconds(step), f"{batch / step:,.0f}"))
    columns = ("", "sequences that fit", "TPOT, at least", "tokens per second, at most")
    return table("D1: 70B in 16 bits on two H200s, context 32,768", columns, lines)


def design_card(context: int = 4096, most_s: float = 0.02) -> Table:
    """D2: the largest batch with a TPOT of 20 ms, by card, for the 8B model."""
    shape, lines = MODELS["Llama 3 8B"], []
    for name, card in GPUS.items():

        def step(batch: int, card: experiments.Gpu = card) -> float:
            return predict.work(shape, batch, 1, context - 1).seconds(card.peak_flops, card.bandwidth)

        fits = predict.tokens_that_fit(shape, 0.9 * card.memory_bytes) // context
        batch = max(b for b in range(1, fits + 1) if step(b) <= most_s)
        ttft = predict.work(shape, 1, context, 0).seconds(card.peak_flops, card.bandwidth)
        lines.append((name, fits, batch, seconds(step(batch)), f"{batch / step(batch):,.0f}", seconds(ttft)))
    columns = ("", "sequences that fit", "batch", "TPOT, at least", "tokens/s, at most", "prefill of 4,096, at least")
    return table("D2: 8B in 16 bits, context 4,096, TPOT up to 20 ms", columns, lines)


CLAIMS = (one_more_token, bytes_of_a_step, other_passes, thesis)
