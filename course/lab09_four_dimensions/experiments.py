"""Lab 09 on ranks: steps of minillm's trainer on four ranks whose links change between one measurement and the next.

    no link       messages take what this machine takes: what remains is computing and software
    one node      all four ranks share a fast emulated node
    inner inside  two nodes of two ranks; the innermost axis of the mesh stays inside a node
    inner across  the same ranks seated the other way: the innermost axis crosses, the outer one stays inside

One launch measures everything: `linked` puts other emulated links under a rank and notes what they carry, by link.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from minillm import measure
from minillm.comm import Group, Link, Mesh, Topology, launch
from minillm.data import Tokens
from minillm.equivalence.planner import MICRO_BATCH, SEQ, planned
from minillm.model import ModelConfig
from minillm.predict import comms
from minillm.predict.planner import traffic, trainer
from minillm.predict.planner.clusters import Cluster, Device
from minillm.predict.planner.trainer import Host
from minillm.train import TrainConfig, Trainer
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.hybrid import make_strategy

WORLD, PER_NODE = 4, 2
INTRA, INTER = Link(2e-4, 20e6, "inside a node"), Link(2e-3, 2e6, "between nodes")
LINKS = {
    "no link": Link(name="none"),
    "one node": Topology(WORLD, INTER, INTRA),
    "inner inside": Topology(PER_NODE, INTER, INTRA),
    "inner across": Topology(PER_NODE, INTER, INTRA, seats=(0, 2, 1, 3)),
}
MODEL = ModelConfig(256, 64, 176, 2, 8, 4, max_seq_len=SEQ)
LAYOUTS = {  # each takes eight sequences in a step
    "dp 2, tp 2": ParallelConfig(dp=2, tp=2, accumulate=2),
    "pp 2, tp 2": ParallelConfig(pp=2, tp=2, accumulate=4),
    "dp 2, cp 2": ParallelConfig(dp=2, cp=2, accumulate=2),
    "dp 4": ParallelConfig(dp=4),
    "tp 4": ParallelConfig(tp=4, accumulate=4),
    "dp 4, zero 3": ParallelConfig(dp=4, zero=3),
}
CROSSING = ("inner inside", "inner across")
PLACED = ("dp 2, tp 2", "pp 2, tp 2", "dp 2, cp 2")  # those that have an inner and an outer axis
SCALED, EXTENDED = (1, 2, 4), (8, 16)
STRONG_MICROBATCHES = 16  # of all ranks together
REVERSED = ("dp", "pp", "cp", "tp")  # innermost first, where the trainer's own mesh has tp innermost
TIMED = 2  # steps, of which the quickest counts


@dataclass
class LayoutRun:
    """One layout on one rank. sent: bytes of a step by group; carried, seconds: by state of the links, carried by link
    name; seconds are those of the slowest rank."""

    sent: dict[str, int] = field(default_factory=dict)
    carried: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def note(self, state: str, seconds: float) -> None:
        """The quickest of some runs counts: what else the machine does can only add."""
        self.seconds[state] = min(seconds, self.seconds.get(state, seconds))


@contextmanager
def linked(group: Group, links: Link | Topology) -> Iterator[Counter]:
    """Replaces this rank's emulated links inside the block; all ranks of `group` must do so together.

    Yields the bytes that this rank has sent, by the name of the link.
    """
    group.barrier()
    egress, carried = group.world.egress, Counter()
    before, deliver_at = egress.links, egress.deliver_at

    def noted(src: int, dst: int, num_bytes: int) -> float | None:
        carried[links.between(src, dst).name] += num_bytes
        return deliver_at(src, dst, num_bytes)

    egress.links, egress.deliver_at = links, noted
    try:
        yield carried
    finally:
        egress.links = before
        del egress.deliver_at  # the method shows through again
        group.barrier()


def _trainer(group: Group, layout: ParallelConfig) -> Trainer:
    config = TrainConfig(MODEL, seq_len=SEQ, batch_size=MICRO_BATCH, accumulate=layout.accumulate, spike_nats=None)
    ids = np.random.default_rng(0).integers(0, MODEL.vocab_size, 20_000).astype(np.uint16)
    return Trainer(config, Tokens(ids, MODEL.vocab_size, 0, 1, len(ids)), parallel=make_strategy(group, layout))


def run_layouts(group: Group, states: Mapping[str, tuple[str, ...]], timed: int) -> dict[str, LayoutRun]:
    """states: of the links, by layout. timed: steps in each, of which the quickest counts; 0: one, for its bytes."""
    torch.set_num_threads(1)
    found = {}
    for name, wanted in states.items():
        found[name] = LayoutRun()
        with _trainer(group, LAYOUTS[name]) as trained:
            trained.step()
            with measure.ledger() as led:
                trained.step()
            found[name].sent = {event.group: led.bytes(group=event.group) for event in led.events}
            for state in [*wanted] * max(1, timed):  # in turns: what else the machine does falls on all of them
                with linked(group, LINKS[state]) as carried:
                    found[name].note(state, _seconds(trained.step, group))
                found[name].carried[state] = dict(carried)
    return found


def _seconds(work: Callable[[], object], group: Group) -> float:
    """As long as the slowest rank takes."""
    group.barrier()
    start = time.perf_counter()
    work()
    return max(group.gather_objects(time.perf_counter() - start))


def on_links(timed: int = TIMED) -> dict[str, list[LayoutRun]]:
    """By layout, the four ranks' runs; without timing, bytes only."""
    states = {name: CROSSING if name in PLACED else () for name in LAYOUTS}
    if timed:
        states = {name: ("no link", "one node", *each) for name, each in states.items()}
    by_rank = launch(run_layouts, WORLD, states, timed, link=LINKS["no link"], device="cpu", timeout=120)
    return {name: [rank[name] for rank in by_rank] for name in LAYOUTS}


