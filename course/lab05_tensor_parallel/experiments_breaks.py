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

from course.lab05_tensor_parallel import rank_programs
from course.lab05_tensor_parallel.experiments import Setup, build, tokens
from minillm.comm import Group, launch
from minillm.parallel.sharding.placement import Placement, global_norm, sum_partial
from minillm.parallel.tensor_parallel.plan import named_gradients
from minillm.parallel.tensor_parallel.regions import copy_to, end, reduce_from

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


# A bug to find.


def suspect_mlp(x, shards, group):
    """down(silu(gate x) · up x) of this rank's shards: x and the result are the same on every rank."""
    gate, up, down = shards
    gated = F.silu(copy_to(x, group) @ gate.T)
    return reduce_from((gated * (x @ up.T)) @ down.T, group)


def bug_hunt(cut_mlp: Any, mlp: Any) -> dict[str, list[float]]:
    """Relative error of the output and of every gradient of an MLP on 4 ranks, by rank, beside one process."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((16, 8), (16, 8), (8, 16))
    x, gradient, *weights = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((5, 8), (5, 8), *shapes)
    )
    case = rank_programs.Layer(x, tuple(weights), gradient, 4)
    alone = case.alone(rank_programs.whole_mlp)
    ranks = [found[0].results for found in launch(rank_programs.run_mlp, 4, (cut_mlp, mlp), [case], device="cpu")]
    rights = [cut_mlp(alone["d0"], alone["d1"], alone["d2"], rank, 4) for rank in range(4)]
    errors: dict[str, list[float]] = {}
    for rank, found in enumerate(ranks):
        right = {"output": alone["output"], "x": alone["dx"]} | dict(
            zip(("gate", "up", "down"), rights[rank], strict=True)
        )
        for name, key in (("output", "output"), ("gate", "d0"), ("up", "d1"), ("down", "d2"), ("x", "dx")):
            off = (found[key] - right[name]).norm() / right[name].norm()
            errors.setdefault(name if name == "output" else f"gradient of {name}", []).append(off.item())
    return errors


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
