"""Lab 06: an asynchronous pipeline (PipeDream), played in one process in the order in which its ranks would work.

Nothing is flushed: a stage updates its weights after every backward. A microbatch has to go back through the weights
it came through, so a stage keeps old versions (weight stashing); and its gradient is late.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.parallel.pipeline_parallel.schedule.schedules import Durations, pipedream, simulate

WIDTH, ROWS, LR = 8, 4, 0.05


@dataclass(frozen=True)
class Stale:
    """By stage: versions held at once, updates that a gradient is late in the steady state; and how far the gradients
    of the later microbatches are from those of a pipeline that is flushed after each, relative."""

    versions: list[int]
    late: list[int]
    off: list[float]


def play(stages: int = 4, microbatches: int = 16, seed: int = 0) -> Stale:
    """Runs `pipedream` with real numbers: tanh(x @ w) on every stage, squared error at the end, SGD."""
    schedule = pipedream(stages, microbatches)
    draw = torch.Generator().manual_seed(seed)
    first = [torch.randn(WIDTH, WIDTH, generator=draw, dtype=torch.float64) / 2 for _ in range(stages)]
    inputs = torch.randn(microbatches, ROWS, WIDTH, generator=draw, dtype=torch.float64)
    targets = torch.randn(microbatches, ROWS, WIDTH, generator=draw, dtype=torch.float64) / 2
    weights, updates = [w.clone() for w in first], [0] * stages
    stash: list[dict[int, tuple[Tensor, int, Tensor, Tensor]]] = [{} for _ in range(stages)]
    passed: dict[tuple[str, int, int], Tensor] = {}
    gradients: dict[tuple[int, int], Tensor] = {}
    held, late = [1] * stages, [[0] * microbatches for _ in range(stages)]
    for _, rank, _, action in _in_time(schedule):
        m = action.microbatch
        if action.kind == "F":
            x = inputs[m] if rank == 0 else passed["F", m, rank - 1]
            x, w = x.clone().requires_grad_(), weights[rank].clone().requires_grad_()
            y = torch.tanh(x @ w)
            stash[rank][m] = w, updates[rank], x, y
            held[rank] = max(held[rank], len({updates[rank], *(version for _, version, _, _ in stash[rank].values())}))
            passed["F", m, rank] = y.detach()
        elif action.kind == "B":
            w, version, x, y = stash[rank].pop(m)
            if rank == stages - 1:
                (y - targets[m]).square().mean().backward()
            else:
                y.backward(passed["B", m, rank + 1])
            passed["B", m, rank], gradients[m, rank] = x.grad, w.grad
            late[rank][m] = updates[rank] - version
        else:
            weights[rank] -= LR * gradients[m, rank]
            updates[rank] += 1
    right = _one_after_the_other(first, inputs, targets)
    steady = range(microbatches // 2, microbatches)
    off = [
        sum(((gradients[m, rank] - right[m][rank]).norm() / right[m][rank].norm()).item() for m in steady) / len(steady)
        for rank in range(stages)
    ]
    return Stale(held, [lates[-1] for lates in late], off)


def _in_time(schedule) -> list[tuple]:
    """(end, rank, place in the order, action) of everything, as it would happen."""
    line = simulate(schedule, Durations(F=1, B=2, W=1))
    return sorted(
        ((bar.end, rank, i, bar.action) for rank, bars in enumerate(line.bars) for i, bar in enumerate(bars)),
        key=lambda item: item[:3],
    )


def _one_after_the_other(first: list[Tensor], inputs: Tensor, targets: Tensor) -> list[list[Tensor]]:
    """Each microbatch's gradients if all updates before it are made: one process."""
    weights, found = [w.clone().requires_grad_() for w in first], []
    for x, target in zip(inputs, targets, strict=True):
        for w in weights:
            x = torch.tanh(x @ w)
        gradients = torch.autograd.grad((x - target).square().mean(), weights)
        found.append(list(gradients))
        with torch.no_grad():
            for w, gradient in zip(weights, gradients, strict=True):
                w -= LR * gradient
    return found
