"""Lab 06's rank programs: a learner's pipeline stage, messages and tied embedding at work on real ranks.

Each program takes the learner's object and a list of cases, so that one launch serves several numbers of stages, and
returns per case what came out and what the ledger says. A stage's inputs and the graphs behind its outputs are watched
by weak references: those that live on after their backward are activations that were never let go.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from course.kit.exercises import CheckFailed
from course.shared.groups import on_groups
from minillm import measure
from minillm.comm import Group, Work

WIDTH, ROWS = 6, 3  # of what travels
GROUP_ONLY = {"send", "recv", "exchange"}


# A stage.


@dataclass(frozen=True)
class StageCase:
    """A model cut into stages, its microbatches and targets, and the order in which stages are told to work."""

    weights: list[Tensor]  # [width + 1, width] of each stage: a matrix, and a bias below it
    inputs: list[Tensor]  # [rows, width] of each microbatch; integers, as token ids are, or not
    targets: list[Tensor]
    orders: list[list[str]]
    name: str

    @property
    def world_size(self) -> int:
        return len(self.weights)

    def loss(self, y: Tensor, m: int) -> Tensor:
        """Mean loss of microbatch m."""
        return (y - self.targets[m]).square().mean()


@dataclass(frozen=True)
class Staged:
    """What one rank did. peak: outputs whose graphs live at once; held: inputs that do; messages, bytes: sent; waits:
    for its own sends, before the caller asked for it."""

    gradient: Tensor | None
    peak: int
    held: int
    messages: int
    bytes: int
    waits: int
    calls: Counter[str] = field(default_factory=Counter)


class Part(nn.Module):
    """One stage: tanh(x @ weight + bias). Knows which of its inputs and graphs are still alive, and keeps none.

    What it returns is what its backward reads, so an output that is overwritten shows in the gradient.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight[:-1].clone()), nn.Parameter(weight[-1].clone())
        self.inputs, self.graphs = weakref.WeakSet(), weakref.WeakSet()

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.add(x.untyped_storage())  # of whichever view of it
        return torch.tanh(_Watch.apply(x.to(self.weight.dtype) @ self.weight + self.bias, self.graphs))

    def gradient(self) -> Tensor | None:
        found = self.weight.grad, self.bias.grad
        return None if None in found else torch.cat((found[0], found[1][None]))


class _Watch(torch.autograd.Function):
    """The identity; the token lives as long as the graph that leads here."""

    @staticmethod
    def forward(ctx, y: Tensor, graphs: weakref.WeakSet) -> Tensor:
        ctx.token = _Token()
        graphs.add(ctx.token)
        return y.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        return gradient, None


class _Token:
    pass


def run_stage(group: Group, learner: Callable, cases: Sequence[StageCase]) -> list[Staged | None]:
    """learner(module, group, like, loss, microbatches), then .forward(m, x) and .backward(m) in each case's order."""

    gc.freeze()  # makes looking for what is let go cheap

    def run(case: StageCase, part: Group) -> Staged:
        module, peak, held = Part(case.weights[part.rank]), 0, 0
        like = torch.zeros_like(case.inputs[0], dtype=case.weights[0].dtype)
        with measure.ledger() as led, Sends(part) as sends:
            stage = learner(module, part, like, case.loss, len(case.inputs))
            for action in case.orders[part.rank]:
                kind, m = action[0], int(action[1:])
                if kind == "F":
                    stage.forward(m, case.inputs[m].clone() if part.rank == 0 else None)
                else:
                    stage.backward(m)
                sends.end_call()
                if len(module.graphs) > peak or len(module.inputs) > held:
                    gc.collect()
                    peak, held = max(peak, len(module.graphs)), max(held, len(module.inputs))
            for handle in getattr(stage, "sent", ()):
                if hasattr(handle, "wait"):
                    handle.wait()
            sends.refuse_lost("keep it in self.sent, where the caller waits for it")
        part.barrier()
        return Staged(module.gradient(), peak, held, led.messages, led.bytes(), sends.waits, led.calls)

    return on_groups(group, cases, run)


