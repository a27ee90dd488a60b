"""Lab 03's accidents: all-reduces started in another order on each rank, and shards of unequal size."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from course.lab03_data_parallel import rank_programs
from course.lab03_data_parallel.experiments import relative
from minillm.comm import Group, launch


class TwoBranches(nn.Module):
    """Two branches of the same size. flip: compute b before a."""

    def __init__(self, flip: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8, bias=False).double(), nn.Linear(8, 8, bias=False).double()
        self.flip = flip

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.b, self.a) if self.flip else (self.a, self.b)
        one = first(x)
        return torch.tanh(one) + torch.tanh(second(x))


def as_they_become_ready(group):
    """One backward on this rank: the averaged gradients of a and b, and this rank's own."""
    model = TwoBranches(flip=group.rank == 1)
    torch.manual_seed(1 + group.rank)
    loss = model(torch.randn(4, 8).double()).square().mean()
    own = torch.autograd.grad(loss, [model.a.weight, model.b.weight], retain_graph=True)
    handles = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: handles.append(group.all_reduce(p.grad, op="avg", async_op=True))
        )
    loss.backward()
    for handle in handles:
        handle.wait()
    return {"loss": loss.item(), "own": own, "averaged": (model.a.weight.grad, model.b.weight.grad)}


def unequal_shards(average_gradients: Callable, weighted_loss: Callable, samples: tuple[int, int] = (12, 4)) -> dict:
    """Relative error of the gradient on 2 ranks with `samples` each: mean of means, and weighted by samples."""
    return launch(_unequal, 2, samples, average_gradients, weighted_loss)[0]


def _unequal(group: Group, samples: tuple[int, int], average_gradients: Callable, weighted_loss: Callable) -> dict:
    case = rank_programs.TrainingCase(world_size=2, batch=sum(samples), unused=False, seed=3)
    x, y = case.data(0, 0)  # one batch, dealt out unevenly
    mine = slice(0, samples[0]) if group.rank == 0 else slice(samples[0], None)
    found = {}
    for name in ("mean of means", "weighted"):
        model = case.model()
        nll = (model(x[mine]) - y[mine]).square().mean(1)
        loss = nll.mean() if name == "mean of means" else weighted_loss(nll, torch.ones_like(nll), group)
        loss.backward()
        average_gradients(model, group)
        found[name] = _flat(model)
    alone = case.model()
    rank_programs.loss_of(alone, x, y).backward()
    return {name: relative(gradient, _flat(alone)) for name, gradient in found.items()}


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def rounding_of_a_ring(dtype: torch.dtype, ranks: int = 64, elements: int = 4096) -> float:
    """Relative error of the sum of as many gradients, added up one after the other in `dtype` as a ring does."""
    gradients = torch.randn(ranks, elements, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total = gradients[0].to(dtype)
    for gradient in gradients[1:]:
        total = total + gradient.to(dtype)
    return relative(total.double(), gradients.sum(0))
