"""Lab 03's measurements on a real transformer: bytes and counts, equality with one process, memory, compression.

The clock is in `experiments_overlap.py`, torch's DDP in `experiments_production.py`. Nothing here depends on time.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from minillm import measure
from minillm.comm import Group, launch
from minillm.data.sampler import ShardedSampler
from minillm.model import ModelConfig, Transformer, cross_entropy
from minillm.parallel import BucketedDDP
from minillm.parallel.data_parallel import compression as compress
from minillm.parallel.data_parallel.packing import assign

CONFIG = ModelConfig(vocab_size=256, hidden_size=64, intermediate_size=192, num_layers=2, num_heads=4)
SEQ = 32
CAP_MB = 0.125


def model(dtype: torch.dtype = torch.float32) -> Transformer:
    return Transformer(CONFIG, seed=0, dtype=dtype)


def tokens(rank: int, batch: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """(inputs, targets), each [batch, SEQ], of a rank: other ones for each rank and step."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(CONFIG.vocab_size, (batch, SEQ + 1), generator=draw)
    return ids[:, :-1], ids[:, 1:]


def sizes(module: nn.Module) -> list[int]:
    """Elements of each trainable parameter, in the order in which their gradients become ready, roughly."""
    return [p.numel() for p in module.parameters() if p.requires_grad][::-1]


def gradient_bytes(itemsize: int = 4) -> int:
    """P: bytes of all gradients of the model."""
    return itemsize * sum(sizes(model()))


# Bytes and counts.


def bytes_by_setting(group: Group) -> dict[str, dict[str, Any]]:
    """What one step of BucketedDDP sends on this rank, for other batches, bucket sizes and microbatches."""
    settings = {
        "batch 1": (1, CAP_MB, 1, True),
        "batch 8": (8, CAP_MB, 1, True),
        "buckets four times as large": (1, 4 * CAP_MB, 1, True),
        "4 microbatches, no_sync": (1, CAP_MB, 4, True),
        "4 microbatches, plain": (1, CAP_MB, 4, False),
    }
    found = {}
    for name, (batch, cap_mb, microbatches, sparing) in settings.items():
        ddp = BucketedDDP(model(), group, bucket_cap_mb=cap_mb, first_bucket_mb=cap_mb)
        for _ in range(2):  # after the first step the buckets are packed in the order of readiness
            with measure.ledger() as led:
                ddp.zero_grad()
                accumulated(ddp, *tokens(group.rank, batch * microbatches), microbatches, sparing)
        found[name] = {"bytes": led.bytes("all_reduce"), "all_reduces": led.calls["all_reduce"]}
    return found


def accumulated(ddp: nn.Module, x: Tensor, y: Tensor, microbatches: int, sparing: bool = True) -> None:
    """Backward on equal microbatches; sparing: all but the last under `no_sync`."""
    for index, (inputs, targets) in enumerate(zip(x.chunk(microbatches), y.chunk(microbatches), strict=True)):
        wait = sparing and index < microbatches - 1
        with ddp.no_sync() if wait else contextlib.nullcontext():
            (cross_entropy(ddp(inputs), targets) / microbatches).backward()


def same_as_alone(group: Group, batch: int = 4, steps: int = 3) -> dict[str, Any]:
    """Replicas under AdamW beside one process with the whole batch: gradients at first, weights at last."""
    ddp, alone = BucketedDDP(model(), group, bucket_cap_mb=CAP_MB), model()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (ddp, alone)]
    worst = 0.0
    for step in range(steps):
        parts = [tokens(rank, batch, step) for rank in range(group.world_size)]
        for module, (x, y) in (
            (ddp, parts[group.rank]),
            (alone, tuple(torch.cat(both) for both in zip(*parts, strict=True))),
        ):
            module.zero_grad()
            cross_entropy(module(x), y).backward()
        if step == 0:
            worst = max(map(relative, (p.grad for p in ddp.parameters()), (p.grad for p in alone.parameters())))
        for optimizer in optimizers:
            optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    everyone = group.all_gather(weights[None])
    return {"gradient_error": worst, "replicas_apart": (everyone - everyone[0]).abs().max().item()}


