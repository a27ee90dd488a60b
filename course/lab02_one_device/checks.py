"""Lab 02, one device: what a training step takes, in bytes by kind and in useful FLOPs.

    checks.py        memory by kind, useful FLOPs
    checks_step.py   the same step with less memory: accumulation, loss scaling, recomputation, clipping of shards

Numbers are compared with torch's own FlopCounterMode and with the memory census, on shapes and values drawn anew each
time. `watching.py` says what was held.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial

import torch

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab02_one_device import watching
from course.lab02_one_device.experiments import KINDS, count_flops, train_once
from course.shared.diagnose import expect_number
from minillm.model import ModelConfig, Transformer, dense, sdpa


@exercise(
    "memory-ledger",
    minutes=15,
    difficulty=2,
    hints=(
        "Two matrices per block. Adam keeps two numbers per weight; what does it step if the weights have 16 bits?",
        "A matmul keeps its input for backward, ReLU its output, an addition nothing. ReLU's output is down's input: "
        "one tensor. If weights have 16 bits, the optimizer owns a float32 copy and two float32 moments.",
    ),
)
def check_memory_ledger(learner: Callable) -> Receipt:
    rows = []
    for mixed in (False, True):
        shape = (8 * random.randint(2, 5), 8 * random.randint(6, 12), random.randint(2, 4), random.randint(20, 90))
        found, counted = learner(*shape, mixed), watching.stack_memory(*shape, mixed)
        if not isinstance(found, dict) or set(found) != set(KINDS):
            raise CheckFailed(f"you returned {found!r}; the exercise asks for a dict with the keys {', '.join(KINDS)}")
        name = "bf16 with masters" if mixed else "float32"
        rows += [row(f"{name}: {kind}", found[kind], counted[kind], "B") for kind in KINDS]
        for kind in KINDS:
            if found[kind] != counted[kind]:
                raise CheckFailed(
                    f"{name}, {kind}: you said {found[kind]:,} B, the step held {counted[kind]:,} B.",
                    rows,
                    evidence=(mixed, kind, found[kind]),
                )
    return receipt("predicted by you, measured by the census", rows)


@exercise(
    "mfu",
    minutes=8,
    difficulty=2,
    hints=(
        "Useful FLOPs of one token, times tokens per second, over what the machine could do.",
        "A weight costs 2 FLOPs per token forward and 4 backward. A query of width w meets k keys: 2·w·k for the "
        "scores and 2·w·k for the values, in each layer, forward; twice that backward. Causal: k is (seq + 1) / 2.",
    ),
)
def check_mfu(learner: Callable) -> Receipt:
    rows = []
    sizes = (random.sample(each, 2) for each in ((2, 4, 6), (4, 5, 6), range(50, 90)))
    seqs = random.randrange(9, 40, 2), random.randrange(10, 40, 2)  # odd, even
    for tied, seq, heads, layers, vocab in zip((True, False), seqs, *sizes, strict=True):
        config = ModelConfig(vocab, 8 * heads, 40, layers, heads, heads // 2, max_seq_len=64, tie_embeddings=tied)
        tokens = torch.randint(0, vocab, (2, seq + 1))
        scores, fused = (count_flops(partial(train_once, model, tokens)) for model in _twice(config))
        visible = torch.ones(seq, seq).tril().mean().item()  # share of the score matrix that a causal model needs
        matmuls, attention = fused / (2 * seq), (scores - fused) / (2 * seq)
        useful, peak, rate = matmuls + visible * attention, random.uniform(1e11, 1e15), random.uniform(1e3, 1e5)
        weights = round(matmuls / 6)
        share = learner(weights, config.num_layers, heads * config.head_dim, seq, rate, peak)
        share = share.item() if isinstance(share, torch.Tensor) and share.numel() == 1 else share
        found = expect_number(share, "one number, a share of the peak")
        name = f"{weights:,} weights, {seq} tokens"
        rows.append(row(f"{name}: counted FLOPs · tokens/s / peak", useful * rate / peak, found, tolerance=1e-6))
        if rows[-1].verdict == "off":
            due = useful * rate / peak
            raise CheckFailed(f"You found {found:.7g}, but it is {due:.7g}.", rows, evidence=found)
    return receipt("FLOPs per token by torch's counter", rows)


def _twice(config: ModelConfig) -> Iterator[Transformer]:
    """With scores as matmuls that a counter sees, and in the fused kernel, where torch counts none on a CPU."""
    return (Transformer(config, attention=attention) for attention in (dense, sdpa))
