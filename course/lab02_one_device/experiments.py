"""Lab 02's measurements: memory of a step by kind, FLOPs that are counted, recomputation, precision, broken runs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from course.shared.measuring import count_flops, one_thread, text_tokens
from minillm.data import TokenDataset, Tokens
from minillm.measure import memory
from minillm.measure.memory_tracker import Bytes
from minillm.model import ModelConfig, Transformer, cross_entropy, dense
from minillm.parallel.sharding.placement import global_norm, gradients_of
from minillm.predict.model import training_flops
from minillm.predict.training import memory as predict_memory
from minillm.train import EXPENSIVE, PRECISIONS, MasterWeights, TrainConfig, Trainer, checkpoint_blocks, preset
from minillm.train.steptime import PARTS

SMALL = ModelConfig(1024, 256, 768, 4, 8, 4, max_seq_len=256, tie_embeddings=True)  # 3.4 M parameters
TARGET = preset("target", 4096, 256)  # 5.8 M parameters, the model this course serves
KINDS = ("parameter", "gradient", "optimizer", "activation")


# Memory.


@one_thread()
def step_memory(
    config: ModelConfig,
    precision: str = "fp32",
    batch: int = 2,
    seq: int = 256,
    accumulate: int = 1,
    activation_checkpointing: str = "none",
) -> Bytes:
    """The most that each kind held in one step of minillm's trainer, counted; masters are `optimizer`."""
    chosen = TrainConfig(
        config,
        seq_len=seq,
        batch_size=batch,
        accumulate=accumulate,
        precision=precision,
        activation_checkpointing=activation_checkpointing,
    )
    with Trainer(chosen, random_tokens(config.vocab_size), workers=0) as trainer:
        trainer.step()  # makes the moments
        with memory(trainer.model, trainer.optimizer) as census:
            trainer.step()
    return census.peak


def predicted_memory(config: ModelConfig, *arguments: Any, **options: Any) -> Bytes:
    """The same by `predict.training.memory.training_step`."""
    step = predict_memory.training_step(config, *arguments, **options)
    gradients, activations = step.most("gradients"), step.most("activations")
    return Bytes(step.peak.weights, step.buffer, gradients, step.peak.optimizer, activations, total=step.peak.total)


def random_tokens(vocab_size: int, count: int = 1 << 14) -> Tokens:
    array = np.random.default_rng(0).integers(0, vocab_size, count).astype(np.uint16)
    return Tokens(array, vocab_size, separator=0, documents=1, text_bytes=count)


# FLOPs.


def train_once(model: nn.Module, tokens: Tensor) -> None:
    """Forward and backward on `tokens`, each the target of the one before."""
    model.zero_grad()
    cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).backward()


def early_stop(hidden: int = 64, tokens: int = 128) -> dict[str, float]:
    """FLOPs of torch's checkpoint on blocks of two matmuls, as a multiple of those without.

    A block up-relu-down: its last matmul's output is not needed again, and torch stops before it.
    """
    block = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
    x = torch.randn(tokens, hidden, requires_grad=True)
    plain = count_flops(lambda: block(x).sum().backward())
    again = partial(checkpoint, block, x, use_reentrant=False)
    stops = count_flops(lambda: again().sum().backward())
    goes_on = count_flops(lambda: again(early_stop=False).sum().backward())
    return {"early stop": stops / plain, "to the end": goes_on / plain}


# Recomputation.

MODES = {"none": (None, 1), "every 2nd block": (frozenset(), 2), "selective": (EXPENSIVE, 1), "full": (frozenset(), 1)}


@one_thread()
def recompute_tradeoff(
    config: ModelConfig = SMALL, batch: int = 2, seq: int = 256, repeats: int = 3, modes: Sequence[str] = tuple(MODES)
) -> dict[str, dict[str, float]]:
    """{mode: predicted and counted FLOPs and activation bytes, seconds of forward and backward (best of repeats)}."""
    tokens = torch.randint(0, config.vocab_size, (batch, seq + 1), generator=torch.Generator().manual_seed(0))
    found, models = {}, {}
    for mode in modes:
        keep, every = MODES[mode]
        counted = checkpoint_blocks(Transformer(config, attention=dense), keep, every)
        flops = count_flops(lambda counted=counted: train_once(counted, tokens))
        models[mode] = model = checkpoint_blocks(Transformer(config), keep, every)
        with memory(model) as census:
            _train_fused(model, tokens)
        found[mode] = {"flops": flops, "activation": census.peak.activation, "seconds": float("inf")}
    for _ in range(repeats):
        for mode, model in models.items():  # in turn, so that other work on the machine hits all alike
            start = time.perf_counter()
            _train_fused(model, tokens)
            found[mode]["seconds"] = min(found[mode]["seconds"], time.perf_counter() - start)
    for mode, numbers in found.items():
        numbers["predicted_flops"] = batch * seq * _flops(config, seq, mode)
    return found


