"""Lab 04's rank programs, third part: gradients that are sharded in backward, blocks that are gathered and freed."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from course.shared.groups import on_groups
from course.shared.sharding import RankRecord, Storages, watching
from minillm import measure
from minillm.comm import Group

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


class _Reduced(Storages):
    """What is handed to collectives in backward, and how many buckets were full by then and had not been handed in."""

    def __init__(self) -> None:
        super().__init__()
        self.missing, self.handed, self.most_waiting = [], 0, 0

    def begin(self, buckets: Sequence[Sequence[nn.Parameter]]) -> None:
        self.missing, self.handed = [set(bucket) for bucket in buckets], 0

    def arrive(self, parameter: nn.Parameter) -> None:
        for bucket in self.missing:
            bucket.discard(parameter)

    def see(self, tensor: Tensor) -> None:
        super().see(tensor)
        full = sum(not bucket for bucket in self.missing)
        self.most_waiting, self.handed = max(self.most_waiting, full - self.handed), self.handed + 1


def run_hooks(group: Group, learner: Callable, cases: Sequence[Net]) -> list[RankRecord | None]:
    """shards = learner(buckets, group), then a few backward passes: the shards after each, and the gradients' peak.

    held["waiting"]: how many full buckets waited, at most, when a collective was called. held["whole"]: bytes of what
    was handed to collectives that were alive after a pass.
    """

    def run(case: Net, part: Group) -> RankRecord:
        model, reduced = case.model(), _Reduced()
        buckets, found, sent, calls, peak, kept, whole = case.buckets(model), [], [], Counter(), 0, 0, 0
        for bucket in buckets:
            for parameter in bucket:  # before the learner's own hooks, so that a gradient is counted first
                parameter.register_post_accumulate_grad_hook(reduced.arrive)
        shards = learner(buckets, part)
        for step in range(case.steps):
            reduced.begin(buckets)
            with measure.ledger() as led, measure.memory(model) as census, watching(part, Storages(), reduced):
                model(case.batch(step, part.rank)).square().mean().backward()
            whole = max(whole, sum(reduced.left()))
            found.append([None if shard is None else shard.clone() for shard in shards])
            sent.append(led.bytes())
            calls += led.calls
            peak = max(peak, census.peak.gradient)
            kept = max(kept, sum(p.grad is not None for p in model.parameters()))
        held = {"gradient": peak, "kept": kept, "whole": whole, "waiting": reduced.most_waiting}
        return RankRecord(found, sent, calls, held)

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
    """Residual blocks of the same shape, each one flat vector of weights; one batch per rank.

    learned: whether the first input wants a gradient; after a frozen embedding it does not.
    """

    blocks: list[Tensor]
    inputs: list[Tensor]
    learned: bool = True

    @property
    def world_size(self) -> int:
        return len(self.inputs)


def compute(x: Tensor, weights: Tensor) -> Tensor:
    """One block: x + tanh(x A) B, with A and B cut out of the flat `weights`. x: [batch, hidden]."""
    into, out = weights.view(2, x.shape[1], -1)
    return x + torch.tanh(x @ into) @ out.T


def run_blocks(group: Group, learner: Any, cases: Sequence[Stack]) -> list[RankRecord | None]:
    """learner.apply(x, shard, compute, group) for each block, then backward: gradients of the shards and the input."""

    def run(case: Stack, part: Group) -> RankRecord:
        gathered, reduced, computed = Storages(), Storages(), 0

        def counted(x: Tensor, weights: Tensor) -> Tensor:
            nonlocal computed
            computed += 1
            if not torch._C._functorch.is_functorch_wrapped_tensor(weights):  # inside torch.func, no storage shows
                gathered.see(weights)
            return compute(x, weights)

        shards = [nn.Parameter(block.chunk(part.world_size)[part.rank].clone()) for block in case.blocks]
        x = first = case.inputs[part.rank].clone().requires_grad_(case.learned)
        with measure.ledger() as led, watching(part, gathered, reduced):
            for shard in shards:
                x = learner.apply(x, shard, counted, part)
            between = len(gathered.left())
            x.square().mean().backward()
        held = {
            "blocks": gathered.most,
            "gradients": reduced.most,
            "computed": computed,
            # Buffers that serve every block may stay.
            "left": max(count for count in (0, between, len(gathered.left())) if count != len(gathered.seen)),
        }
        results = {"shards": [shard.grad for shard in shards], "input": first.grad, "output": x.detach()}
        return RankRecord(results, [led.bytes()], led.calls, held)

    return on_groups(group, cases, run)
