"""Lab 04's peers: DDP + ZeroRedundancyOptimizer, FSDP2 and accelerate on the same ranks, model and tokens.

What they send is read from the loopback counter, since they know nothing of minillm's ledger. On gloo a reduce-scatter
runs as an all-reduce, so FSDP2 moves 4P(N-1)/N here, and 3P(N-1)/N with NCCL.
"""

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course.lab04_zero.experiments import MODEL, PSI, tokens
from course.shared.measuring import on_the_wire
from minillm import measure
from minillm.comm import Group, launch
from minillm.model import Transformer, cross_entropy
from minillm.predict.training.sharding import fully_shard_units

LR = 3e-3
Build = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


def ddp_with_zero() -> tuple[nn.Module, torch.optim.Optimizer]:
    """torch's ZeRO-1: DDP all-reduces whole gradients, then each rank broadcasts what it has stepped."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(Transformer(MODEL, seed=0))
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LR)


def fsdp2() -> tuple[nn.Module, torch.optim.Optimizer]:
    """torch's stage 3: `fully_shard` per block, then once around everything else."""
    from torch.distributed.fsdp import fully_shard

    model, mesh = Transformer(MODEL, seed=0), dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=LR)


def with_accelerate() -> tuple[nn.Module, torch.optim.Optimizer]:
    """accelerate, asked for FSDP2. On a CPU it gives DDP instead, and does not say so."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    model = Transformer(MODEL, seed=0)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=LR))


PEERS: dict[str, Build] = {
    "DDP + ZeroRedundancyOptimizer": ddp_with_zero,
    "FSDP2": fsdp2,
    "accelerate": with_accelerate,
}


def run_peers(group: Group, names: list[str]) -> dict[str, dict[str, Any]]:
    """By peer: losses of two steps, bytes on the wire per step and rank by K, collectives, memory by kind."""
    warnings.simplefilter("ignore")
    return {name: _run(group, PEERS[name], (1,) if name == "accelerate" else (1, 4)) for name in names}


def _run(group: Group, build: Build, accumulates: tuple[int, ...]) -> dict[str, Any]:
    model, optimizer = build()
    losses = [_step(group, model, optimizer, step, 1) for step in range(2)]
    step = partial(_step, group, model, optimizer, 2)
    wire = {k: on_the_wire(group, partial(step, k), repeats=3 if k == 1 else 2) for k in accumulates}
    calls, memory = _count(group, model, optimizer)
    return {"losses": losses, "wire": wire, "calls": calls, "memory": memory}


def _step(group: Group, model: nn.Module, optimizer: Any, step: int, accumulate: int, look: Any = None) -> float:
    total = torch.zeros(())
    for microbatch in range(accumulate):
        batch = tokens(step, microbatch, group.rank, group.world_size, accumulate)
        quiet = getattr(model, "no_sync", contextlib.nullcontext) if microbatch < accumulate - 1 else None
        with quiet() if quiet else contextlib.nullcontext():
            loss = cross_entropy(model(batch[:, :-1]), batch[:, 1:]) / accumulate
            loss.backward()
        total += loss.detach()
    if look:
        look()
    optimizer.step()
    optimizer.zero_grad()
    return group.all_reduce(total.double(), "avg").item()


def _count(group: Group, model: nn.Module, optimizer: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Collectives that torch started in one step, and bytes by kind between backward and step."""
    from torch.distributed.tensor.debug import CommDebugMode

    inner = getattr(optimizer, "optim", getattr(optimizer, "optimizer", optimizer))
    held: dict[str, int] = {}
    with CommDebugMode() as debug:
        _step(group, model, optimizer, 2, 1, lambda: held.update(measure.memory(model, inner).live.items()))
    calls = {str(name).removeprefix("c10d.").strip("_"): count for name, count in debug.get_comm_counts().items()}
    return calls, {kind: size for kind, size in held.items() if size}


def peers(names: tuple[str, ...] = tuple(PEERS), nproc: int = 4) -> list[dict[str, dict[str, Any]]]:
    """`run_peers` by rank."""
    return launch(run_peers, nproc, list(names), device="cpu")


def byte_rows(ranks: list[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Bytes per rank and step of the sharding peers, predicted and on the wire."""
    world, rows = len(ranks), []
    for name, found in ranks[0].items():
        for k, sent in found["wire"].items():
            predicted = fsdp2_bytes(k, world) if "FSDP2" in name else 3 * 4 * PSI * (world - 1) // world
            rows.append({"name": name, "accumulate": k, "predicted": predicted, "witness": "wire", "sent": sent})
    return rows


def fsdp2_bytes(accumulate: int, world_size: int, on_gloo: bool = True) -> int:
    """What FSDP2 sends per rank and step: it gathers blocks twice and the root once, which stays for backward; a
    reduce-scatter of everything costs twice as much on gloo."""
    blocks, rest = fully_shard_units(MODEL)
    per_microbatch = 2 * sum(blocks) + rest + (2 if on_gloo else 1) * (sum(blocks) + rest)
    return accumulate * 4 * per_microbatch * (world_size - 1) // world_size
