"""Lab 04's accidents, on purpose: what silently goes wrong with shards, and how far."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course.lab04_zero.experiments import MODEL, make, tokens
from minillm.comm import Group
from minillm.model import Transformer, cross_entropy
from minillm.parallel import FullyShard, ZeroOptimizer


def clip_with(group: Group, max_norm: float = 0.1) -> dict[str, Any]:
    """This rank's norm, the true one, and the angle between the gradient clipped by each rank's own and the true."""
    model = Transformer(MODEL, seed=0)
    optimizer = ZeroOptimizer(model, group, 2, make=make)
    batch = tokens(0, 0, group.rank, group.world_size, 1)
    cross_entropy(model(batch[:, :-1]), batch[:, 1:]).backward()
    shard = torch.cat([gradient.flatten() for gradient in optimizer.gradients_by_name().values()])
    local, true = shard.norm(), optimizer.clip_grad_norm_(max_norm)
    right, wrong = (torch.cat(group.gather_objects(shard * max_norm / norm)) for norm in (true, local))
    cosine = torch.dot(right.double(), wrong.double()) / (right.double().norm() * wrong.double().norm())
    return {
        "local": local.item(),
        "global": true.item(),
        "clipped to": wrong.norm().item(),
        "degrees": math.degrees(math.acos(min(1.0, cosine.item()))),
    }


def start_from_own_seeds(group: Group) -> dict[str, list[int]]:
    """Elements of the model that equal each rank's first weights, when every rank seeds itself: torch's and ours."""
    from torch.distributed.fsdp import fully_shard

    def fresh(rank: int) -> nn.Module:
        torch.manual_seed(rank)
        return nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))

    inits = [torch.cat([p.detach().flatten() for p in fresh(rank).parameters()]) for rank in range(group.world_size)]
    theirs = fresh(group.rank)
    fully_shard(theirs, mesh=dist.init_device_mesh("cpu", (group.world_size,)))
    whole = torch.cat([p.full_tensor().flatten() for p in theirs.parameters()])
    ours = FullyShard(fresh(group.rank), group, blocks=["0", "1"]).state_dict()
    mine = torch.cat([value.flatten() for value in ours.values()])
    return {
        "fully_shard": [int((whole == init).sum()) for init in inits],
        "FullyShard": [int((mine == init).sum()) for init in inits],
        "elements": [len(mine)],
    }


def save_on_rank_0(group: Group) -> dict[str, int]:
    """Elements of Adam's first moment: in the model, in rank 0's inner optimizer, in a state gathered from all."""
    model = Transformer(MODEL, seed=0)
    optimizer = ZeroOptimizer(model, group, 1, make=make)
    batch = tokens(0, 0, group.rank, group.world_size, 1)
    cross_entropy(model(batch[:, :-1]), batch[:, 1:]).backward()
    optimizer.step()

    def moments(state: dict) -> int:
        return sum(entry["exp_avg"].numel() for entry in state["state"].values())

    whole = optimizer.state_dict()  # every rank calls it
    return {
        "model": sum(p.numel() for p in model.parameters()),
        "inner": moments(optimizer.inner.state_dict()),
        "whole": moments(whole),
    }


def scale_with_plain_scaler(group: Group, bad_rank: int) -> dict[str, Any]:
    """One overflow in the shard of `bad_rank`: did this rank step, and what is its loss scale afterwards?"""
    shard = nn.Parameter(torch.ones(4))
    sgd = torch.optim.SGD([shard], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    shard.grad = torch.full((4,), math.inf if group.rank == bad_rank else 1024.0)
    scaler.scale(torch.ones(()))  # as before backward
    scaler.step(sgd)
    scaler.update()
    return {"stepped": bool((shard != 1).any()), "scale": scaler.get_scale()}


def all_accidents(group: Group, bad_rank: int) -> dict[str, dict[str, Any]]:
    """Everything in one launch."""
    return {
        "clip": clip_with(group),
        "seeds": start_from_own_seeds(group),
        "save": save_on_rank_0(group),
        "scaler": scale_with_plain_scaler(group, bad_rank),
    }
