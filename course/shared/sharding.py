"""Lab 04's rank programs: a learner's sharded pieces at work on real ranks, and what they did.

Each program takes the learner's object and one list of cases, so that one launch serves several world sizes, and
returns per case what came out, the bytes and calls in the ledger and the bytes that were held. `GatheredBuffers`
watches gathered buffers, so that a check can tell a block that was freed from one that was kept.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from course.shared.groups import on_groups
from minillm import measure
from minillm.comm import Group

LR, EPS = 0.1, 0.1  # an eps this large lets Adam's step depend on the gradient's scale, so that a wrong scale shows
BETAS = (0.9, 0.99)


def make_adam(parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    """The optimizer of the checks: AdamW with an eps that does not hide a wrong scale."""
    return torch.optim.AdamW(parameters, lr=LR, eps=EPS, betas=BETAS, weight_decay=0.01)


@dataclass(frozen=True)
class RankRecord:
    """What one rank did in one case. held: bytes by what they are for; results: whatever the learner returned."""

    results: Any
    bytes: list[int]  # sent, per step
    calls: Counter[str]
    held: dict[str, int] = field(default_factory=dict)


def by_case(ranks: Sequence[Sequence[RankRecord | None]], cases: Sequence[Any]) -> list[list[RankRecord]]:
    """What `on_groups` gave, sorted by case, then by rank."""
    return [[ranks[rank][index] for rank in range(case.world_size)] for index, case in enumerate(cases)]


def list_calls(calls: Mapping[str, float]) -> str:
    """{"all_gather": 2} -> "2 all_gather"."""
    return ", ".join(f"{count:g} {name}" for name, count in sorted(calls.items()))


# Partition.


@dataclass(frozen=True)
class Sizes:
    """Parameters, given by their values, to be laid out flat over `world_size` ranks."""

    parameters: list[Tensor]
    world_size: int

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)


def gather_shards(group: Group, partition: Callable, cases: Sequence[Sizes]) -> list[RankRecord | None]:
    """Each rank keeps only what `partition` gives it; an all-gather of the shards must bring the whole flat buffer."""

    def run(case: Sizes, part: Group) -> RankRecord:
        length, slices = partition([p.numel() for p in case.parameters], part.world_size, part.rank)
        shard = torch.zeros(length)
        pieces = [parameter.flatten()[piece] for parameter, piece in zip(case.parameters, slices, strict=True)]
        shard[: sum(map(len, pieces))] = torch.cat(pieces)
        with measure.ledger() as led:
            whole = part.all_gather(shard)
        return RankRecord(whole[: case.numel], [led.bytes()], led.calls, {"shard": shard.nbytes})

    return on_groups(group, cases, run)


# Stage 1.


@dataclass(frozen=True)
class Steps:
    """weights[r]: rank r's [P] at first; gradients[k][r]: rank r's [P] in step k."""

    weights: list[Tensor]
    gradients: list[list[Tensor]]

    @property
    def world_size(self) -> int:
        return len(self.weights)


def run_zero_one(group: Group, learner: Callable, cases: Sequence[Steps]) -> list[RankRecord | None]:
    """learner(weights, group, make) once and .step(gradient) for each gradient."""

    def run(case: Steps, part: Group) -> RankRecord:
        optimizers, weights, found, sent = [], case.weights[part.rank].clone(), [], []

        def make(parameters):
            optimizers.append(make_adam(list(parameters)))
            return optimizers[-1]

        zero, calls, changed = learner(weights, part, make), Counter(), 0
        for ranks in case.gradients:
            gradient = ranks[part.rank].clone()
            with measure.ledger() as led:
                zero.step(gradient)
            changed += not torch.equal(gradient, ranks[part.rank])
            found.append(weights.clone())
            sent.append(led.bytes())
            calls += led.calls
        # A second object, everything of it with the other sign: neither of the two must notice the other.
        mirrored, gradient = -case.weights[part.rank], case.gradients[0][part.rank]
        mirror = learner(mirrored, part, make_adam)
        zero.step(gradient.clone())
        mirror.step(-gradient)
        means = [torch.stack(ranks).mean(0) for ranks in (*case.gradients, case.gradients[0])]
        apart = not torch.allclose(weights, adam_in_one_process(case.weights[0], means)[-1], rtol=1e-4, atol=1e-5)
        tensors = sum(len(group["params"]) for opt in optimizers for group in opt.param_groups)
        held = {
            "optimizer": sum(measure.memory(optimizer=opt).live.optimizer for opt in optimizers),
            "step counters": 4 * tensors,
            "optimizers": len(optimizers),
            "copies": _kept(zero, weights),
            "gradients changed": changed,
            "disturbed": int(apart or not torch.allclose(mirrored, -found[0], rtol=1e-4, atol=1e-5)),
        }
        return RankRecord(found, sent, calls, held)

    return on_groups(group, cases, run)


def _kept(owner: Any, weights: Tensor) -> int:
    """Bytes of tensors among an object's attributes, in lists and dicts too, without those that lie in `weights`."""
    values, storages = list(vars(owner).values()), {}
    for value in values:  # which grows meanwhile
        if isinstance(value, (list, tuple, dict)):
            values += value.values() if isinstance(value, dict) else value
        elif isinstance(value, Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    storages.pop(weights.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def adam_in_one_process(weights: Tensor, gradients: Sequence[Tensor]) -> list[Tensor]:
    """The weights after each step of the checks' AdamW."""
    weight = nn.Parameter(weights.clone())
    adam, found = make_adam([weight]), []
    for gradient in gradients:
        weight.grad = gradient.clone()
        adam.step()
        found.append(weight.detach().clone())
    return found


# Stage 2.


@dataclass(frozen=True)
class Net:
    """A small network and one batch per rank and step, in buckets of one, of two and of four parameters."""

    widths: list[int]
    seed: int
    world_size: int
    dtype: torch.dtype = torch.float32
    steps: int = 2

    def model(self) -> nn.Sequential:
        draw, layers = torch.Generator().manual_seed(self.seed), []
        for rows, columns in zip(self.widths, self.widths[1:], strict=False):
            layers += [nn.Linear(rows, columns), nn.Tanh()]
        for parameter in (model := nn.Sequential(*layers)).parameters():
            parameter.data = torch.randn(parameter.shape, generator=draw, dtype=self.dtype) / 4
        return model

    def batch(self, step: int, rank: int) -> Tensor:
        draw = torch.Generator().manual_seed(self.seed + 97 * step + rank)
        return torch.randn(6, self.widths[0], generator=draw, dtype=self.dtype)

    def buckets(self, model: nn.Module) -> list[list[nn.Parameter]]:
        """In the order in which backward fills them: the last layer's bias and weight apart, layer by layer, and the
        first two layers together.

        Every second one is listed backwards: which of a bucket's gradients comes last cannot be seen from its list.
        """
        last, *layers = [list(layer.parameters()) for layer in reversed(model) if isinstance(layer, nn.Linear)]
        buckets = [last[1:], last[:1], *layers[:-2], layers[-2] + layers[-1]]
        return [bucket[::-1] if place % 2 else bucket for place, bucket in enumerate(buckets)]


def run_hooks(group: Group, learner: Callable, cases: Sequence[Net]) -> list[RankRecord | None]:
    """shards = learner(buckets, group), then a few backward passes: the shards after each, and the gradients' peak."""

    def run(case: Net, part: Group) -> RankRecord:
        model = case.model()
        shards, found, sent, calls, peak, kept = learner(case.buckets(model), part), [], [], Counter(), 0, 0
        for step in range(case.steps):
            with measure.ledger() as led, measure.memory(model) as census:
                model(case.batch(step, part.rank)).square().mean().backward()
            found.append([None if shard is None else shard.clone() for shard in shards])
            sent.append(led.bytes())
            calls += led.calls
            peak = max(peak, census.peak.gradient)
            kept = max(kept, sum(p.grad is not None for p in model.parameters()))
        return RankRecord(found, sent, calls, {"gradient": peak, "kept": kept})

    return on_groups(group, cases, run)


def gradients_in_one_process(case: Net, step: int) -> list[list[Tensor]]:
    """By rank: the flat gradient of each bucket, of that rank's batch."""
    found = []
    for rank in range(case.world_size):
        model = case.model()
        model(case.batch(step, rank)).square().mean().backward()
        found.append([torch.cat([p.grad.flatten() for p in bucket]) for bucket in case.buckets(model)])
    return found


# Stage 3.


@dataclass(frozen=True)
class Stack:
    """Residual blocks of the same shape, each one flat vector of weights; one batch per rank."""

    blocks: list[Tensor]
    inputs: list[Tensor]

    @property
    def world_size(self) -> int:
        return len(self.inputs)


def compute(x: Tensor, weights: Tensor) -> Tensor:
    """One block: x + tanh(x A) B, with A and B cut out of the flat `weights`. x: [batch, hidden]."""
    into, out = weights.view(2, x.shape[1], -1)
    return x + torch.tanh(x @ into) @ out.T


class GatheredBuffers:
    """Watches what `group.all_gather` returns and what computes: how many gathered buffers are alive, at most."""

    def __init__(self, group: Group) -> None:
        self.group, self.buffers, self.most, self.computed = group, [], 0, 0

    def __enter__(self) -> "GatheredBuffers":
        gather = self.group.all_gather

        def all_gather(*args, **kwargs):
            result = gather(*args, **kwargs)
            if isinstance(result, Tensor):
                self.watch(result)
            return result

        self.group.all_gather = all_gather
        return self

    def __exit__(self, *error: Any) -> None:
        del self.group.all_gather  # the method shows through again

    def watch(self, buffer: Tensor) -> None:
        storage = buffer.untyped_storage()
        if not any(known() is storage for known in self.buffers):
            self.buffers.append(weakref.ref(storage))
        self.count()

    def count(self) -> None:
        alive = [storage for known in self.buffers if (storage := known()) is not None and storage.nbytes()]
        self.most = max(self.most, len(alive))

    def compute(self, x: Tensor, weights: Tensor) -> Tensor:
        self.computed += 1
        self.watch(weights)
        return compute(x, weights)


def run_blocks(group: Group, learner: Any, cases: Sequence[Stack]) -> list[RankRecord | None]:
    """learner.apply(x, shard, compute, group) for each block, then backward: gradients of the shards and the input."""

    def run(case: Stack, part: Group) -> RankRecord:
        shards = [nn.Parameter(block.chunk(part.world_size)[part.rank].clone()) for block in case.blocks]
        x = first = case.inputs[part.rank].clone().requires_grad_()
        with measure.ledger() as led, GatheredBuffers(part) as held:
            for shard in shards:
                x = learner.apply(x, shard, held.compute, part)
            x.square().mean().backward()
            held.count()
        results = {"shards": [shard.grad for shard in shards], "input": first.grad, "output": x.detach()}
        return RankRecord(results, [led.bytes()], led.calls, {"blocks": held.most, "computed": held.computed})

    return on_groups(group, cases, run)
