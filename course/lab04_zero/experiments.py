"""Lab 04's measurements: what each stage of ZeRO holds and sends, with what came of the training.

Stage 0 is plain data parallelism (one averaged copy of everything on every rank), stages 1 and 2 are `ZeroOptimizer`,
stage 3 is `FullyShard`. All of them train the same small transformer on the same tokens.
"""

import contextlib
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from course.shared.groups import on_groups
from minillm import measure
from minillm.comm import Group, launch
from minillm.model import ModelConfig, Transformer, cross_entropy
from minillm.parallel import BucketedDDP, FullyShard, ZeroOptimizer
from minillm.parallel.data_parallel.packing import assign
from minillm.predict import comms
from minillm.predict.model import ADAM_FP32, ADAM_MIXED, parameters
from minillm.predict.training import sharding
from minillm.train import TrainConfig, adamw
from minillm.train.optimizer import Updater

MODEL = ModelConfig(
    vocab_size=256, hidden_size=64, intermediate_size=160, num_layers=4, num_heads=4, num_kv_heads=2, max_seq_len=64
)
PSI = parameters(MODEL).total
STAGES = (0, 1, 2, 3)
NAMES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
SEQ, GLOBAL_ROWS, BUCKET_MB = 16, 16, 0.25


@dataclass(frozen=True)
class Setup:
    """One way to train. accumulate: microbatches per step; mixed: bf16 weights with float32 masters."""

    stage: int
    world_size: int
    accumulate: int = 1
    mixed: bool = False
    steps: int = 2
    offload: Any = None

    @property
    def name(self) -> str:
        return NAMES[self.stage]


@dataclass(frozen=True)
class ZeroRecord:
    """What one rank saw. sent, calls, seconds: of the last step; memory: its bytes by kind between backward and step.

    host: bytes that went down to an offloaded optimizer and up again, in all steps.
    """

    losses: list[float]
    sent: int
    calls: Counter[str]
    memory: dict[str, int]
    seconds: float
    host: tuple[int, int] = (0, 0)


# Rank programs.


def make(named) -> torch.optim.Optimizer:
    return adamw(named, TrainConfig(MODEL, seq_len=SEQ, lr=3e-3))


def tokens(step: int, microbatch: int, rank: int, world_size: int, accumulate: int) -> Tensor:
    """[rows, seq + 1]: this rank's rows of a global batch, which is the same however it is dealt out. They count up."""
    starts = torch.randint(MODEL.vocab_size, (GLOBAL_ROWS, 1), generator=torch.Generator().manual_seed(step))
    return ((starts + torch.arange(SEQ + 1)) % MODEL.vocab_size)[
        (rank * accumulate + microbatch) :: world_size * accumulate
    ]


def train(group: Group, setup: Setup) -> ZeroRecord:
    """A few steps; what the last one sent and held."""
    model = Transformer(MODEL, seed=0, dtype=torch.bfloat16 if setup.mixed else torch.float32)
    trainer = FORMS[setup.stage](model, group, setup)
    losses = []
    for step in range(setup.steps):
        group.barrier()
        with measure.ledger() as led, measure.span("step"):
            loss = torch.zeros(())
            for microbatch in range(setup.accumulate):
                batch = tokens(step, microbatch, group.rank, group.world_size, setup.accumulate)
                last = microbatch == setup.accumulate - 1
                with contextlib.nullcontext() if last else trainer.no_sync():
                    part = cross_entropy(trainer.module(batch[:, :-1]), batch[:, 1:]) / setup.accumulate
                    part.backward()
                loss += part.detach().float()
            held = measure.memory(trainer.module, trainer.optimizer).live
            trainer.step()
        losses.append(group.all_reduce(loss.double(), "avg").item())
    memory = {kind: size for kind, size in held.items() if size}
    return ZeroRecord(losses, led.bytes(), led.calls, memory, led.spans[-1].seconds, trainer.host())


class Replicated:
    """Stage 0: all of it on every rank, gradients all-reduced in buckets."""

    def __init__(self, model: nn.Module, group: Group, setup: Setup):
        self.module = BucketedDDP(model, group, bucket_cap_mb=BUCKET_MB)
        self.updater = Updater(model.named_parameters(), make, setup.mixed)
        self.optimizer, self.no_sync = self.updater.inner, self.module.no_sync

    def step(self) -> None:
        self.updater.prepare_gradients()
        self.updater.step()
        self.updater.zero_grad()

    def host(self) -> tuple[int, int]:
        return 0, 0


