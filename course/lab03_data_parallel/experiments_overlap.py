"""Lab 03's clock: backward of a known length beside an emulated link, so that overlap is a matter of arithmetic.

Two cores cannot show overlap honestly: the backward pass and the messages of several ranks fight for them. Here a
block's backward *sleeps* for a given time and a `Link` paces the messages, so both take what they are told, on any
machine. Everything else is real: autograd, hooks, buckets, rings between processes. Times are labelled emulated.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from course.lab03_data_parallel import formulas
from minillm import measure
from minillm.comm import Group, Link, launch
from minillm.measure import Ledger
from minillm.parallel import BucketedDDP, FlatDDP, NaiveDDP
from minillm.predict import comms

WORLD = 2
LINK = Link(latency_s=0.5e-3, bandwidth_bytes_per_s=10e6, name="emulated 10 MB/s")
FAR = Link(latency_s=4e-3, bandwidth_bytes_per_s=10e6, name="emulated 10 MB/s, 4 ms away")
Form = Callable[[nn.Module, Group], Callable[[], None]]  # prepares a model, returns what finishes its step


class _SlowBackward(torch.autograd.Function):
    """The identity, whose backward takes `seconds`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, index: int, seconds: float) -> Tensor:
        ctx.index, ctx.seconds, ctx.like = index, seconds, weight
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with measure.span(f"backward {ctx.index}"):
            time.sleep(ctx.seconds)
            weight_gradient = torch.ones_like(ctx.like)
        return gradient, weight_gradient, None, None


@dataclass(frozen=True)
class Slow:
    """A model of `blocks` blocks, each `elements` float32 parameters and `seconds` of backward."""

    blocks: int = 8
    elements: int = 65_000
    seconds: float = 0.03

    @property
    def backward_s(self) -> float:
        return self.blocks * self.seconds

    @property
    def block_bytes(self) -> int:
        return 4 * self.elements

    def module(self, late_s: float = 0.0) -> nn.Module:
        """late_s: extra time of the backward pass, as on a rank with a slow GPU."""
        return _SlowModule(self, late_s)

    def comm_s(self, link: Link, per_bucket: int, world_size: int = WORLD) -> list[float]:
        """Seconds of each bucket's all-reduce when a bucket holds `per_bucket` blocks (Hockney's model)."""
        sizes = [min(per_bucket, self.blocks - first) for first in range(0, self.blocks, per_bucket)]
        costs = [comms.ring_all_reduce(size * self.elements, 4, world_size) for size in sizes]
        return [cost.time(link.latency_s, link.bandwidth_bytes_per_s) for cost in costs]

    def step_s(self, link: Link, per_bucket: int) -> float:
        """Seconds of backward and reduction with overlap: each bucket starts when it is ready and the wire is free."""
        ready = [min(first + per_bucket, self.blocks) * self.seconds for first in range(0, self.blocks, per_bucket)]
        return formulas.reduction_times(ready, self.comm_s(link, per_bucket))[-1][1]


class _SlowModule(nn.Module):
    def __init__(self, shape: Slow, late_s: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape.elements) for _ in range(shape.blocks))
        self.seconds = shape.seconds + late_s / shape.blocks

    def forward(self, x: Tensor) -> Tensor:
        for index, weight in enumerate(self.weights):
            x = _SlowBackward.apply(x, weight, index, self.seconds)
        return x.sum()


def packaged(wrap: Callable[[nn.Module, Group], nn.Module]) -> Form:
    """minillm's own forms: they finish by themselves when backward ends."""
    return lambda model, group: wrap(model, group).finish


def bucketed(per_bucket: int, shape: Slow) -> Form:
    """BucketedDDP with `per_bucket` blocks in every bucket."""
    cap_mb = (per_bucket - 0.5) * shape.block_bytes / 2**20
    return packaged(lambda model, group: BucketedDDP(model, group, bucket_cap_mb=cap_mb, first_bucket_mb=cap_mb))


OURS: dict[str, Form] = {"naive": packaged(NaiveDDP), "flat": packaged(FlatDDP), "bucketed": bucketed(1, Slow())}


def steps(
    group: Group, forms: Mapping[str, Form], shapes: Mapping[str, Slow], repeats: int = 2, late_s: float = 0.0
) -> dict[str, Ledger]:
    """The quickest of some steps of each form, as a ledger with a span "step" around it; the first step does not count.

    shapes: the model for each form. late_s: by how much the last rank's backward is slower.
    """
    found = {}
    for name, form in forms.items():
        module = shapes[name].module(late_s if group.rank == group.world_size - 1 else 0.0)
        finish, x = form(module, group), torch.zeros(1, requires_grad=True)
        tries = []
        for _ in range(1 + repeats):
            group.barrier()
            with measure.ledger() as led, measure.span("step", "idle"):
                module(x).backward()
                finish()
            tries.append(led)
        # Every rank keeps the same repeat, or their time lines would not fit together.
        slowest = group.all_reduce(torch.tensor([seconds(led) for led in tries[1:]]), "max")
        found[name] = tries[1 + int(slowest.argmin())]
    return found


