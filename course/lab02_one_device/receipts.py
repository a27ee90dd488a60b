"""Stop 02: a training step on one device: bytes by kind, FLOPs, recomputation, precision, clipping; times for info."""

import random
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from course.lab02_one_device import checks_step as answers
from course.lab02_one_device import experiments, watching
from course.lab02_one_device.experiments import flushed_share, repeated_update
from minillm.labkit.receipts import Row, row
from minillm.measure import machine
from minillm.model import ModelConfig, Transformer, dense
from minillm.predict.model import matmul_parameters, parameters, training_flops

SHAPE = ModelConfig(512, 96, 256, 3, 4, 2, max_seq_len=128, tie_embeddings=True)


def rows() -> Iterator[Row]:
    """Memory by kind in three precisions, useful and repeated FLOPs, what 16 bits lose, norms of shards, the step."""
    with experiments.one_thread():
        yield from _memory()
        yield from _flops()
        yield from _sixteen_bits()
        yield from _accumulation()
        yield from _clipping()
        yield from _step()


def _memory() -> Iterator[Row]:
    count = parameters(SHAPE).total
    stack = watching.stack_memory(64, 256, 3, 16, mixed=True)
    held = (stack[kind] for kind in ("parameter", "gradient", "optimizer"))
    yield row("bf16 weights with masters: bytes per parameter after backward", 16, sum(held) / (3 * 2 * 64 * 256))
    for precision, stepping in (("fp32", 16), ("bf16", 16), ("bf16-master", 18)):
        found = experiments.step_memory(SHAPE, precision, batch=4, seq=96)
        predicted = experiments.predicted_memory(SHAPE, 4, 96, precision)
        state = (found.parameter + found.gradient + found.optimizer) / count
        yield row(f"{precision}: bytes per parameter while it steps", stepping, state, "", 0.001)
        yield row("    activations", predicted.activation, found.activation, "B", 0.02)
        yield row("    peak of the step", predicted.total, found.total, "B", 0.02)


def _flops() -> Iterator[Row]:
    tokens = torch.randint(0, SHAPE.vocab_size, (2, 33))
    fused, scores = (
        experiments.count_flops(partial(experiments.train_once, model, tokens))
        for model in (Transformer(SHAPE), Transformer(SHAPE, attention=dense))
    )
    yield row("FLOPs per matmul parameter and token", 6, fused / 64 / matmul_parameters(SHAPE))
    yield row("FLOPs of a step, scores included", 64 * training_flops(SHAPE, 32).total, scores)
    found = experiments.recompute_tradeoff(SHAPE, batch=2, seq=64, repeats=1)
    head = 3 * 128 * 2 * SHAPE.vocab_size * SHAPE.hidden_size
    blocks = {mode: numbers["flops"] - head for mode, numbers in found.items()}
    yield row("blocks recomputed in full: FLOPs, as a multiple", 4 / 3, blocks["full"] / blocks["none"], "", 1e-9)
    yield row("    selectively", 1, blocks["selective"] / blocks["none"])
    kept = experiments.predicted_memory(SHAPE, 2, 64, recompute=True).activation
    yield row("    in full: activations, block inputs and one block", kept, found["full"]["activation"], "B", 0.02)
    yield row("    activations without", None, found["none"]["activation"], "B")
    torchs = experiments.early_stop()
    yield row("torch's checkpoint, blocks of two matmuls, early stop", 7 / 6, torchs["early stop"], "", 1e-9)
    yield row("    to the end", 4 / 3, torchs["to the end"], "", 1e-9)
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    raised = False
    with warnings.catch_warnings(action="ignore"):
        try:
            checkpoint(layer, x, use_reentrant=True).sum().backward()
        except RuntimeError:
            raised = True
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    yield row("    reentrant, input without gradient: raises", True, raised)
    yield row("    not reentrant: trains", True, layer.weight.grad is not None)


def _sixteen_bits() -> Iterator[Row]:
    yield row("bf16: 1 + 1,000 · 0.001", 1.0, repeated_update(torch.bfloat16))
    yield row("fp32: 1 + 1,000 · 0.001", 2.0, repeated_update(torch.float32), "", 1e-4)
    values = experiments.spread_values()
    yield row(
        "fp16: log-uniform 1e-12 to 1e-2, flushed to zero", 0.4475, flushed_share(values, torch.float16), "", 0.02
    )
    yield row("    scaled by 2^16", 0, flushed_share(values, torch.float16, 2.0**16))
    yield row("    bf16", 0, flushed_share(values, torch.bfloat16))
    for found in answers.check_loss_scaling(answers.scaled_step).rows[:3]:
        yield replace(found, name=f"loss scaling beside GradScaler: {found.name}")


def _accumulation() -> Iterator[Row]:
    for found in answers.check_accumulate(answers.accumulate).rows:
        yield replace(found, name=f"accumulation, unequal microbatches: {found.name}")


def _clipping() -> Iterator[Row]:
    shards = [[torch.randn(4096, generator=torch.Generator().manual_seed(random.getrandbits(32)))] for _ in range(16)]
    local = shards[0][0].norm().item()
    norm = answers.clip(shards, 1.0)
    yield row("norm of 1 of 16 shards: global / √16", norm / 4, local, "", 0.1)
    after = torch.cat([gradient for shard in shards for gradient in shard]).norm()
    yield row("    all clipped to 1 by the global norm", 1.0, after, "", 1e-5)


def _step() -> Iterator[Row]:
    split = experiments.step_split(machine().peak_flops_one_thread, batch=2, seq=64, steps=3)
    for part in ("input", "forward", "backward", "optimizer"):
        yield row(f"step of the target model, one thread: {part}", None, split[part], "s")
    yield row("    MFU against the measured peak of one thread", None, f"{split['mfu']:.0%}")


CLAIMS = (rows,)