class Sharded:
    """Stages 1 and 2."""

    def __init__(self, model: nn.Module, group: Group, setup: Setup):
        how = {"bucket_cap_mb": BUCKET_MB, "master": setup.mixed, "offload": setup.offload}
        self.module, self.optimizer = model, ZeroOptimizer(model, group, setup.stage, make=make, **how)
        self.no_sync = self.optimizer.no_sync

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def host(self) -> tuple[int, int]:
        return self.optimizer.home.down_bytes, self.optimizer.home.up_bytes


class Spread(Sharded):
    """Stage 3."""

    def __init__(self, model: nn.Module, group: Group, setup: Setup):
        self.module = FullyShard(model, group, master=setup.mixed, offload=setup.offload)
        self.optimizer = self.module.optimizer(make)
        self.no_sync = self.module.no_sync

    def host(self) -> tuple[int, int]:
        return self.module.home.down_bytes, self.module.home.up_bytes


FORMS = (Replicated, Sharded, Sharded, Spread)


def train_all(group: Group, setups: Sequence[Setup]) -> list[ZeroRecord | None]:
    """Every setup on the first `world_size` ranks."""
    return on_groups(group, setups, lambda setup, part: train(part, setup))


def compare(setups: Sequence[Setup], link: Any = None) -> dict[Setup, list[ZeroRecord]]:
    """Each setup's findings by rank, in one launch."""
    ranks = launch(train_all, max(setup.world_size for setup in setups), list(setups), link=link, device="cpu")
    return {setup: [rank[i] for rank in ranks[: setup.world_size]] for i, setup in enumerate(setups)}


def reduced_in(group: Group) -> dict[str, float]:
    """Stage 3 in bf16, gradients reduced in bf16 and in fp32: bytes per step, and the error of the mean of all ranks.

    The error is that of a reduce-scatter of this rank's own bf16 gradient, relative to the mean in float64.
    """
    batch, found = tokens(0, 0, group.rank, group.world_size, 1), {}
    plain = Transformer(MODEL, seed=0, dtype=torch.bfloat16)
    cross_entropy(plain(batch[:, :-1]), batch[:, 1:]).backward()
    own = torch.cat([p.grad.flatten() for p in plain.parameters()])
    own = torch.nn.functional.pad(own, (0, -len(own) % group.world_size))
    exact = group.all_reduce(own.double(), "avg").chunk(group.world_size)[group.rank]
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        model = FullyShard(Transformer(MODEL, seed=0, dtype=torch.bfloat16), group, master=True, reduce_dtype=dtype)
        with measure.ledger() as led:
            cross_entropy(model(batch[:, :-1]), batch[:, 1:]).backward()
        mean = group.reduce_scatter(own.to(dtype), op="avg").double()
        found |= {f"{name} bytes": led.bytes(), f"{name} error": ((mean - exact).norm() / exact.norm()).item()}
    return found


# Predictions.


def predicted_bytes(setup: Setup) -> int:
    """Bytes each rank sends in one step, exactly: padding of buckets and units included."""
    n, itemsize = setup.world_size, 2 if setup.mixed else 4
    if setup.stage == 0:
        return sum(comms.ring_all_reduce(size, itemsize, n).sent_per_rank[0] for size in bucket_sizes())
    if setup.stage < 3:
        state = ADAM_MIXED if setup.mixed else ADAM_FP32
        return sharding.Zero(sharding.padded_all(bucket_sizes(), n), n, setup.stage, state, setup.accumulate).sent
    sizes = sharding.fully_shard_units(MODEL)
    return sharding.fully_shard_traffic(*sizes, n, itemsize=itemsize, microbatches=setup.accumulate).bytes


def textbook_bytes(setup: Setup) -> float:
    """The same as the textbook has it: 2P, 2P and 3P, times (N-1)/N; every microbatch of stage 3, and the
    reduce-scatters of stage 2, count again."""
    payload, k = (2 if setup.mixed else 4) * PSI, setup.accumulate
    times = {0: 2, 1: 2, 2: k + 1, 3: 3 * k}[setup.stage]
    return times * payload * (setup.world_size - 1) / setup.world_size


def predicted_state(setup: Setup) -> int:
    """Bytes of weights, gradients, masters and moments on each rank: 16Ψ for stage 0, 16Ψ/N for stage 3."""
    state = ADAM_MIXED if setup.mixed else ADAM_FP32
    return state.per_rank(PSI, setup.world_size, setup.stage)


