"""Lab 05's accidents: what goes wrong, without any error, once a model is cut along its matrices.

norm gradients not summed under sequence parallelism      gpt-neox#1257, PaddleNLP#7610, Megatron-LM#1446
embedding rows of other ranks not masked
a gradient norm that counts replicated parameters once per rank      NeMo-RL#3788, Megatron-LM#5916
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course.lab05_tensor_parallel.experiments import Setup, build, tokens
from minillm.comm import Group
from minillm.parallel.placement import Placement, global_norm, sum_partial
from minillm.parallel.tensor_parallel.plan import named_gradients
from minillm.parallel.tensor_parallel.regions import end

STEPS, LR = 6, 3e-3


def all_accidents(group: Group, steps: int = STEPS) -> dict[str, Any]:
    """One launch commits all of them, each beside what is right."""
    trained = {"norms": forgotten_norms(group, steps), "embedding": unmasked_rows(group, steps)}
    return trained | {"norm": counted_twice(group)}


def forgotten_norms(group: Group, steps: int) -> dict[str, dict[str, Any]]:
    """Some AdamW steps under sequence parallelism, with and without `sum_partial`.

    apart: how far this rank's norm weights end from rank 0's, at most; losses: of every step.
    """
    found = {}
    for name, summed in (("summed", True), ("forgotten", False)):
        model, places = build(group, Setup(group.world_size, "sequence"))
        optimizer, losses, share = torch.optim.AdamW(model.parameters(), lr=LR), [], None
        for step in range(steps):
            batch = tokens(4, step)
            total, count = model(batch[:, :-1], targets=batch[:, 1:])
            optimizer.zero_grad()
            (total / count).backward()
            if share is None:
                share = model.norm.weight.grad.clone()
            if summed:
                sum_partial(named_gradients(model.named_parameters()), places, group)
            optimizer.step()
            losses.append((total / count).item())
        apart = max(
            _apart(p.detach(), group) for n, p in model.named_parameters() if places[n].part_shape == places[n].shape
        )
        whole = group.all_reduce(share.clone())
        cosine = F.cosine_similarity(share, whole, dim=0).item()
        found[name] = {"losses": losses, "apart": apart, "norm share": (share.norm() / whole.norm()).item()}
        found[name]["cosine"] = cosine
    return found


def _apart(x: Tensor, group: Group) -> float:
    return (x - group.broadcast(x.clone())).abs().max().item()


class Unmasked(nn.Module):
    """A vocabulary-parallel embedding that only keeps ids within its rows."""

    def __init__(self, right: nn.Module) -> None:
        super().__init__()
        self.weight, self.first, self.region = right.weight, right.first, right.region

    def forward(self, tokens: Tensor) -> Tensor:
        local = (tokens - self.first).clamp(0, len(self.weight) - 1)
        return end(F.embedding(local, self.weight), self.region)


def unmasked_rows(group: Group, steps: int) -> dict[str, Any]:
    """Losses of some steps with and without the mask, and what the embedding of a batch is made of."""
    found: dict[str, Any] = {}
    for name in ("masked", "unmasked"):
        model, places = build(group, Setup(group.world_size))
        right = model.embedding
        if name == "unmasked":
            model.embedding = Unmasked(right)
            batch = tokens(4)[:, :-1]
            with torch.no_grad():
                wrong, true = model.embedding(batch), right(batch)
            found["rows added per token"] = group.world_size
            found["relative error"] = ((wrong - true).norm() / true.norm()).item()
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=LR), []
        for step in range(steps):
            batch = tokens(4, step)
            total, count = model(batch[:, :-1], targets=batch[:, 1:])
            optimizer.zero_grad()
            (total / count).backward()
            sum_partial(named_gradients(model.named_parameters()), places, group)
            optimizer.step()
            losses.append((total / count).item())
        found[name] = losses
    return found


def counted_twice(group: Group) -> dict[str, float]:
    """The gradient norm three ways. local: of this rank's parts; naive: all local squares added; whole: minillm's.

    replicated: the norm of the gradients of replicated parameters alone.
    """
    model, places = build(group, Setup(group.world_size, exact=True))
    batch = tokens(4)
    total, count = model(batch[:, :-1], targets=batch[:, 1:])
    (total / count).backward()
    sum_partial(named_gradients(model.named_parameters()), places, group)
    cut, replicated = squares(model, places)
    return {
        "local": (cut + replicated).sqrt().item(),
        "naive": group.all_reduce(cut + replicated).sqrt().item(),
        "whole": global_norm(named_gradients(model.named_parameters()), places, group).item(),
        "replicated": replicated.sqrt().item(),
    }


def squares(model: nn.Module, places: Mapping[str, Placement]) -> tuple[Tensor, Tensor]:
    """Σ gradient² of the parameters that are cut, and of those that every rank has whole."""
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(2)]
    for name, parameter in model.named_parameters():
        sums[places[name].part_shape == places[name].shape] += parameter.grad.double().square().sum()
    return sums[0], sums[1]