class Sends:
    """Watches a group's messages. waits: sends that were waited for in the very call that posted them."""

    def __init__(self, group: Group) -> None:
        self.group, self.waits = group, 0
        self._of_this_call: list[Work] = []  # sends
        self._open: list[Work] = []  # handles that nobody has waited for; without one a message may never leave

    def __enter__(self) -> "Sends":
        post = self.group.exchange

        def exchange(send: Any = (), recv: Any = (), async_op: bool = False, **how: Any) -> Any:
            work = post(send, recv, async_op, **how)
            if async_op:
                self._open.append(work)
                self._of_this_call += [work] if send else []
                work.wait = partial(self._wait, work, work.wait)
            else:
                self.waits += bool(send)
            return work

        self.group.exchange = exchange
        return self

    def __exit__(self, *error: Any) -> None:
        del self.group.exchange  # the method shows through again

    def _wait(self, work: Work, wait: Callable[[], Any]) -> Any:
        if work in self._open:
            self._open.remove(work)
            self.waits += work in self._of_this_call
        return wait()

    def end_call(self) -> None:
        """From now on the caller may wait."""
        self._of_this_call = []

    def refuse_lost(self, advice: str) -> None:
        """CheckFailed if a message was posted whose handle nobody has waited for."""
        if self._open:
            raise CheckFailed(
                f"rank {self.group.rank} of {self.group.world_size} posts {len(self._open)} messages with "
                f"async_op=True whose handles nobody waits for, so they may never arrive: {advice}"
            )


def in_one_process(case: StageCase, changed: Callable[[Tensor, int], Tensor] | None = None) -> list[Tensor]:
    """Every stage's gradient of the mean over all microbatches, or of `changed(loss of microbatch m, m)`."""
    weights = [weight.clone().requires_grad_() for weight in case.weights]
    for m, x in enumerate(case.inputs):
        for weight in weights:
            x = torch.tanh(x.to(weight.dtype) @ weight[:-1] + weight[-1])
        loss = case.loss(x, m) / len(case.inputs)
        (changed(loss, m) if changed else loss).backward()
    return [weight.grad for weight in weights]


# Messages.


def run_messages(group: Group, programs: Sequence[tuple[int, list[list[Any]]]]) -> list[tuple[list[str], int] | None]:
    """Carries out (stages, steps by stage), each list of messages as one exchange that returns when all have arrived.

    Returns per program (what arrived with other numbers than were sent, messages this rank sent). Every message says
    which microbatch it belongs to and where it comes from.
    """

    def run(program: tuple[int, list[list[Any]]], part: Group) -> tuple[list[str], int]:
        wrong = []
        with measure.ledger() as led:
            for step in program[1][part.rank]:
                if isinstance(step, list):
                    wrong += _carry_out(step, part)
        part.barrier()
        return wrong, led.messages

    return on_groups(group, programs, run, size=itemgetter(0))


def _carry_out(batch: list[tuple[str, str]], group: Group) -> list[str]:
    """One exchange. batch: (send or recv, action whose result travels)."""
    sends, recvs, due = [], [], []
    for verb, name in batch:
        onward = 1 if name[0] == "F" else -1
        peer = group.rank + (onward if verb == "send" else -onward)
        if verb == "send":
            sends.append((_content(name, group.rank), peer))
        else:
            recvs.append((torch.zeros(4), peer))
            due.append((name, _content(name, peer)))
    group.exchange(send=sends, recv=recvs)
    return [name for (name, right), (x, _) in zip(due, recvs, strict=True) if not torch.equal(x, right)]


def _content(name: str, rank: int) -> Tensor:
    return torch.tensor([float(name[0] == "F"), float(name[1:]), float(rank), 1.0])


# The tied embedding.


@dataclass(frozen=True)
class Tied:
    """gradients[r]: of the copy on stage r; only the first and the last are used."""

    gradients: list[Tensor]

    @property
    def world_size(self) -> int:
        return len(self.gradients)


@dataclass(frozen=True)
class Summed:
    """What one rank has afterwards and what it sent."""

    gradient: Tensor | None
    has_graph: bool
    weight_moved: bool
    bytes: int
    calls: Counter[str]


def run_tied(group: Group, learner: Callable, cases: Sequence[Tied]) -> list[Summed | None]:
    """learner(weight, group), with weight None between the ends."""

    def run(case: Tied, part: Group) -> Summed:
        weight = None
        if part.rank in (0, part.world_size - 1):
            weight = nn.Parameter(torch.ones_like(case.gradients[0]))
            weight.grad = case.gradients[part.rank].clone()
        with measure.ledger() as led, Sends(part) as sends:
            learner(weight, part)
            sends.refuse_lost("wait() for it before the gradient is used")
        part.barrier()
        moved = weight is not None and not torch.equal(weight.detach(), torch.ones_like(weight))
        found = None if weight is None else weight.grad
        return Summed(found, found is not None and found.requires_grad, moved, led.bytes(), led.calls)

    return on_groups(group, cases, run)
