"""The planner against steps that were run: CPU ranks on emulated links, predicted and measured, layout by layout.

    machine   FLOP/s of one rank and what a layer costs besides, latency and bandwidth of both kinds of link: measured
    layouts   all that the trainer has for 2, 4 and 8 ranks, up to three axes above 1, and ep of experts
    rows      bytes of every axis by ledger, peak memory of the fullest rank, seconds of the fastest of a few steps

Links are so slow that they, and not the cores which the ranks share, make up most of a step. Which rank a token's row
goes to is up to the router: bytes and memory are predicted for the rows that routers counted in the step, each rank by
rank; seconds, before any step, for experts that are asked for equally.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch

from minillm.comm import Group, Link, Topology, launch
from minillm.data import Tokens
from minillm.measure import ledger
from minillm.measure.memory_tracker import memory
from minillm.measure.rates import LinkFit, fit_link
from minillm.model import ModelConfig, MoEConfig
from minillm.model.moe import MoE
from minillm.predict.model import causal_context, training_flops
from minillm.predict.planner import traffic, trainer
from minillm.predict.planner.clusters import Cluster, Device
from minillm.predict.planner.layout import Layout
from minillm.predict.planner.trainer import Host
from minillm.predict.training.memory import rank_step
from minillm.train import TrainConfig, Trainer
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.hybrid import make_strategy

MODEL = ModelConfig(256, 64, 176, 4, 8, 4, max_seq_len=64)
EXPERTS = replace(MODEL, moe=MoEConfig(8, 2, 48, shared_experts=1))
SEQ, MICRO_BATCH = 64, 2
INTRA, INTER = Link(1e-3, 4e6, "inside a node"), Link(4e-3, 1e6, "between nodes")
LARGER = 4  # times a microbatch, to tell what grows with it from what does not
STEPS, PROBES = 3, 5  # timed of each
PATIENCE_S = 300.0  # in one operation: a busy machine is slow, not stuck
TIME, MEMORY = 0.15, 0.05  # errors that count as agreement


@dataclass(frozen=True)
class Measured:
    """Of one rank. sent: bytes of a step by axis; peak: bytes; seconds: of the fastest step; stage: of the pipeline.

    crossing: rows that left this rank for an expert in a step; arrived: of each layer, rows that its experts got per
    microbatch. Both by the routers' counts, not by the ledger's.
    """

    sent: dict[str, int]
    peak: int
    seconds: float
    stage: int
    crossing: int
    arrived: list[float]


@dataclass(frozen=True)
class Row:
    """One layout. seconds: of a step; bytes: by axis, of all ranks; peak: of the fullest rank."""

    layout: str
    ranks: int
    seconds: float
    measured_seconds: float
    bytes: dict[str, int]
    measured_bytes: dict[str, int]
    peak: float
    measured_peak: float

    @property
    def late(self) -> float:
        """Relative error of the predicted time."""
        return self.seconds / self.measured_seconds - 1

    @property
    def full(self) -> float:
        return self.peak / self.measured_peak - 1

    @property
    def exact(self) -> bool:
        return self.bytes == self.measured_bytes


def topology(per_node: int, **how: Any) -> Topology:
    return Topology(per_node, INTER, INTRA, **how)


def layouts(ranks: int) -> list[ParallelConfig]:
    """Layouts of so many ranks that the check takes: every axis alone, in pairs and in threes, with ZeRO."""
    found: dict[ParallelConfig, None] = {}
    for tp, cp, pp in ((t, c, p) for t in (1, 2, 4) for c in (1, 2, 4) for p in (1, 2, 4)):
        if ranks % (tp * cp * pp) or (tp > 1) + (cp > 1) + (pp > 1) > 2:
            continue
        dp = ranks // (tp * cp * pp)
        # ZeRO changes with the layout, so that each stage meets every axis without trying all combinations
        zero = (tp + 2 * cp + pp) % 4 if dp * cp > 1 else 0
        common = {"dp": dp, "tp": tp, "cp": cp, "pp": pp, "accumulate": 4 if pp > 1 else 2}
        found[ParallelConfig(**common, zero=zero, sequence=tp > 1 and cp * pp > 1)] = None
        if tp * cp * pp == 1:
            found |= {ParallelConfig(**common, zero=stage): None for stage in range(4)}
    return list(found)


def expert_layouts(ranks: int) -> list[ParallelConfig]:
    """The same with ep 2 and 4: alone with every ZeRO stage, on 8 ranks with one; beside tp, pp and both."""
    found = []
    for ep, tp, pp in product((2, 4), (1, 2), (1, 2)):
        if ranks % (ep * tp * pp):
            continue
        common = {"dp": ranks // (tp * pp), "ep": ep, "tp": tp, "pp": pp, "accumulate": 4 if pp > 1 else 2}
        stages = range(4) if tp * pp == 1 and ranks <= 4 else [(ep // 2 + tp + 2 * pp + ranks // 8) % 4]
        found += [ParallelConfig(**common, zero=zero, sequence=tp > 1 and ep * pp > 2) for zero in stages]
    return found


def best_of(rows: Sequence[Row]) -> int:
    """Place among the measured of the layout that was predicted to be the fastest of one number of ranks; 1: first."""
    first = min(rows, key=lambda row: row.seconds)
    return 1 + sum(row.measured_seconds < first.measured_seconds for row in rows)


def planned(layout: ParallelConfig) -> Layout:
    """The planner's name for a layout of the trainer, whose mesh has dp outermost."""
    return Layout(
        dp=layout.dp,
        zero=layout.zero,
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        ep=layout.ep,
        micro_batch=MICRO_BATCH,
        microbatches=layout.accumulate,
        sequence=layout.sequence,
        order=("tp", "cp", "pp", "dp"),
    )


