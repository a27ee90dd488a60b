"""Lab 04's rank programs: a learner's sharded pieces at work on real ranks, and what they did. Here partition and stage
1; what other labs use, too, is `by_case` and `list_calls`.

Each program takes the learner's object and one list of cases, so that one launch serves several world sizes, and
returns per case what came out, the bytes and calls in the ledger and the bytes that were held. `Storages` sees whole
buffers without keeping them, so that a check can tell one that was freed from one that was kept.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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


class Storages:
    """Storages of tensors, seen and not kept alive. most, most_bytes: how many were alive at once, and their bytes."""

    def __init__(self) -> None:
        self.seen, self.most, self.most_bytes = [], 0, 0

    def see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if not any(known() is storage for known in self.seen):
            self.seen.append(weakref.ref(storage))
        alive = self.alive()
        self.most, self.most_bytes = max(self.most, len(alive)), max(self.most_bytes, sum(alive))

    def alive(self) -> list[int]:
        """The bytes of each one that is alive and not empty."""
        sizes = [storage.nbytes() for known in self.seen if (storage := known()) is not None]
        return [size for size in sizes if size]

    def left(self) -> list[int]:
        """`alive`, without what only a cycle of references keeps."""
        gc.collect()
        return self.alive()


@contextmanager
def watching(group: Group, gathered: Storages, reduced: Storages) -> Iterator[None]:
    """Inside, `gathered` sees what all-gathers return and `reduced` what is handed to collectives that reduce."""

    def watched(call: Callable) -> Callable:
        def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if call.__name__ != "all_gather":
                reduced.see(x)
            result = call(x, *args, **kwargs)
            if call.__name__ == "all_gather" and isinstance(result, Tensor):
                gathered.see(result)
            return result

        return run

    names = "all_gather", "all_reduce", "reduce_scatter", "all_to_all"
    for name in names:
        setattr(group, name, watched(getattr(group, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(group, name)  # the method shows through again


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
        first = weights.clone()
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
            "first weights": int(torch.equal(first, case.weights[0])),
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
