"""Train replicas on real ranks with a learner's code, and trace a wrong gradient to the mistake behind it.

The `Net` is small and has what trips people: a weight that is used twice, a frozen parameter, one that no loss ever
reaches, and two branches of equal size that some ranks compute in the other order. Everything is float64 and drawn anew
for each check, so a gradient is either right to twelve digits or wrong, and a wrong one is compared with what a typical
slip would have made of it: the sum instead of the mean, the rank's own, another rank's.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from course.kit.exercises import CheckFailed
from course.kit.receipts import Row, row
from minillm import measure
from minillm.comm import Group
from minillm.predict import comms

LR = 0.1
CLOSE = 1e-9  # relative error that another order of summation can explain in float64
SINGLE = 1e-6  # and that float32 explains
Gradients = dict[str, Tensor | None]


@dataclass
class Bucket:
    """Parameters whose gradients are views of one flat tensor."""

    flat: Tensor
    parameters: list[nn.Parameter]


class Net(nn.Module):
    """x: [batch, size] -> [batch, size], in float64. flip: compute the right branch before the left one."""

    def __init__(self, size: int, seed: int, unused: bool = True, mixed: bool = False, flip: bool = False) -> None:
        super().__init__()
        self.flip = flip
        self.first = nn.Linear(size, size, bias=False)
        self.gain = nn.Parameter(torch.empty(size, dtype=torch.float32 if mixed else torch.float64))
        self.scale = nn.Parameter(torch.empty(size), requires_grad=False)  # frozen
        self.shared = nn.Linear(size, size)  # used twice
        self.left, self.right = nn.Linear(size, size), nn.Linear(size, size)
        if unused:
            self.spare = nn.Linear(size, size)
        self.last = nn.Linear(size, size)
        draw = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name != "gain":
                parameter.data = parameter.data.double()
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=draw) / size**0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(torch.tanh(self.first(x) * (1 + self.scale)))
        if self.flip:
            right = torch.tanh(self.right(x))
            left = torch.tanh(self.left(x))
        else:
            left = torch.tanh(self.left(x))
            right = torch.tanh(self.right(x))
        return self.last(self.shared(left + right) * (1 + self.gain.double()))


@dataclass(frozen=True)
class TrainingCase:
    """One problem: a model, and for each step and rank a batch, all functions of `seed`."""

    world_size: int = 3
    size: int = 12  # divisible by 2, 3 and 4, so that rings cut every tensor evenly
    batch: int = 6  # samples per rank and step
    steps: int = 2
    unused: bool = True
    mixed: bool = False
    strided: bool = False  # first.weight, and so its gradient, lies column by column in memory
    idle: Collection[int] = ()  # ranks whose inputs are zero, and with them the gradient of first.weight
    seed: int = field(default_factory=lambda: random.randrange(2**31))

    def model(self, flip: bool = False) -> Net:
        model = Net(self.size, self.seed, self.unused, self.mixed, flip)
        if self.strided:
            model.first.weight.data = model.first.weight.data.T.contiguous().T
        return model

    def data(self, step: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
        """(inputs, targets), each [batch, size]: a rank's, or those of all ranks together."""
        draw = torch.Generator().manual_seed(self.seed + 1 + step)
        both = torch.randn(2, self.world_size * self.batch, self.size, generator=draw, dtype=torch.float64)
        for other in self.idle:
            both[0, other * self.batch : (other + 1) * self.batch] = 0
        x, y = both if rank is None else both[:, rank * self.batch : (rank + 1) * self.batch]
        return x, y

    def alone(self) -> tuple[list[Gradients], dict[str, Tensor]]:
        """What one process gets from the whole batches: gradients of every step, and the weights in the end."""
        model, found = self.model(), []
        for step in range(self.steps):
            model.zero_grad()
            loss_of(model, *self.data(step)).backward()
            found.append(gradients(model))
            descend(model)
        return found, weights(model)

    def own(self, rank: int) -> Gradients:
        """The gradients of the first step that rank `rank` has before anything is communicated."""
        model = self.model()
        loss_of(model, *self.data(0, rank)).backward()
        return gradients(model)


@dataclass
class Trained:
    """What a rank did. log[step]: its events in order, (kind, ...); kind is gradient, start, wait or end."""

    gradients: list[Gradients]
    weights: dict[str, Tensor]
    calls: Counter[str]
    bytes: int
    log: list[list[tuple]] = field(default_factory=list)
    note: str = ""


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean squared error, a mean over the samples."""
    return (model(x) - y).square().mean()


def gradients(model: nn.Module) -> Gradients:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def descend(model: nn.Module) -> None:
    """One step of plain SGD, which hides no wrong scale."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= LR * parameter.grad


def train(
    group: Group, case: TrainingCase, step_of: Callable[[Net, int], Any], flip: bool = False, model: Net | None = None
) -> Trained:
    """Train a replica on this rank: `step_of(model, step)` leaves reduced gradients, SGD follows.

    Only what `step_of` communicates is counted.
    """
    model, found = model or case.model(flip), []
    with measure.ledger() as led:
        for step in range(case.steps):
            step_of(model, step)
            found.append(gradients(model))
            descend(model)
    return Trained(found, weights(model), led.calls, led.bytes())