def this_machine(ranks: int, per_node: int, model: ModelConfig = MODEL) -> tuple[Cluster, Host]:
    """Measured: one process computes, then the ranks pass messages round rings inside a node and across."""
    ((small, large),) = launch(_compute, 1, model)
    inside, across = launch(_links, ranks, per_node, link=topology(per_node))[0]
    flops = training_flops(model, causal_context(SEQ)).total * MICRO_BATCH * SEQ
    rate = (LARGER - 1) * flops / max(large - small, 0.1 * small)
    device = Device("this machine", rate, 1e12, 1e10, inside.bandwidth_bytes_per_s, 1.0, 1.0)
    latency = (inside.latency_s, across.latency_s)
    shape = {"per_node": min(per_node, ranks), "network": across.bandwidth_bytes_per_s, "latency": latency}
    software = {"link_efficiency": 1.0, "reserved": 0, "fragmentation": 0, "cards_per_ring": 1}
    host = Host(max(0.0, small - flops / rate) / model.num_layers, len(os.sched_getaffinity(0)))
    return Cluster(device, ranks, **shape, **software), host


def _compute(group: Group, model: ModelConfig) -> tuple[float, float]:
    """Seconds of a step of one microbatch, and of one LARGER times as large."""
    torch.set_num_threads(1)  # as of several ranks that share the cores
    found = []
    for batch in (MICRO_BATCH, LARGER * MICRO_BATCH):
        with Trainer(_config(model, batch), _tokens()) as alone:
            alone.step()
            found.append(_fastest(alone.step, group, PROBES))
    return tuple(found)


def _links(group: Group, per_node: int) -> list[LinkFit]:
    """Of a ring inside the first node, and of one of all ranks."""
    node = group.subgroup(list(range(min(per_node, group.world_size))), "node") if per_node > 1 else group
    sizes = (1 << 10, 1 << 14, 1 << 17)
    return [fit_link(ring.world_size, [(size, _round(ring, size, group)) for size in sizes]) for ring in (node, group)]


