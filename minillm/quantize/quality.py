"""What quantization cost and gained, on text that the model has not seen: one table.

bits per byte    how well the model predicts the text              lower is better
KL               Σ p · log(p / q) of the next token, in nats,      how far from the original p, whoever is right
                 mean over the text
agreement        share of places where both would choose the       what greedy decoding notices
                 same token
size, tokens/s   bytes of all weights; one sequence being decoded
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minillm.data import TokenDataset, Tokens
from minillm.model.generate import generate
from minillm.model.transformer import Transformer
from minillm.predict.model import bits_per_byte
from minillm.quantize.in_place import nbytes

BATCH = 4  # windows that go through both models at once
PROMPT, NEW, PAIRS = 8, 32, 5  # tokens and runs of each that is timed


@dataclass(frozen=True)
class Quality:
    """One row of the table. kl, agreement: None for the original."""

    name: str
    bytes: int
    bits_per_byte: float
    kl: float | None
    agreement: float | None
    tokens_per_s: float


@torch.no_grad()
def compare(
    original: Transformer, quantized: Transformer, tokens: Tokens, name: str, *, windows: int = 32, seq_len: int = 256
) -> tuple[Quality, Quality]:
    """The original's row and the quantized model's, over `windows` windows spread evenly over the text."""
    losses, kl, same, places = [0.0, 0.0], 0.0, 0, 0
    for inputs, targets in _batches(TokenDataset(tokens, seq_len), windows):
        inputs, targets = (each.to(original.embedding.weight.device) for each in (inputs, targets))
        ours, theirs = (model(inputs).float().log_softmax(-1).flatten(0, 1) for model in (original, quantized))
        for place, each in enumerate((ours, theirs)):
            losses[place] += float(F.nll_loss(each, targets.flatten(), reduction="sum"))
        kl += float(F.kl_div(theirs, ours, reduction="sum", log_target=True))
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        places += targets.numel()
    bits = [bits_per_byte(loss / places, len(tokens), tokens.text_bytes) for loss in losses]
    speeds = decode_speeds(original, quantized, [int(token) for token in tokens.array[:PROMPT]])
    return (
        Quality("original", nbytes(original), bits[0], None, None, speeds[0]),
        Quality(name, nbytes(quantized), bits[1], kl / places, same / places, speeds[1]),
    )


def decode_speeds(first: Transformer, second: Transformer, prompt: list[int]) -> tuple[float, float]:
    """Tokens per second of one sequence in each, the median of runs that take turns. The sequence ends with the
    context, of which the prompt takes at most half."""
    prompt = prompt[: max(1, first.config.max_seq_len // 2)]
    seconds: tuple[list[float], list[float]] = ([], [])
    for pair in range(PAIRS + 1):
        for model, own in zip((first, second), seconds, strict=True):
            start = time.perf_counter()
            count = len(list(generate(model, prompt, NEW)))
            if pair:  # the first is a warm-up
                own.append((time.perf_counter() - start) / count)
    return 1 / statistics.median(seconds[0]), 1 / statistics.median(seconds[1])


def table(rows: list[Quality]) -> str:
    """For a terminal."""
    head = ("model", "MB", "bits/byte", "change", "KL, nats", "same greedy token", "tokens/s")
    lines = [head]
    for row in rows:
        change = "" if row is rows[0] else f"{row.bits_per_byte / rows[0].bits_per_byte - 1:+.2%}"
        kl = "" if row.kl is None else f"{row.kl:.5f}"
        same = "" if row.agreement is None else f"{row.agreement:.2%}"
        size, bits, speed = f"{row.bytes / 1e6:.2f}", f"{row.bits_per_byte:.4f}", f"{row.tokens_per_s:.0f}"
        lines.append((row.name, size, bits, change, kl, same, speed))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) if place == 0 else cell.rjust(width) for place, (cell, width) in enumerate(line))
        for line in (list(zip(cells, widths, strict=True)) for cells in lines)
    )


def _batches(dataset: TokenDataset, windows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    places = dataset.spread(windows)
    for start in range(0, len(places), BATCH):
        yield dataset.batch(places[start : start + BATCH])