def predicted_kinds(setup: Setup) -> dict[str, int]:
    """The same by kind. Mixed stage 3 keeps float32 shards and gathers 16-bit copies: 4 + 4 + 8, also 16Ψ/N."""
    n, state = setup.world_size, ADAM_MIXED if setup.mixed else ADAM_FP32
    if setup.stage == 3:
        held = sharding.fully_shard_held(*sharding.fully_shard_units(MODEL), n)
        return {"parameter": held.parameter, "gradient": held.gradient, "optimizer": held.optimizer}
    if setup.stage == 0:
        moved = state.master + state.moments
        return {"parameter": state.parameter * PSI, "gradient": state.gradient * PSI, "optimizer": moved * PSI}
    held = sharding.Zero(sharding.padded_all(bucket_sizes(), n), n, setup.stage, state)
    return {"parameter": held.parameter, "gradient": held.gradient, "optimizer": held.optimizer}


def state_rows(found: dict[Setup, list[ZeroRecord]]) -> list[dict[str, Any]]:
    """Bytes per rank and kind, predicted and measured on rank 0."""
    return [
        {"name": s.name, "world_size": s.world_size, "mixed": s.mixed, "formula": predicted_state(s)}
        | {"predicted": predicted_kinds(s), "measured": ranks[0].memory}
        for s, ranks in found.items()
    ]


def byte_rows(found: dict[Setup, list[ZeroRecord]]) -> list[dict[str, Any]]:
    """Bytes that the busiest rank sends in a step, predicted and by the ledger."""
    return [
        {"name": s.name, "accumulate": s.accumulate, "predicted": predicted_bytes(s), "witness": "ledger"}
        | {"sent": max(f.sent for f in ranks)}
        for s, ranks in found.items()
    ]


def bucket_sizes() -> list[int]:
    """Elements of the buckets that `ZeroOptimizer` makes of the model."""
    model = Transformer(MODEL, seed=None, device="meta")
    return [bucket.numel for bucket in assign(model.named_parameters(), BUCKET_MB * 2**20)]


# A learner's pieces under a transformer.


def train_with(group: Group, partition: Any, zero_one: Any, steps: int) -> list[float]:
    """Losses with a learner's partition and stage 1; every rank starts from a seed of its own."""
    model = Transformer(MODEL, seed=group.rank)
    parameters = list(model.parameters())
    length, _ = partition([p.numel() for p in parameters], group.world_size, group.rank)
    flat, start = torch.zeros(length * group.world_size), 0
    for p in parameters:  # the model's weights become views into the flat buffer
        view = flat[start : start + p.numel()].view(p.shape)
        p.data, start = view.copy_(p.data), start + p.numel()
    optimizer, losses = zero_one(flat, group, lambda shards: torch.optim.AdamW(shards, lr=3e-3)), []
    for step in range(steps):
        batch = tokens(step, 0, group.rank, group.world_size, 1)
        loss = cross_entropy(model(batch[:, :-1]), batch[:, 1:])
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        optimizer.step(torch.nn.functional.pad(gradient, (0, len(flat) - len(gradient))))
        losses.append(group.all_reduce(loss.detach(), "avg").item())
    return losses


def four_ranks_and_one(partition: Any, zero_one: Any, steps: int = 3) -> list[list[float]]:
    return [launch(train_with, n, partition, zero_one, steps, device="cpu")[0] for n in (4, 1)]


def offloaded(found: dict[Setup, list[ZeroRecord]]) -> list[tuple[str, float, float, int, bool]]:
    """ZeRO-2 on 2 ranks with its optimizer in host memory and in files: (where, bytes down and up per step, optimizer
    bytes left in the process, the same losses as without)."""
    with tempfile.TemporaryDirectory() as folder:
        setups = {
            name: Setup(2, 2, mixed=True, offload=home)
            for name, home in (("host memory", "cpu"), ("files", Path(folder)))
        }
        ranks_of = compare(list(setups.values()))
    lines = []
    for name, setup in setups.items():
        ranks = ranks_of[setup]
        down, up = (sum(rank.host[i] for rank in ranks) / setup.steps for i in range(2))
        same = ranks[0].losses == found[Setup(2, 2, mixed=True)][0].losses
        lines.append((name, down, up, ranks[0].memory.get("optimizer", 0), same))
    return lines
