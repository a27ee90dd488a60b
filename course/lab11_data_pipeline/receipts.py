"""Stop 11: text to tokens to batches, nothing lost, nothing repeated, made ahead: values and order, times for info."""

import math
import os
from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch

from course.lab11_data_pipeline import bpe, experiments, feeding
from course.lab11_data_pipeline import formulas as predict
from course.lab11_data_pipeline.baselines import word_tokenizer
from course.lab11_data_pipeline.ngram import KneserNey
from course.lab11_data_pipeline.padding import length_batches
from minillm.comm import launch
from minillm.data import Prefetcher, Tokenizer, corpus, tokenize
from minillm.labkit.answers import answers_of
from minillm.labkit.receipts import Row, row

WORLD, SAMPLES = 4, 10
answers = answers_of("11_data_pipeline")


def rows() -> Iterator[Row]:
    """Tokenizing, the units of loss, padding and packing, samplers on ranks, prefetching."""
    yield from _tokens()
    yield from _padding()
    yield from _samplers()
    yield from _prefetching()


def _tokens() -> Iterator[Row]:
    text = experiments.held_out_text()
    plain = text[:20_000].encode("ascii", "ignore").decode()
    ours, theirs = bpe.train(plain, 256 + 40), experiments.library_merges(plain, 256 + 40)
    yield row(
        "BPE: merges equal to the tokenizers library's, of 40",
        40,
        sum(a == b for a, b in zip(ours, theirs, strict=True)),
    )
    tokenizer, noise = Tokenizer.load(), os.urandom(4096)
    lossless = tokenizer.decode_bytes(tokenizer.encode_bytes(noise)) == noise
    yield row("BPE: 4,096 random bytes come back", True, lossless)
    curve = experiments.tokens_by_vocabulary(experiments.vocabularies((257, 1024, 4096)))
    tokens = curve["tokens"]
    yield row("more merges, fewer tokens (257, 1,024, 4,096)", True, tokens[0] > tokens[1] > tokens[2])
    yield row("    tokens per character at 4,096", None, tokens[2] / curve["characters"])
    unknown = word_tokenizer("".join(experiments.documents("train")[::8]), 4096).unknown_share(text)
    yield row("words, 4,096 of them: some are unknown", True, unknown > 0)
    yield row("    their share of held-out code", None, f"{unknown:.1%}")
    ids = np.array(tokenizer.encode(text))
    chances = KneserNey(ids, tokenizer.vocab_size, 1).probabilities(ids)
    bits = predict.bits_per_byte(float(-np.log(chances).mean()), len(ids), len(text.encode()))
    yield row(
        "bits per byte from nats per token", bits, float(-np.log2(chances).sum()) / len(text.encode()), "bit/B", 1e-9
    )
    perplexity = math.exp(predict.nats_per_token(bits, len(ids), len(text.encode())))
    yield row("perplexity from bits per byte", perplexity, float(np.prod(chances ** (-1 / len(ids)))), "", 1e-6)


def _padding() -> Iterator[Row]:
    lengths = np.random.default_rng(0).integers(1, 2049, 8000).tolist()
    waste = predict.padding_waste([[lengths[i] for i in batch] for batch in length_batches(lengths, 8, 0)])
    yield row("padding of random batches of 8, uniform lengths", predict.uniform_padding_waste(8), waste, "", 0.02)
    tokens = tokenize(corpus(), Tokenizer.load(), "validation")
    documents = [
        part
        for part in np.split(tokens.array.astype(np.int64), np.flatnonzero(tokens.array == tokens.separator))
        if len(part) > 2
    ]
    sizes = [len(document) - 1 for document in documents]
    for name, by_length in (("random", False), ("sorted by length", True)):
        batches = length_batches(sizes, 8, 0, by_length)
        positions, padding = experiments.count_padding(documents, batches)
        predicted = predict.padding_waste([[sizes[i] for i in batch] for batch in batches])
        yield row(f"padding of the held-out files, batches of 8, {name}", predicted, padding / positions, "", 1e-9)
    _, targets = answers.windows(torch.from_numpy(tokens.array.astype(np.int64)), 256)
    yield row(
        "    packed: tokens that are no target",
        predict.packing_waste(len(tokens), 256),
        1 - targets.numel() / len(tokens),
        "",
        1e-9,
    )


def _samplers() -> Iterator[Row]:
    ranks = launch(_all_samplers, WORLD)
    plain, fresh, ours = ([rank[i] for rank in ranks] for i in range(3))
    seen = Counter(sample for rank in plain for sample in rank[0])
    yield row(
        "torch's DistributedSampler, 10 samples, 4 ranks: shown twice",
        predict.sampler_duplicates(SAMPLES, WORLD),
        sum(seen.values()) - len(seen),
    )
    yield row("    same order in epoch 1 without set_epoch", True, all(rank[0] == rank[1] for rank in plain))
    yield row("    same order in epoch 1 with it", False, all(rank[0] == rank[1] for rank in fresh))
    counts = Counter(sample for rank in ours for step in rank for sample in step)
    yield row("minillm, two epochs: times each sample was shown", (2, 2), (min(counts.values()), max(counts.values())))
    found = launch(feeding.deal_on_ranks, WORLD, answers.deal, 31, 7, [(4, 3, 4), (3, 3, 4)])
    counts = Counter(sample for legs, _ in found for leg in legs for step in leg for sample in step)
    yield row("84 of 31 samples, resumed on 3 ranks: shown", (2, 3), (min(counts.values()), max(counts.values())))


def _all_samplers(group):
    both = [experiments.torch_loader(group, SAMPLES, 1, set_epoch) for set_epoch in (False, True)]
    return (*both, experiments.dealt(group, answers.deal, SAMPLES, 1, steps=5))


def _prefetching() -> Iterator[Row]:
    yield from feeding.judge_overlap(lambda make, total, depth: Prefetcher(make, total, 1, depth))
    tokenizer = Tokenizer.load()
    trainer = experiments.Trainer(tokenize(corpus(), tokenizer, "validation"), tokenizer.vocab_size)
    for name, found in experiments.starve(trainer, answers.prefetch, total=8).items():
        expected = predict.step_seconds(found["load_s"], found["compute_s"], name == "prefetched")
        formula = "max(load, compute)" if name == "prefetched" else "load + compute"
        yield row(f"step {name}, emulated slow read: {formula}", None, expected, "s")
        yield row("    measured", None, found["step_s"], "s")


CLAIMS = (rows,)