def relative(found: Tensor, right: Tensor) -> float:
    return ((found - right).norm() / right.norm().clamp(min=1e-30)).item()


def seen_in_a_step(group: Group, microbatch: int = 4, microbatches: int = 8, num_samples: int = 10_000) -> int:
    """Different samples that all ranks together consume before the optimizer steps once."""
    sampler = ShardedSampler(num_samples, microbatch, group.rank, group.world_size)
    mine = [int(i) for m in range(microbatches) for i in sampler.indices(m * sampler.global_batch)]
    return len({i for rank in group.gather_objects(mine) for i in rank})


def single_process(group: Group) -> int:
    """Bytes that this rank sends in a step of `torch.nn.DataParallel`, where one process drives all devices: device 0
    hands its weights to each other one and takes their gradients in."""
    flat = torch.zeros(sum(sizes(model())))
    with measure.ledger() as led:
        for other in range(1, group.world_size):
            for source, target in ((0, other), (other, 0)):  # replicate before forward, reduce after backward
                if group.rank == source:
                    group.send(flat, target)
                elif group.rank == target:
                    group.recv(flat, source)
    return led.bytes()


def activation_peaks(batch: int = 128, microbatches: int = 4) -> dict[str, int]:
    """Peak bytes of activations of a small network: one microbatch, several one after the other, all at once."""
    found = {}
    for name, size, count in (
        ("one microbatch", batch // microbatches, 1),
        (f"{microbatches} microbatches", batch // microbatches, microbatches),
        ("the whole batch at once", batch, 1),
    ):
        net = student()
        with measure.memory(net) as census:
            for _ in range(count):
                net(torch.randn(size, LAYERS[0])).square().mean().backward()
        found[name] = census.peak.activation
    return found


# Compression.

LAYERS = (64, 96, 96, 16)
Reduce = Callable[[Tensor, Group], None]


def student(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [m for a, b in pairwise(LAYERS) for m in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def losses(group: Group, reduces: Mapping[str, Reduce], steps: int = 60, lr: float = 1.0) -> dict[str, Any]:
    """Train the same small network with each way to average a flat gradient: losses over all ranks, bytes per step."""
    teacher, found = student(seed=1), {}
    for name, reduce in reduces.items():
        net, curve = student(), []
        parameters = list(net.parameters())
        flat = torch.zeros(sum(p.numel() for p in parameters))
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p)
        with measure.ledger() as led:
            for step in range(steps):
                x, y = _lesson(teacher, step, group.rank)
                flat.zero_()
                loss = (net(x) - y).square().mean()
                loss.backward()
                reduce(flat, group)
                with torch.no_grad():
                    for p in parameters:
                        p -= lr * p.grad
                curve.append(loss.item())
        everyone = torch.tensor(group.gather_objects(curve))
        found[name] = {"losses": everyone.mean(0).tolist(), "bytes": led.bytes() / steps}
    return found


def compressors(share: float = 0.01) -> dict[str, Reduce]:
    """Dense, and top-k with and without what earlier steps owe, by minillm's own hook."""

    def through(hook: Callable) -> Reduce:
        buckets: list = []

        def reduce(flat: Tensor, group: Group) -> None:
            if not buckets:
                buckets.extend(assign([("flat", nn.Parameter(flat))], math.inf, multiple_of=group.world_size))
            padded = buckets[0].empty()
            padded[: flat.numel()] = flat
            hook(buckets[0], padded, group)
            flat.copy_(padded[: flat.numel()])

        return reduce

    return {
        "dense": lambda flat, group: group.all_reduce(flat, "avg"),
        "int8, error feedback": through(compress.int8_error_feedback),
        f"top {share:.0%}, error feedback": through(compress.top_k(share)),
        f"top {share:.0%}, no feedback": through(compress.top_k(share, error_feedback=False)),
    }


def with_yours(group: Group, reduce: Callable, share: float = 0.01) -> dict[str, Any]:
    """`losses` of every compressor and of a learner's reduce(gradient, residual, k, group)."""
    residuals: dict[str, Tensor] = {}

    def yours(flat: Tensor, group: Group) -> None:
        residual = residuals.setdefault("owed", torch.zeros_like(flat))
        reduce(flat, residual, -(-flat.numel() // round(1 / share)), group)

    forms = losses(group, compressors(share) | {f"yours, top {share:.0%}": yours})
    return {"world_size": group.world_size, "elements": sum(p.numel() for p in student().parameters()), "forms": forms}


def compression(world_size: int = 2, share: float = 0.01) -> dict[str, Any]:
    """Loss curves and bytes of each compressor."""
    found = launch(_compression, world_size, share)[0]
    return {"world_size": world_size, "elements": sum(p.numel() for p in student().parameters()), "forms": found}


def _compression(group: Group, share: float) -> dict[str, Any]:
    return losses(group, compressors(share))


# A larger batch.


def batch_and_rate(batch: int = 16, factor: int = 8, samples: int = 4096, lr: float = 1.0) -> dict[str, list[float]]:
    """Losses after each step of SGD on the same samples: in small batches, and in batches `factor` times as large with
    the same learning rate, with `factor` times the rate, and with that rate reached over the first fifth of the steps.
    """
    teacher, found = student(seed=1), {}
    x = torch.randn(samples, LAYERS[0], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y = teacher(x) * 3
    large = samples // (factor * batch)
    runs = {
        "batch": (batch, lambda step: lr),
        f"batch x {factor}, the same rate": (factor * batch, lambda step: lr),
        f"batch x {factor}, rate x {factor}": (factor * batch, lambda step: factor * lr),
        "    and warm-up": (factor * batch, lambda step: factor * lr * min(1.0, (step + 1) / (large // 5))),
    }
    for name, (rows, rate) in runs.items():
        net, curve = student(), []
        for step, (inputs, targets) in enumerate(zip(x.split(rows), y.split(rows), strict=True)):
            loss = (net(inputs) - targets).square().mean()
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            with torch.no_grad():
                for weight, gradient in zip(net.parameters(), gradients, strict=True):
                    weight -= rate(step) * gradient
            curve.append(loss.item())
        found[name] = curve
    return found


# A mistake that the loss does not show.


def division(group: Group, steps: int = 30) -> dict[str, dict[str, Any]]:
    """The same training with gradients averaged and only added up, under AdamW and under SGD."""
    makers = {
        "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        "SGD": lambda parameters: torch.optim.SGD(parameters, lr=8.0),
    }
    teacher, found = student(seed=1), {}
    for optimizer_name, make in makers.items():
        for op in ("avg", "sum"):
            net, curve, norms = student(), [], []
            optimizer, buckets = make(net.parameters()), assign(net.named_parameters(), math.inf)
            for step in range(steps):
                x, y = _lesson(teacher, step, group.rank)
                net.zero_grad()
                loss = (net(x) - y).square().mean()
                loss.backward()
                flat = buckets[0].empty()
                for view, p in zip(buckets[0].views(flat), buckets[0].parameters, strict=True):
                    view.copy_(p.grad)
                    p.grad = view
                group.all_reduce(flat, op)
                norms.append(flat.norm().item())
                optimizer.step()
                curve.append(loss.item())
            everyone = torch.tensor(group.gather_objects(curve))
            found[f"{optimizer_name}, {op}"] = {"losses": everyone.mean(0).tolist(), "norm": norms[0]}
    return found


def _lesson(teacher: nn.Module, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """32 samples of a step and rank, labelled by the teacher."""
    x = torch.randn(32, LAYERS[0], generator=torch.Generator().manual_seed(step * 7 + rank))
    with torch.no_grad():
        return x, teacher(x) * 3
