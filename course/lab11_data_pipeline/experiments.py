"""Lab 11's measurements: merges of the library, vocabularies, padding, samplers on ranks, a loader that is too slow."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, DistributedSampler

from course.lab11_data_pipeline import bpe
from course.lab11_data_pipeline import formulas as predict
from course.lab11_data_pipeline.ngram import KneserNey
from course.lab11_data_pipeline.padding import IGNORE, length_batches, pad
from course.shared.measuring import one_thread
from minillm import measure
from minillm.comm import Group
from minillm.data import (
    Loader,
    Prefetcher,
    TokenDataset,
    Tokenizer,
    Tokens,
    corpus,
    tokenize,
    train_tokenizer,
)
from minillm.data.sampler import permutation
from minillm.measure import Ledger
from minillm.model import ModelConfig, Transformer
from minillm.model.loss import cross_entropy

VOCABULARIES = (257, 512, 1024, 2048, 4096, 8192)  # 256 bytes, the separator, and the merges
SHARE = 8  # every eighth training file is enough to learn from here
Pair = tuple[bytes, bytes]


@cache
def documents(split: str) -> tuple[str, ...]:
    """The texts of a split of the standard library, read once."""
    return tuple(document.text for document in corpus().documents(split))


def held_out_text() -> str:
    """The held-out files, one after the other."""
    return "".join(documents("validation"))


# Byte-pair encoding by the library.


def library_merges(text: str, vocab_size: int) -> list[Pair]:
    """The merges that the `tokenizers` library learns from text (without a special token)."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    )
    return [(_bytes(left), _bytes(right)) for left, right in json.loads(backend.to_str())["model"]["merges"]]