# What is predicted for it.


def cluster(ranks: int, per_node: int = PER_NODE) -> Cluster:
    """The emulated one, computing in no time."""
    device = Device("emulated", 1e30, 1e12, 1e30, INTRA.bandwidth_bytes_per_s, 1.0, 1.0)
    latency = (INTRA.latency_s, INTER.latency_s)
    shape = {"per_node": min(per_node, ranks), "network": INTER.bandwidth_bytes_per_s, "latency": latency}
    return Cluster(device, ranks, link_efficiency=1.0, reserved=0, fragmentation=0, cards_per_ring=1, **shape)


def link_seconds(layout: ParallelConfig, state: str) -> float:
    """Of one step, spent on links (formula)."""
    per_node = WORLD if state == "one node" else PER_NODE
    plan = replace(planned(layout), order=REVERSED if state == "inner across" else REVERSED[::-1])
    return trainer.step(MODEL, plan, cluster(layout.world_size, per_node), SEQ, Host()).seconds


def bytes_by_axis(name: str) -> dict[str, int]:
    """What all ranks of a layout send in a step (formula); "dp" is the flattened dp x cp group."""
    return traffic.bytes_by_axis(MODEL, planned(LAYOUTS[name]), SEQ)


def measured_by_axis(runs: list[LayoutRun], layout: ParallelConfig) -> dict[str, int]:
    """The same by ledger: what all ranks sent, by axis."""
    total: Counter[str] = Counter()
    for run in runs:
        for group, sent in run.sent.items():
            whole = "all" if layout.is_hybrid else "dp"
            total[{"dp_cp": "dp", "world": whole}.get(group, group)] += sent
    return {axis: sent for axis, sent in total.items() if sent}


def inner_axis(name: str) -> str:
    """The innermost axis that has more than one rank: tp before cp before pp before dp."""
    layout = LAYOUTS[name]
    return next(axis for axis in reversed(layout.axis_order) if layout.axes[axis] > 1)


