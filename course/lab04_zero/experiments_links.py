"""Lab 04's clocks: stage 3 with and without prefetch, and every stage over a slow link. All links are emulated.

Compute is emulated too where it has to overlap: a block that sleeps takes as long on a busy machine as on an idle one.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from course.lab04_zero import experiments as stages
from course.lab04_zero.experiments import Setup
from course.shared.measuring import timed
from minillm import measure
from minillm.comm import Group, Link, launch
from minillm.parallel import FullyShard
from minillm.predict import comms

LINK = Link(latency_s=1e-3, bandwidth_bytes_per_s=10e6, name="between nodes")
BLOCKS, ELEMENTS, FORWARD_S = 5, 100_000, 0.024  # a block's forward; its backward takes twice that
SLOW = Link(latency_s=1e-3, bandwidth_bytes_per_s=8e6, name="slow")


# Prefetch.


class _Work(torch.autograd.Function):
    """x + mean(weight), as long as a block takes: `seconds` forward, twice that backward."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, seconds: float, name: str) -> Tensor:
        ctx.numel, ctx.seconds, ctx.name = weight.numel(), seconds, name
        with measure.span(f"forward {name}"):
            time.sleep(seconds)
        return x + weight.mean()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        with measure.span(f"backward {ctx.name}"):
            time.sleep(2 * ctx.seconds)
        return gradient, gradient.sum().expand(ctx.numel) / ctx.numel, None, None


class SleepyBlock(nn.Module):
    """A block of `elements` weights that computes for a known time."""

    def __init__(self, elements: int, seconds: float, name: str):
        super().__init__()
        self.weight, self.seconds, self.name = nn.Parameter(torch.ones(elements)), seconds, name

    def forward(self, x: Tensor) -> Tensor:
        return _Work.apply(x, self.weight, self.seconds, self.name)


class SleepyModel(nn.Module):
    """BLOCKS of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SleepyBlock(ELEMENTS, FORWARD_S, str(i)) for i in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def sleepy_steps(group: Group, prefetches: Sequence[int]) -> list[tuple[measure.Ledger, float, int]]:
    """The quicker of two steps per prefetch depth: its ledger, its seconds; and the most units whole at once."""
    found = []
    for prefetch in prefetches:
        model = FullyShard(SleepyModel(), group, prefetch=prefetch)
        step = partial(_step, model)
        step()  # connects the ranks
        seconds, led = min((timed(group, step) for _ in range(2)), key=itemgetter(0))
        found.append((led, seconds, model.unshard_stats.peak_groups))
    return found


def _step(model: nn.Module) -> None:
    model(torch.ones(1)).backward()


@dataclass(frozen=True)
class Bar:
    """A stretch of a simulated rank: lane "compute" or "link"; seconds."""

    lane: str
    name: str
    start: float
    end: float


def simulate(blocks: int, gather: float, forward: float, reduce: float, prefetch: int) -> list[Bar]:
    """Stage 3 on one rank, the block that ends forward still there when backward begins: 2·blocks - 1 gathers.

    gather, reduce: seconds of a block on the link, which does one thing at a time; forward: of a block's compute.
    """
    bars: list[Bar] = []
    now, link, gathered, reduced = 0.0, 0.0, {}, [0.0]

    def send(name: str, seconds: float) -> float:
        nonlocal link
        start = max(now, link)
        link = start + seconds
        bars.append(Bar("link", name, start, link))
        return link

    for backward in (False, True):
        order = list(reversed(range(blocks))) if backward else list(range(blocks))
        for place, block in enumerate(order):
            for ahead in order[place : place + prefetch + 1]:
                if ahead not in gathered:
                    gathered[ahead] = send(f"gather {ahead}", gather)
            now = max(now, gathered[block])
            seconds = 2 * forward if backward else forward
            bars.append(Bar("compute", f"{'backward' if backward else 'forward'} {block}", now, now + seconds))
            now += seconds
            if backward:
                now = max(now, reduced[-1])  # the reduction before it is waited for first
                reduced.append(send(f"reduce {block}", reduce))
            if backward or block != order[-1]:
                del gathered[block]
    return bars


def stage3_on_a_clock(prefetches: Sequence[int] = (0, 1), nproc: int = 2) -> dict[int, dict[str, Any]]:
    """By prefetch depth: seconds of a step predicted and measured on an emulated link, units held, ledgers by rank."""
    ranks = launch(sleepy_steps, nproc, list(prefetches), link=LINK, device="cpu")
    seconds = comms.ring_all_gather(ELEMENTS, 4, nproc).time(LINK.latency_s, LINK.bandwidth_bytes_per_s)
    found = {}
    for index, prefetch in enumerate(prefetches):
        ledgers, steps, units = zip(*(rank[index] for rank in ranks), strict=True)
        found[prefetch] = {
            "predicted_s": max(bar.end for bar in simulate(BLOCKS, seconds, FORWARD_S, seconds, prefetch)),
            "measured_s": max(steps),
            "units_held": max(units),
            "ledgers": list(ledgers),
        }
    return found


# Slow links.


def over_a_slow_link(accumulates: Sequence[int] = (1, 4), nproc: int = 2) -> dict[str, Any]:
    """Seconds of one step of every stage, with K microbatches: bytes / bandwidth + rounds · latency, and measured."""
    setups = [Setup(stage, nproc, k) for k in accumulates for stage in stages.STAGES]
    found = stages.compare(setups, link=SLOW)
    rows = [
        {
            "stage": setup.name,
            "accumulate": setup.accumulate,
            "predicted_s": communication_seconds(setup, max(f.calls.total() for f in ranks)),
            "measured_s": max(f.seconds for f in ranks),
        }
        for setup, ranks in found.items()
    ]
    return {"world_size": nproc, "emulated": True, "bandwidth_bytes_per_s": SLOW.bandwidth_bytes_per_s, "rows": rows}


def communication_seconds(setup: Setup, collectives: int) -> float:
    """If nothing hides: an all-reduce has 2(N-1) rounds, a gather and a reduce-scatter N-1."""
    rounds = collectives * (setup.world_size - 1) * (2 if setup.stage == 0 else 1)
    return stages.predicted_bytes(setup) / SLOW.bandwidth_bytes_per_s + rounds * SLOW.latency_s