def _round(ring: Group, size: int, everyone: Group, rounds: int = 6) -> float:
    sent, received = torch.zeros(size // 4), torch.empty(size // 4)

    def turn() -> None:
        if ring.rank >= 0:
            ring.run("turn", sent, lambda: [_pass_on(ring, sent, received) for _ in range(rounds)])

    return _fastest(turn, everyone, PROBES) / rounds


def _pass_on(ring: Group, sent: torch.Tensor, received: torch.Tensor) -> None:
    n, r = ring.world_size, ring.rank
    ring.exchange(send=(sent, (r + 1) % n), recv=(received, (r - 1) % n))


def _fastest(work: Callable[[], object], group: Group, count: int) -> float:
    """Least of `count` runs, each as long as its slowest rank: what else the machine does can only add."""
    seconds = []
    for _ in range(count):
        group.barrier()
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(max(each) for each in zip(*group.gather_objects(seconds), strict=True))


def _config(model: ModelConfig, batch: int, accumulate: int = 1) -> TrainConfig:
    return TrainConfig(model, seq_len=SEQ, batch_size=batch, accumulate=accumulate, spike_nats=None)


def _tokens() -> Tokens:
    ids = np.random.default_rng(0).integers(0, MODEL.vocab_size, 20_000).astype(np.uint16)
    return Tokens(ids, MODEL.vocab_size, 0, 1, len(ids))


def measure(
    group: Group, chosen: Sequence[ParallelConfig], steps: int = STEPS, model: ModelConfig = MODEL
) -> list[Measured]:
    """Of each layout, what this rank did."""
    torch.set_num_threads(1)
    found = []
    for layout in chosen:
        config = _config(model, MICRO_BATCH, layout.accumulate)
        with make_strategy(group, layout) as parallel, Trainer(config, _tokens(), parallel=parallel) as trained:
            trained.step()
            with ledger() as led, memory(trained.module, trained.optimizer) as held:
                trained.step()
            sent = Counter()
            for event in led.events:
                sent[_axis(event.group, layout)] += event.bytes
            crossing, arrived = _routed(trained, parallel.groups.experts) if layout.ep > 1 else (0, [])
            seconds = _fastest(trained.step, group, steps) if steps else 0.0
        stage = group.rank // (layout.cp * layout.tp) % layout.pp
        found.append(Measured(dict(sent), held.peak.total, seconds, stage, crossing, arrived))
    return found


def time_steps(group: Group, layout: ParallelConfig, steps: int) -> float:
    """Seconds of the fastest step, after one that is not timed."""
    torch.set_num_threads(1)
    config = _config(MODEL, MICRO_BATCH, layout.accumulate)
    with make_strategy(group, layout) as parallel, Trainer(config, _tokens(), parallel=parallel) as trained:
        trained.step()
        return _fastest(trained.step, group, steps)


def _routed(trained: Trainer, group: Group) -> tuple[int, list[float]]:
    """`crossing` and `arrived` of the last step. group: ranks that have the other experts."""
    crossing, arrived = 0, []
    for layer in trained.model.modules():
        if isinstance(layer, MoE):
            to = layer.load.view(group.world_size, -1).sum(1)  # this rank's rows for each rank
            crossing += int(to.sum() - to[group.rank])
            arrived.append(int(group.all_reduce(to)[group.rank]) / trained.config.accumulate)
    return crossing, arrived


def _axis(group: str, layout: ParallelConfig) -> str:
    if group == "dp_cp":
        return "dp"
    if group == "copies":
        return "expert_replicas"
    return ("all" if layout.is_hybrid else "dp") if group == "world" else group


def compare(
    ranks: int,
    per_node: int,
    chosen: Sequence[ParallelConfig] | None = None,
    steps: int = STEPS,
    model: ModelConfig = MODEL,
) -> list[Row]:
    """Predicts and measures layouts of so many ranks on nodes of `per_node`."""
    chosen = layouts(ranks) if chosen is None else chosen
    cluster, host = this_machine(ranks, per_node, model)
    by_rank = launch(measure, ranks, chosen, steps, model, link=topology(per_node), timeout=PATIENCE_S)
    rows = []
    for layout, found in zip(chosen, zip(*by_rank, strict=True), strict=True):
        seconds = trainer.step(model, planned(layout), cluster, SEQ, host).seconds
        rows.append(row(layout, ranks, found, seconds, model))
    return rows


def row(
    layout: ParallelConfig, ranks: int, found: Sequence[Measured], seconds: float, model: ModelConfig = MODEL
) -> Row:
    """found: what `measure` returned of this layout on each rank; seconds: predicted."""
    plan, sent = planned(layout), Counter()
    for own in found:
        sent.update(own.sent)
    crossing = sum(own.crossing for own in found) if layout.ep > 1 else None
    expected = traffic.bytes_by_axis(model, plan, SEQ, crossing)
    if not layout.is_hybrid:  # one group does both
        expected = {"dp": sum(expected.values())}
    measured = {axis: size for axis, size in sent.items() if size}
    peak = max(rank_step(model, plan, SEQ, own.stage, own.arrived or None).peak.total for own in found)
    fullest = max(own.peak for own in found)
    return Row(str(layout), ranks, seconds, found[0].seconds, expected, measured, peak, fullest)