# What is asked of the ranks' results.


def right_gradients(case: TrainingCase, ranks: Sequence[Trained], also: Mapping[float, str] | None = None) -> list[Row]:
    """Rows on gradients and replicas; CheckFailed, saying what a wrong gradient is.

    also: other factors to recognise, {3.0: "the mean times 3: ..."}.
    """
    expected, final = case.alone()
    worst = 0.0
    for step, wanted in enumerate(expected):
        for rank, trained in reversed(list(enumerate(ranks))):  # rank 0's own may be what everybody got
            for name, right in wanted.items():
                found = trained.gradients[step].get(name)
                if (error := _error(found, right)) > CLOSE:
                    which = f"step {step + 1}, rank {rank}: the gradient of {name}"
                    if found is not None and not found.is_contiguous():
                        which += " (its memory is not contiguous, so flatten and reshape copy it)"
                    if step:
                        raise CheckFailed(
                            f"{which} is wrong, although step 1 was right: is something left over from the step before?"
                        )
                    owns = {other: case.own(other)[name] for other in range(case.world_size)}
                    raise CheckFailed(f"{which} {say_gradient(found, right, owns, rank, also)}")
                worst = max(worst, error)
    apart = sum(not torch.equal(trained.weights[name], ranks[0].weights[name]) for trained in ranks for name in final)
    if apart:
        raise CheckFailed("the replicas' weights are no longer the same bits: they drift apart from step to step")
    return [
        row(f"gradients further than {CLOSE:g} from one process's", 0, int(worst > CLOSE)),
        row("    largest relative error", None, worst),
        row(f"weights that differ between replicas after {_steps(case)}", 0, apart),
    ]


def say_gradient(
    found: Tensor | None,
    right: Tensor | None,
    owns: Mapping[int, Tensor | None],
    rank: int,
    also: Mapping[float, str] | None = None,
) -> str:
    """What a wrong gradient is, given every rank's own one."""
    if right is None:
        return "should be None, since no loss reaches it: leave parameters without a gradient alone"
    if found is None:
        return "is gone (None)"
    n = len(owns)
    for other in sorted(owns, key=lambda other: other != rank):
        if owns[other] is not None and _error(found, owns[other]) <= CLOSE:
            whose = "this rank's own: nothing was averaged" if other == rank else f"rank {other}'s, not the mean of all"
            return f"is {whose}"
    known = {
        float(n): f"the sum over the ranks, {n} times their mean: divide by world_size",
        1 / n: f"the mean divided by {n} once more: divide only once",
        **(also or {}),
    }
    for factor, said in known.items():
        if _error(found, factor * right) <= CLOSE:
            return f"is {said}"
    if owns[rank] is not None:
        for factor in (n, 1 / n):
            if _error(found, factor * owns[rank]) <= CLOSE:
                return f"is this rank's own {'times' if factor > 1 else 'divided by'} {n}: nothing was added up"
    if _error(found, right) <= SINGLE:
        return "is right to float32's digits only: the gradient is float64, and something on the way is not"
    ratio = found.flatten().dot(right.flatten()) / right.flatten().dot(right.flatten())
    if _error(found, ratio * right) <= CLOSE:
        return f"is {ratio:.3g} times the mean over the ranks"
    return "is not the mean over the ranks, nor any multiple of it"


def byte_row(case: TrainingCase, ranks: Sequence[Trained], advice: str) -> Row:
    """Bytes sent per rank and step: 2P(N-1)/N of the gradients that exist; CheckFailed if a rank sends more."""
    payload = sum(g.nbytes for g in case.alone()[0][0].values() if g is not None)
    predicted = case.steps * comms.ring_all_reduce(payload, 1, case.world_size).sent_per_rank[0]
    most = max(trained.bytes for trained in ranks)
    if most > predicted:
        raise CheckFailed(
            f"right gradients, but a rank sent {most:,} bytes in {_steps(case)} where 2P(N-1)/N = {predicted:,} "
            f"are enough, {most / predicted:.3g} times as many: {advice}"
        )
    return row(f"bytes sent per rank in {_steps(case)}, 2P(N-1)/N each", predicted, most, "B")


def all_communicate(ranks: Sequence[Trained]) -> None:
    """CheckFailed if the ledger saw nothing, or another collective did the work."""
    calls = sum((trained.calls for trained in ranks), Counter())
    if not calls:
        raise CheckFailed("the ledger saw no communication at all: gradients meet by group.all_reduce")
    if not calls["all_reduce"]:
        raise CheckFailed(f"gradients meet by group.all_reduce; you used {', '.join(sorted(calls))}")


def _steps(case: TrainingCase) -> str:
    return f"{case.steps} step{'s' * (case.steps > 1)}"


def _error(found: Tensor | None, right: Tensor | None) -> float:
    """Relative; 0 if both are None, infinite if one is."""
    if found is None or right is None:
        return 0.0 if found is right else float("inf")
    if found.shape != right.shape:
        return float("inf")
    tolerance = 1.0 if right.dtype == torch.float64 else 1e-3  # a float32 gradient has 7 digits
    difference = tolerance * ((found - right).norm() / right.norm().clamp(min=1e-30)).item()
    return difference if difference == difference else float("inf")