def seconds(led: Ledger) -> float:
    return next(span.seconds for span in led.spans if span.name == "step")


def account(led: Ledger) -> dict[str, Any]:
    """One rank's step in seconds: step, backward (first block to last), comm, and the share of comm that was hidden."""
    start = next(span.start for span in led.spans if span.name == "step")
    blocks = [span for span in led.spans if span.name.startswith("backward")]
    backward = max(span.end for span in blocks) - start
    comm = sum(event.end - event.start for event in led.events)
    return {
        "step_s": seconds(led),
        "backward_s": backward,
        "comm_s": comm,
        "hidden": formulas.hidden_share(seconds(led), backward, comm),
        "blocks": [(span.start - start, span.end - start) for span in blocks],
        "reductions": [(event.start - start, event.end - start) for event in led.events],
        "bytes": led.bytes(),
    }


def overlap(forms: Mapping[str, Form] = OURS, link: Link = LINK, repeats: int = 2) -> dict[str, Any]:
    """What each form's step is made of, on rank 0, beside what is predicted."""
    shape = Slow()
    ranks = launch(steps, WORLD, forms, dict.fromkeys(forms, shape), repeats, link=link)
    return beside_prediction(ranks[0], shape, link)


def beside_prediction(ledgers: Mapping[str, Ledger], shape: Slow, link: Link) -> dict[str, Any]:
    one_by_one, at_once = sum(shape.comm_s(link, 1)), sum(shape.comm_s(link, shape.blocks))
    predicted = {
        "naive": formulas.naive_seconds(shape.backward_s, one_by_one),
        "flat": formulas.naive_seconds(shape.backward_s, at_once),
    }
    overlapped = formulas.overlapped_seconds(shape.backward_s, one_by_one, shape.comm_s(link, 1)[-1])
    return {
        "emulated": True,
        "world_size": WORLD,
        "forms": {
            name: account(led) | {"predicted_s": predicted.get(name, overlapped)} for name, led in ledgers.items()
        },
    }


PER_BUCKET = (1, 2, 4, 8, 16)
SWEPT = Slow(blocks=16, elements=12_500, seconds=0.01)
LOSING = {  # what a second rank is worth depends on backward per block and on parameters per block
    "tiny model": Slow(blocks=8, elements=500, seconds=0.002),
    "many bytes": Slow(blocks=8, elements=100_000, seconds=0.02),
    "large batch": Slow(blocks=8, elements=50_000, seconds=0.04),
}
LATE_S, EVEN = 0.12, Slow(blocks=4, elements=20_000, seconds=0.03)


def far_away(link: Link = FAR) -> dict[str, dict[str, Any]]:
    """Over a link with a long latency: bucket sizes, models that gain little from a second rank, and a late rank.

    "sweep": many small buckets pay the latency often, large ones hide little. "losing": throughput of two ranks over
    that of one, 2 is perfect. "straggler": each rank's step when nobody is late, and when the last
    rank is, with its backward.
    """
    ranks = launch(_far_away, WORLD, link=link)
    sweep, losing, _, _ = ranks[0]
    return {
        "sweep": {
            "emulated": True,
            "bucket_bytes": [count * SWEPT.block_bytes for count in PER_BUCKET],
            "buckets": [-(-SWEPT.blocks // count) for count in PER_BUCKET],
            "measured_s": [seconds(led) for led in sweep.values()],
            "predicted_s": [SWEPT.step_s(link, count) for count in PER_BUCKET],
            "backward_s": SWEPT.backward_s,
            "reductions": [led.calls["all_reduce"] for led in sweep.values()],
            "bytes": [led.bytes() for led in sweep.values()],
        },
        "losing": {
            "emulated": True,
            "predicted": {name: WORLD * shape.backward_s / shape.step_s(link, 1) for name, shape in LOSING.items()},
            "measured": {name: WORLD * shape.backward_s / seconds(losing[name]) for name, shape in LOSING.items()},
        },
        "straggler": {
            "emulated": True,
            "predicted_s": [EVEN.backward_s + late + EVEN.comm_s(link, 1)[-1] for late in (0, LATE_S)],
            "measured_s": [[seconds(led["all"]) for led in rank[2:]] for rank in ranks],
            "backward_s": [account(rank[-1]["all"])["backward_s"] for rank in ranks],
        },
    }


def _far_away(group: Group) -> list[dict[str, Ledger]]:
    forms = {str(count): bucketed(count, SWEPT) for count in PER_BUCKET}
    found = [steps(group, forms, dict.fromkeys(forms, SWEPT))]
    found.append(steps(group, {name: bucketed(1, shape) for name, shape in LOSING.items()}, LOSING))
    return found + [steps(group, {"all": bucketed(1, EVEN)}, {"all": EVEN}, late_s=late) for late in (0.0, LATE_S)]
