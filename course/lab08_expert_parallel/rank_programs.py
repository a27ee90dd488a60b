"""What lab 08's checks run on ranks: a learner's exchange of rows, and the gradients of a layer of experts."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from course.kit.exercises import CheckFailed
from course.shared.diagnose import expect_whole
from course.shared.groups import on_groups
from minillm import measure
from minillm.comm import Group
from minillm.measure import Ledger
from minillm.parallel.expert_parallel import ExpertDispatch


@dataclass(frozen=True)
class Rows:
    """A case of the exchange. chosen[r]: the expert of each row of rank r, sorted; values[r]: [rows, hidden]."""

    num_experts: int
    chosen: Sequence[list[int]]
    values: Sequence[Tensor]

    @property
    def world_size(self) -> int:
        return len(self.chosen)

    def counts(self, rank: int) -> Tensor:
        return torch.bincount(torch.tensor(self.chosen[rank], dtype=torch.int64), minlength=self.num_experts)


@dataclass(frozen=True)
class ExchangeRecord:
    """What one rank got and sent. rows, counts: at its experts; home: what came back; payload: bytes of rows, there
    and back; beside: of whole numbers, which say how many come."""

    rows: Tensor
    counts: list[int]
    home: Tensor
    payload: tuple[int, int]
    beside: int
    calls: Counter


def run_exchange(
    group: Group, learner: tuple[Callable, Callable], cases: Sequence[Rows]
) -> list[ExchangeRecord | None]:
    """The learner's way there of all cases, as of microbatches in flight, then the way back of each; None where the
    case has fewer ranks."""
    to_experts, from_experts = learner
    there = iter(on_groups(group, cases, lambda case, part: _there(part, to_experts, case)))
    arrived = {id(case): next(there) for case in cases}
    return on_groups(group, cases, lambda case, part: _back(part, from_experts, case, *arrived[id(case)]))


def _there(group: Group, to_experts: Callable, case: Rows) -> tuple[Any, Ledger]:
    with measure.ledger() as there:
        return to_experts(case.values[group.rank].clone(), case.counts(group.rank), group), there


def _back(group: Group, from_experts: Callable, case: Rows, found: Any, there: Ledger) -> ExchangeRecord:
    rank, each = group.rank, case.num_experts // group.world_size
    name = f"rank {rank} of {group.world_size}"
    if not isinstance(found, (tuple, list)) or len(found) != 3:
        raise CheckFailed(f"{name}: to_experts gave a {type(found).__name__}; asked for are rows, counts and plan")
    rows, counts, plan = found
    _expect_tensor(f"{name}: to_experts", rows, "rows")
    own = expect_whole(f"{name}: counts", counts, "rows of each expert")
    # every row says which expert had it, if counts are right
    ids = torch.arange(each).repeat_interleave(torch.tensor(own)) if len(own) == each else torch.zeros(0)
    answers = rows + 1e5 * (each * rank + ids[:, None]) if len(ids) == len(rows) else rows
    with measure.ledger() as back:
        home = from_experts(answers.clone(), plan, group)
    _expect_tensor(f"{name}: from_experts", home, "its own rows")
    sent = [_bytes(led, floats=True) for led in (there, back)]
    beside = sum(_bytes(led, floats=False) for led in (there, back))
    return ExchangeRecord(rows, own, home, (sent[0], sent[1]), beside, there.calls + back.calls)


def _expect_tensor(name: str, found: Any, asked: str) -> None:
    """CheckFailed, before anything is sent back that cannot be: a handle, for one."""
    if not isinstance(found, Tensor):
        waits = ": is its wait() missing?" if hasattr(found, "wait") else ""
        raise CheckFailed(f"{name} gave a {type(found).__name__}; the exercise asks for {asked}{waits}")


def _bytes(led: Ledger, floats: bool) -> int:
    return sum(event.bytes for event in led.events if event.dtype.startswith("float") == floats)


# Gradients.


@dataclass(frozen=True)
class Layer:
    """A router and experts, and every rank's tokens. ep: neighbours that share the experts of one replica. first: the
    first of the ranks that share the batch."""

    ep: int
    router: Tensor  # [experts, hidden]
    experts: Tensor  # [experts, hidden, hidden]
    tokens: Sequence[Tensor]  # by rank: [tokens, hidden]
    targets: Sequence[Tensor]
    first: int = 0

    top_k = 2

    def choose(self, x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
        scores = (x @ router.T).softmax(1)
        chosen = scores.topk(self.top_k, 1).indices
        return chosen, scores.gather(1, chosen)


@dataclass(frozen=True)
class Averaged:
    """What one rank's learner made of its gradients; sent: bytes by group; pickled: by gather_objects, uncounted."""

    router: Tensor
    experts: Tensor
    sent: dict[str, int]
    pickled: bool