def between_nodes(name: str, state: str) -> int:
    """Bytes that cross in a step (formula): two axes of two ranks, so one of them crosses wholly; and gradients of
    dp x cp, whose ring of four has two of its four links between nodes, or all four."""
    sent, inner = bytes_by_axis(name), inner_axis(name)
    if name == "dp 2, cp 2":  # the ring over all four ranks, and the axis of keys and values
        ring = sent["dp"] + sent.get("all", 0)
        return (ring if state == "inner across" else ring // 2) + (sent["cp"] if state == "inner across" else 0)
    crossing = {axis for axis in sent if (axis == inner) == (state == "inner across")} - {"all"}
    return sum(sent[axis] for axis in crossing)


# Scaling.


def run_scaling(group: Group, timed: int) -> dict[tuple[str, int], LayoutRun]:
    """Data parallelism on the first 1, 2 and 4 ranks, two to a node: by (mode, ranks)."""
    torch.set_num_threads(1)
    found = {}
    for ranks in SCALED:
        part = group.subgroup(range(ranks), f"{ranks} ranks")
        for mode in ("weak", "strong"):
            found[mode, ranks] = LayoutRun()
            if part.rank < 0:
                continue
            with _trainer(part, scaling_layout(mode, ranks)) as trained:
                trained.step()
                with measure.ledger() as led:
                    trained.step()
                found[mode, ranks].sent = {"dp": led.bytes()}
                for state in ["no link", "inner inside"] * (2 * timed):
                    with linked(part, LINKS[state]):
                        found[mode, ranks].note(state, _seconds(trained.step, part))
    return found


def scaling_layout(mode: str, ranks: int) -> ParallelConfig:
    """weak: one microbatch for each rank; strong: all ranks share the same sixteen."""
    return ParallelConfig(dp=ranks, accumulate=1 if mode == "weak" else STRONG_MICROBATCHES // ranks)


@dataclass(frozen=True)
class Point:
    """A number of ranks. bytes: that a rank sends in a step; crossing: that leave the busiest node; seconds: formula
    on top of what one rank computes; None: not measured."""

    mode: str
    ranks: int
    bytes: float
    crossing: int
    measured_bytes: float | None = None
    seconds: float | None = None
    measured_seconds: float | None = None


def scaling(timed: int = TIMED) -> list[Point]:
    by_rank = launch(run_scaling, WORLD, timed, link=LINKS["no link"], device="cpu", timeout=120)
    points = []
    for mode in ("weak", "strong"):
        for ranks in (*SCALED, *EXTENDED):
            run = by_rank[0].get((mode, ranks))
            sent = sum(rank[mode, ranks].sent.get("dp", 0) for rank in by_rank) / ranks if run else None
            points.append(_point(mode, ranks, run, sent, by_rank[0]))
    return points


def _point(
    mode: str, ranks: int, run: LayoutRun | None, sent: float | None, rows: dict[tuple[str, int], LayoutRun]
) -> Point:
    layout = scaling_layout(mode, ranks)
    numel = traffic.parameters(MODEL, planned(layout), 0)
    crossing = max(comms.flat_ring_crossing_bytes(numel, traffic.ITEM, ranks, min(PER_NODE, ranks)))
    each = sum(traffic.bytes_by_axis(MODEL, planned(layout), SEQ).values()) / ranks
    point = Point(mode, ranks, each, crossing, sent)
    alone = rows[mode, 1].seconds.get("no link")
    if alone is None:
        return point
    computing = run.seconds["no link"] if run else alone / (1 if mode == "weak" else ranks)
    measured = run.seconds["inner inside"] if run else None
    return replace(point, seconds=computing + link_seconds(layout, "inner inside"), measured_seconds=measured)


# The mesh, by torch.


def torch_groups(group: Group) -> dict[str, Any]:
    """Of this rank: its place and groups in meshes that torch's DeviceMesh made."""
    found = {}
    for axes in MESHES:
        mesh = Mesh(group, **axes)
        lines = {axis: mesh[axis].ranks for axis in axes}
        flat = mesh.joined("dp", "cp").ranks if {"dp", "cp"} <= set(axes) else None
        found[str(axes)] = {"place": mesh.place, "groups": lines, "dp_cp": flat}
    return found


MESHES = ({"dp": 2, "pp": 1, "cp": 1, "tp": 2}, {"dp": 2, "cp": 2}, {"pp": 2, "tp": 2}, {"dp": 1, "cp": 4})


@cache
def meshes() -> list[dict[str, Any]]:
    return launch(torch_groups, WORLD, device="cpu")