def _train_fused(model: Transformer, tokens: Tensor) -> None:
    model.zero_grad()
    nll, count = model(tokens[:, :-1], targets=tokens[:, 1:])
    (nll / count).backward()


def _flops(config: ModelConfig, seq: int, mode: str) -> float:
    plain, full = (training_flops(config, seq, recompute=again).total for again in (False, True))
    share = {"none": 0.0, "every 2nd block": -(-config.num_layers // 2) / config.num_layers, "selective": 0.0}
    return plain + (full - plain) * share.get(mode, 1.0)


# Where the time of a step goes.


@one_thread()
def step_split(
    peak_flops: float | None,
    activation_checkpointing: str = "none",
    batch: int = 4,
    seq: int = 128,
    accumulate: int = 1,
    steps: int = 3,
) -> dict[str, float]:
    """Seconds of each part of a step (median over steps), tokens per second and MFU, of the target model on text."""
    config = TrainConfig(
        preset("target", text_tokens().vocab_size, seq),
        seq_len=seq,
        batch_size=batch,
        activation_checkpointing=activation_checkpointing,
        accumulate=accumulate,
    )
    with Trainer(config, text_tokens(), peak_flops=peak_flops, workers=0) as trainer:
        trainer.step()
        done = [trainer.step() for _ in range(steps)]
    split = {part: float(np.median([getattr(step.time, part) for step in done])) for part in PARTS}
    middle = sorted(done, key=lambda step: step.time.total)[len(done) // 2]
    return split | {"step": middle.time.total, "tokens_per_s": middle.tokens_per_s, "mfu": middle.mfu or 0.0}


KINDS_OF_OPERATION = ("matmul", "attention", "optimizer", "all else")


@cache
@one_thread()
def profiled(batch: int = 4, seq: int = 128) -> list[dict[str, Any]]:
    """Operations of one step of the target model in order, from torch's profiler: name, kind, start and seconds of its
    own. (`torch.profiler.profile` adds GPU streams and writes the same as a Chrome trace.)"""
    config = TrainConfig(preset("target", text_tokens().vocab_size, seq), seq_len=seq, batch_size=batch)
    with Trainer(config, text_tokens(), workers=0) as trainer:
        trainer.step()
        with torch.autograd.profiler.profile(use_kineto=False) as profile:
            trainer.step()
    timed = (each for each in profile.function_events if each.name.startswith("aten::"))
    events = [each for each in timed if each.self_cpu_time_total > 0]
    first = min(each.time_range.start for each in events)
    return [
        {
            "name": each.name,
            "kind": _kind(each.name),
            "start": (each.time_range.start - first) * 1e-6,
            "seconds": each.self_cpu_time_total * 1e-6,
        }
        for each in sorted(events, key=lambda each: each.time_range.start)
    ]


def _kind(name: str) -> str:
    if "adam" in name:
        return "optimizer"
    if "attention" in name:
        return "attention"
    return "matmul" if name in ("aten::mm", "aten::bmm", "aten::addmm") else "all else"


# Fewer bits.


def spread_values(count: int = 100_000, low: float = -12.0, high: float = -2.0) -> Tensor:
    """Log-uniform from 10^low to 10^high: as many values per decade everywhere."""
    draw = torch.Generator().manual_seed(0)
    return 10 ** (torch.rand(count, generator=draw, dtype=torch.float64) * (high - low) + low)


@one_thread()
def text_gradients(batch: int = 4, seq: int = 128) -> Tensor:
    """Gradients of the *activations* between the blocks of the untrained target model on text: what 16-bit backward
    carries along the residual stream."""
    model = Transformer(preset("target", text_tokens().vocab_size, seq))
    seen: list[Tensor] = []
    for block in model.blocks:
        block.mlp.down_proj.register_full_backward_hook(lambda module, inner, outer: seen.append(outer[0]))
    inputs, targets = TokenDataset(text_tokens(), seq).batch(list(range(batch)))
    nll, count = model(inputs, targets=targets)
    (nll / count).backward()
    return torch.cat([gradient.flatten() for gradient in seen])


# Broken runs.


@dataclass(frozen=True)
class Tuning:
    """What a fine-tuning showed, per step: loss and gradient norm; moved: share of the weights that ever changed."""

    loss: list[float]
    grad_norm: list[float]
    moved: float


CONFIG = ModelConfig(4096, 64, 128, 2, 4, 2, max_seq_len=64, tie_embeddings=True)


@cache
@one_thread()
def trained(steps: int = 60) -> dict[str, Tensor]:
    """Weights of a small model after a short training on the standard library: something to go on from."""
    chosen = TrainConfig(CONFIG, seq_len=64, batch_size=8, steps=steps, lr=5e-3, warmup_steps=5)
    with Trainer(chosen, text_tokens(), workers=0) as trainer:
        for _ in range(steps):
            trainer.step()
        return trainer.model.state_dict()


@one_thread()
def tune(precision: str = "fp32", zero_grad: bool = True, lr: float = 2e-5, steps: int = 60) -> Tuning:
    """Goes on from `trained()` with a small learning rate, on four windows of text again and again."""
    inputs, targets = TokenDataset(text_tokens(), 64).batch([500, 501, 502, 503])
    chosen = PRECISIONS[precision]
    model = Transformer(CONFIG, seed=None, dtype=chosen.weights)
    model.load_state_dict(trained())
    masters = MasterWeights(model.parameters()) if chosen.master else None
    stepped = masters.masters if masters else list(model.parameters())
    optimizer = torch.optim.AdamW(stepped, lr=lr, weight_decay=0.0, fused=True)
    before, losses, norms = [weight.detach().clone() for weight in model.parameters()], [], []
    for _ in range(steps):
        nll, count = model(inputs, targets=targets)
        loss = nll / count
        loss.backward()
        if masters:
            masters.cast_gradients()
        losses.append(loss.item())
        norms.append(global_norm(dict(enumerate(gradients_of(stepped)))).item())
        optimizer.step()
        if masters:
            masters.write_weights()
        if zero_grad:
            optimizer.zero_grad()
    changed = sum(int((a != b).sum()) for a, b in zip(before, model.parameters(), strict=True))
    return Tuning(losses, norms, changed / sum(weight.numel() for weight in before))


@cache
def tunings() -> dict[str, Tuning]:
    """Three fine-tunings from the same weights: A without masters, B never clears its gradients, C healthy."""
    return {"A": tune("bf16-pure"), "B": tune(zero_grad=False), "C": tune("bf16-master")}


# The same in production.


def unequal_batches(config: ModelConfig, lengths: Sequence[int] = (60, 9, 30)) -> list[tuple[Tensor, Tensor]]:
    """Microbatches of one row each, of which only the first `length` targets count."""
    draw = torch.Generator().manual_seed(0)
    batches = []
    for length in lengths:
        inputs, targets = torch.randint(0, config.vocab_size, (2, 1, max(lengths)), generator=draw)
        targets[:, length:] = -100
        batches.append((inputs, targets))
    return batches


def big_batch_gradient(batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The gradient of the mean over all counted tokens of all batches, at once."""
    model = Transformer(CONFIG, dtype=torch.float64)
    inputs, targets = (torch.cat(part) for part in zip(*batches, strict=True))
    nll, count = model(inputs, targets=targets)
    (nll / count).backward()
    return gradient(model)


def mean_of_means_gradient(batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The gradient of the mean over batches of each batch's mean: wrong where they count unequal numbers of tokens."""
    model = Transformer(CONFIG, dtype=torch.float64)
    for inputs, targets in batches:
        nll, count = model(inputs, targets=targets)
        (nll / count / len(batches)).backward()
    return gradient(model)


def gradient(model: nn.Module) -> Tensor:
    """All gradients in one row."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@one_thread()
def accelerate_gradient(config: ModelConfig, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The gradient that the loop of accelerate's documentation leaves: each microbatch's mean, accumulated."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(batches))
    bare = Transformer(config, dtype=torch.float64)
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.0))
    for inputs, targets in batches:
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(inputs), targets))
            optimizer.step()
    return gradient(bare)


# What 16 bits lose.


def repeated_update(dtype: torch.dtype, start: float = 1.0, update: float = 1e-3, steps: int = 1000) -> float:
    """start + update + update + ... in `dtype`. bfloat16 has 8 bits of mantissa: next to 1.0 its steps are 2^-7, and
    1 + 0.001 rounds back to 1. A thousand updates leave a weight where it was; float32 reaches 2."""
    weight = torch.tensor(start, dtype=dtype)
    for _ in range(steps):
        weight += update
    return weight.item()


def flushed_share(values: Tensor, dtype: torch.dtype, scale: float = 1.0) -> float:
    """Share of non-zero `values` that are zero once stored in `dtype` after multiplication by `scale`."""
    nonzero = values[values != 0]
    return ((nonzero * scale).to(dtype) == 0).double().mean().item()
