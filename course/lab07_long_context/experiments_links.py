"""Lab 07's clocks, on emulated links: a ring that sends behind its work or beside it, short sequences and long ones."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from course.lab07_long_context.experiments import WORLD
from course.shared.measuring import timed
from minillm import measure
from minillm.comm import Group, Link, launch
from minillm.model.attention.tiled import tiled
from minillm.parallel.context_parallel import RingAttention, UlyssesAttention
from minillm.predict.training import context
from minillm.predict.training.context import AttentionShape, Hardware

WORK_S, LINKS_S = 0.04, {"faster": 0.015, "slower": 0.08}
SMALL = AttentionShape(1, 128, 2, 2, 16)
SHORT, DEVICE_FLOPS = Link(latency_s=10e-3, bandwidth_bytes_per_s=10e6, name="slow"), 1.3e9
LENGTHS = {256: 8, 1024: 4, 4096: 2}  # tokens: repetitions
REPEATS = 3


@dataclass(frozen=True)
class Clock:
    """A forward ring: seconds until the last rank is done, by the formula and measured; ledgers by rank."""

    predicted_s: float
    measured_s: float
    ledgers: list[measure.Ledger]


def paced_rings(group: Group) -> dict[bool, tuple[float, measure.Ledger]]:
    """With and without overlap: the quickest of some forward rings whose work on a block takes WORK_S."""
    torch.set_num_threads(1)
    found = {}
    for overlap in (True, False):
        attention = RingAttention(group, "zigzag", overlap=overlap, pace=WORK_S)
        at = attention.positions(SMALL.seq)
        q, k, v = (torch.randn(1, SMALL.heads, len(at), SMALL.head_dim) for _ in range(3))
        forward = partial(attention, q, k, v, positions=at)
        found[overlap] = min((timed(group, forward) for _ in range(REPEATS)), key=itemgetter(0))
    return found


def on_a_clock() -> dict[tuple[str, bool], Clock]:
    """By (link, overlap): "faster" or "slower" than the work."""
    clocks = {}
    for name, seconds in LINKS_S.items():
        link = Link(0.0, SMALL.block_bytes(WORLD) / seconds)
        ranks = launch(paced_rings, WORLD, link=link, device="cpu")
        for overlap in (True, False):
            predicted = context.ring_seconds([[WORK_S] * WORLD] * WORLD, seconds, overlap=overlap)
            clocks[name, overlap] = Clock(predicted, ranks[0][overlap][0], [rank[overlap][1] for rank in ranks])
    return clocks


def shape_of(seq: int) -> AttentionShape:
    return AttentionShape(1, seq, 4, 4, 32)


def paced_forwards(group: Group) -> dict[tuple[str, int], float]:
    """By variant and length: seconds of the slowest rank in a layer's forward attention, the best of some."""
    torch.set_num_threads(1)
    return {(name, seq): _forward_time(group, name, seq) for seq in LENGTHS for name in ("zigzag", "ulysses")}


def _forward_time(group: Group, name: str, seq: int) -> float:
    shape = shape_of(seq)
    work_s = context.flops(name, shape, WORLD)[0] / DEVICE_FLOPS
    if name == "zigzag":
        attention = RingAttention(group, "zigzag", pace=work_s / WORLD)
    else:
        attention = UlyssesAttention(group, inside=_lasting(work_s))
    at = attention.positions(seq)
    q, k, v = (torch.randn(1, shape.heads, len(at), shape.head_dim) for _ in range(3))
    return min(timed(group, partial(attention, q, k, v, positions=at))[0] for _ in range(LENGTHS[seq]))


def _lasting(seconds: float) -> Callable[..., Tensor]:
    """Attention that takes so long at least."""

    def attend(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        start = time.monotonic()
        out = tiled(q, k, v)
        time.sleep(max(0.0, start + seconds - time.monotonic()))
        return out

    return attend


def short_and_long() -> dict[tuple[str, int], dict[str, float]]:
    """By variant and length: seconds of one emulated device alone, and of four, by the formula and measured."""
    ranks = launch(paced_forwards, WORLD, link=SHORT, device="cpu")
    machine = Hardware(DEVICE_FLOPS, SHORT.latency_s, SHORT.bandwidth_bytes_per_s)
    return {
        (name, seq): {
            "one": sum(context.flops(name, shape_of(seq), WORLD)) / DEVICE_FLOPS,
            "formula": context.forward_seconds(name, shape_of(seq), WORLD, machine),
            "four": seconds,
        }
        for (name, seq), seconds in ranks[0].items()
    }


def overlap_rows(clocks: dict[tuple[str, bool], Clock]) -> list[dict[str, Any]]:
    return [
        {"link": link, "overlap": overlap, "predicted_s": clock.predicted_s, "measured_s": clock.measured_s}
        for (link, overlap), clock in clocks.items()
    ]