def library_encode(merges: Sequence[Pair], text: str) -> list[bytes]:
    """The tokens that the `tokenizers` library makes of text with these merges."""
    ids = {_chars(token): token_id for token, token_id in bpe.initial_vocabulary().items()}
    for left, right in merges:
        ids.setdefault(_chars(left + right), len(ids))
    backend = tokenizers.Tokenizer(models.BPE(ids, [(_chars(left), _chars(right)) for left, right in merges]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return [_bytes(token) for token in backend.encode(text).tokens]


def _bytes(token: str) -> bytes:
    return bytes(bpe.CHAR_TO_BYTE[char] for char in token)


def _chars(token: bytes) -> str:
    return "".join(bpe.BYTE_TO_CHAR[byte] for byte in token)


# Vocabularies.


@cache
def vocabularies() -> dict[int, Tokenizer]:
    """Tokenizers by vocabulary size, learnt from every eighth training file.

    Merges are learnt one after the other, so a smaller vocabulary is the beginning of a larger one: one training does.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        train_tokenizer(documents("train")[::SHARE], max(VOCABULARIES)).save(file)
        largest = json.loads(file.read_text("utf-8"))
        ids, merges = largest["model"]["vocab"], largest["model"]["merges"]
        for size in VOCABULARIES:
            smaller = {token: token_id for token, token_id in ids.items() if token_id < size}
            kept = [pair for pair in merges if "".join(pair) in smaller]
            file.write_text(
                json.dumps(largest | {"model": largest["model"] | {"vocab": smaller, "merges": kept}}), "utf-8"
            )
            found[size] = Tokenizer.load(file)
    return found


@cache
def tokens_by_vocabulary() -> dict[str, Any]:
    """How long the held-out text is in each vocabulary, and whether its bytes came back."""
    text, found = held_out_text(), vocabularies()
    numbers: dict[str, Any] = {"characters": len(text), "bytes": len(text.encode()), "vocab_size": list(found)}
    encoded = [tokenizer.encode(text) for tokenizer in found.values()]
    numbers["tokens"] = [len(ids) for ids in encoded]
    pairs = zip(found.values(), encoded, strict=True)
    numbers["lossless"] = [tokenizer.decode_bytes(ids) == text.encode() for tokenizer, ids in pairs]
    return numbers


@cache
def ngram_loss(vocab_size: int, order: int = 2) -> tuple[float, int]:
    """(nats per token, tokens) of an n-gram learnt on every eighth training file, on the held-out files."""
    tokenizer = vocabularies()[vocab_size]
    learnt, used = (
        np.concatenate(tokenizer.encode_batch(texts))
        for texts in (documents("train")[::SHARE], documents("validation"))
    )
    return KneserNey(learnt, tokenizer.vocab_size, order).nats_per_token(used), len(used)


@cache
def tokens_of(split: str) -> Tokens:
    """A split of the standard library in the committed vocabulary."""
    return tokenize(corpus(), Tokenizer.load(), split)


def chances(order: int) -> np.ndarray:
    """What an n-gram learnt on the training files gives to each token of the held-out ones."""
    train = tokens_of("train")
    return KneserNey(np.asarray(train.array), train.vocab_size, order).probabilities(
        np.asarray(tokens_of("validation").array)
    )


# Padding.


@cache
def files() -> tuple[np.ndarray, ...]:
    """Token ids of each training file that has two or more, in the committed vocabulary."""
    train = tokens_of("train")
    parts = np.split(train.array.astype(np.int64), np.flatnonzero(train.array == train.separator))
    return tuple(part for part in parts if len(part) > 2)  # all but the first begin with the separator


def lengths() -> list[int]:
    """How many tokens of each file are targets."""
    return [len(part) - 1 for part in files()]


def padding(
    lengths: Sequence[int], batch_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32), seq_len: int = 256
) -> dict[str, Any]:
    """Share of computed positions that are padding, by batch size: random batches, and sorted by length; and packed."""
    waste = {
        name: [predict.padding_waste([[lengths[i] for i in batch] for batch in length_batches(lengths, size, 0, by)])
               for size in batch_sizes]
        for name, by in (("random batches", False), ("sorted by length", True))
    }  # fmt: skip
    packed = predict.packing_waste(sum(lengths) + len(lengths), seq_len)
    return {"batch_sizes": list(batch_sizes), "waste": waste, "packed": packed, "seq_len": seq_len}


def count_padding(documents: Sequence[np.ndarray], batches: Sequence[np.ndarray]) -> tuple[int, int]:
    """(positions of all padded batches, those among them that are padding), counted in the tensors themselves."""
    positions = padding = 0
    for batch in batches:
        _, targets = pad([documents[i] for i in batch], pad_id=0)
        positions += targets.numel()
        padding += int((targets == IGNORE).sum())
    return positions, padding


# Rank programs.


def dealt(
    group: Group, deal: Callable, num_samples: int, batch_size: int, steps: int, start: int = 0
) -> list[list[int]]:
    """[step] -> samples that `deal` gives this rank, from position `start` of the stream on."""
    order, n = partial(permutation, num_samples, 0), group.world_size
    positions = range(start, start + steps * n * batch_size, n * batch_size)
    return [[int(i) for i in deal(p, order, num_samples, batch_size, group.rank, n)] for p in positions]


def torch_loader(group: Group, num_samples: int, batch_size: int, set_epoch: bool) -> list[list[int]]:
    """[epoch] -> samples that torch's DataLoader with a DistributedSampler gives this rank, in two epochs."""
    samples = range(num_samples)  # a dataset whose items are their own numbers
    sampler = DistributedSampler(samples, group.world_size, group.rank, seed=0)
    loader = DataLoader(samples, batch_size, sampler=sampler)
    epochs = []
    for epoch in range(2):
        if set_epoch:
            sampler.set_epoch(epoch)
        epochs.append([int(sample) for batch in loader for sample in batch])
    return epochs


def resumed_batch(steps: int, batch_size: int) -> tuple[dict, list[int], list[int]]:
    """(state after `steps`, the next batch without a break, the next batch of a loader resumed from that state)."""
    dataset = TokenDataset(tokens_of("train"), 256)
    with Loader(dataset, batch_size, workers=2, depth=4) as loader:
        for _ in range(steps):
            next(loader)
        state = loader.state_dict()
        due = next(loader).indices.tolist()
    with Loader(dataset, batch_size, workers=0) as resumed:
        resumed.load_state_dict(state)
        return state, due, next(resumed).indices.tolist()


# A loader that is too slow.


class Trainer:
    """Steps of a small model on windows of `tokens`; `load` makes a batch after an emulated remote read."""

    def __init__(self, tokens: Tokens, batch_size: int = 4, seq_len: int = 64):
        self._loader = Loader(TokenDataset(tokens, seq_len), batch_size, workers=0)
        self._model = Transformer(ModelConfig(tokens.vocab_size, 64, intermediate_size=128, num_layers=2, num_heads=2))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self.load_s = 0.0

    def load(self, k: int):
        """Batch k; the emulated read takes `load_s` seconds."""
        with measure.span(f"load {k}", "input"):
            time.sleep(self.load_s)
            return self._loader.load(k * self._loader.sampler.global_batch)

    def step(self, batch: Any) -> float:
        """Forward, backward, optimizer, each a span; returns the loss."""
        with measure.span("forward"):
            loss = cross_entropy(self._model(batch.inputs), batch.targets)
        with measure.span("backward"):
            loss.backward()
        with measure.span("optimizer", "optimizer"):
            self._optimizer.step()
            self._optimizer.zero_grad()
        return loss.item()

    def run(self, batches: Iterator[Any]) -> tuple[Ledger, list[float], list[float]]:
        """(ledger, seconds waited for each batch, seconds of each whole step) of training on all `batches`."""
        waited, steps = [], []
        with measure.ledger() as led, one_thread():
            while True:
                began = time.monotonic()
                batch = next(batches, None)
                if batch is None:
                    return led, waited, steps
                waited.append(time.monotonic() - began)
                self.step(batch)
                steps.append(time.monotonic() - began)


def split(led: Ledger) -> dict[str, float]:
    """Mean seconds per step of each part: input (wherever it ran), forward, backward, optimizer."""
    parts: dict[str, list[float]] = {}
    for span in led.spans:
        parts.setdefault("input" if span.kind == "input" else span.name, []).append(span.seconds)
    return {name: sum(seconds) / len(seconds) for name, seconds in parts.items()}


def starve(prefetch: Callable, total: int = 12, depth: int = 2) -> dict[str, Any]:
    """The same training on demand and prefetched, with a loader that takes 1.6 times as long as a step computes."""
    trainer = Trainer(tokens_of("validation"))
    trainer.run(trainer.load(k) for k in range(4))  # warm up
    led, _, _ = trainer.run(trainer.load(k) for k in range(6))
    compute = sum(seconds for name, seconds in split(led).items() if name != "input")
    trainer.load_s = min(max(1.6 * compute, 0.02), 0.08)
    found = {}
    for name, batches in (
        ("on demand", (trainer.load(k) for k in range(total))),
        ("prefetched", iter(prefetch(trainer.load, total, depth))),
    ):
        led, waited, steps = trainer.run(batches)
        parts = split(led)
        busy = sum(seconds for part, seconds in parts.items() if part != "input")
        steady = slice(2, None)  # the first steps fill the pipe
        found[name] = {"ledger": led, "parts": parts, "load_s": parts["input"], "compute_s": busy}
        found[name] |= {"step_s": float(np.mean(steps[steady])), "waited_s": float(np.mean(waited[steady]))}
    return found


# The interpreter's lock.


def cores_busy(make: Callable[[int], Any], workers: int, total: int = 8, repeats: int = 5) -> float:
    """CPU seconds per second while `workers` threads make `total` items: how many cores they use at a time.

    Other programs can only make it smaller: the largest of `repeats` counts.
    """
    found = []
    for _ in range(repeats):
        cpu, wall = time.process_time(), time.perf_counter()
        with Prefetcher(make, total, workers, depth=workers) as items:
            for _ in items:
                pass
        found.append((time.process_time() - cpu) / (time.perf_counter() - wall))
    return max(found)