def run_gradients(group: Group, learner: Callable, cases: Sequence[Layer]) -> list[Averaged | None]:
    """Forward and backward of each rank's own mean loss, then the learner's average over the ranks; None where the
    batch is that of other ranks."""
    return [_gradients(group, learner, case) for case in cases]


def _gradients(group: Group, learner: Callable, case: Layer) -> Averaged | None:
    world, ep = len(case.tokens), case.ep
    sharing = range(case.first, case.first + world)
    data = group if world == group.world_size else group.subgroup(sharing, f"{world} ranks from {case.first}")
    shared = [data.subgroup(range(at, at + ep), f"ep{ep} experts{at}") for at in range(0, world, ep)]
    alike = [data.subgroup(range(at, world, ep), f"ep{ep} replicas{at}") for at in range(ep)]
    if data.rank < 0:
        return None
    replicas = alike[data.rank % ep]
    router, experts = local_gradients(case, data.rank, shared[data.rank // ep])
    with measure.ledger() as led:
        found = learner(router, experts, data, replicas)
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        raise CheckFailed(f"you returned {type(found).__name__}; the exercise asks for two tensors: router, experts")
    for each in found:
        _expect_tensor("average_gradients", each, "two tensors")
    sent = {"data": led.bytes(group=data.name), "replicas": led.bytes(group=replicas.name)}
    return Averaged(*found, sent, "gather_objects" in led.calls)


def local_gradients(case: Layer, rank: int, neighbours: Group) -> tuple[Tensor, Tensor]:
    """Gradients of the mean loss over this rank's own tokens: of the router and of the experts that it holds."""
    each = len(case.experts) // case.ep
    own = case.experts[each * neighbours.rank :][:each].clone().requires_grad_()
    router, x = case.router.clone().requires_grad_(), case.tokens[rank]

    def compute(rows: Tensor, _: Tensor, counts: list[int]) -> Tensor:
        parts = rows.split(counts)
        return torch.cat([torch.tanh(part @ matrix) for part, matrix in zip(parts, own, strict=True)])

    chosen, weights = case.choose(x, router)
    out = ExpertDispatch(neighbours, len(case.experts))(compute, x, chosen, weights)()
    (out * case.targets[rank]).sum(1).mean().backward()
    return router.grad, own.grad


def one_process(case: Layer) -> tuple[Tensor, Tensor]:
    """Gradients of the mean over all tokens of all ranks, token by token, in one process."""
    router, experts = (x.clone().requires_grad_() for x in (case.router, case.experts))
    x, targets = torch.cat(list(case.tokens)), torch.cat(list(case.targets))
    chosen, weights = case.choose(x, router)
    losses = [
        sum(w * (torch.tanh(token @ experts[e]) * target).sum() for w, e in zip(shares, own, strict=True))
        for token, target, own, shares in zip(x, targets, chosen.tolist(), weights, strict=True)
    ]
    torch.stack(losses).mean().backward()
    return router.grad, experts.grad
