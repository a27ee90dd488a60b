"""Lab 04: hybrid sharding (shards inside a node, replicas across nodes) on 2 x 2 ranks, and a version with a bug."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from course.lab04_zero.experiments import MODEL, tokens
from minillm import measure
from minillm.comm import Group, launch
from minillm.model import Transformer, cross_entropy
from minillm.parallel import FullyShard

LR, STEPS = 0.1, 3


def groups(group: Group) -> tuple[Group, Group]:
    """(the ranks of this node, the ranks that hold the same shard in other nodes) of 2 nodes with 2 ranks each."""
    inside = [group.subgroup([node, node + 1], f"node {node // 2}") for node in (0, 2)]
    across = [group.subgroup([place, place + 2], f"shard {place}") for place in (0, 1)]
    return inside[group.rank // 2], across[group.rank % 2]


def traffic(group: Group) -> dict[str, int]:
    """Bytes that this rank sends in one step: stage 3 over all ranks; hybrid, inside its node and across nodes."""
    inside, across = groups(group)
    found = {}
    for name, how in (("all", {"group": group}), ("hybrid", {"group": inside, "replicate_group": across})):
        model = FullyShard(Transformer(MODEL, seed=0), **how)
        batch = tokens(0, 0, group.rank, group.world_size, 1)
        with measure.ledger() as led:
            cross_entropy(model(batch[:, :-1]), batch[:, 1:]).backward()
        if name == "all":
            found["all"] = led.bytes()
        else:
            found |= {"inside": led.bytes(group=inside.name), "across": led.bytes(group=across.name)}
    return found


def hybrid_step(shard, gradient, inside, across):
    """One SGD step: shard [P/2] of this rank, gradient [P] of this rank's batch -> the updated weights [P]."""
    mine = inside.reduce_scatter(gradient, op="avg")
    shard -= LR * mine
    return inside.all_gather(shard)


def hunt(group: Group) -> dict[str, Any]:
    """Some steps of `hybrid_step`: loss by step, and how far the weights are from another rank's."""
    inside, across = groups(group)
    model, losses = Transformer(MODEL, seed=0), []
    parameters = list(model.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters])
    flat = F.pad(flat, (0, len(flat) % 2))
    shard = flat.chunk(2)[inside.rank].clone()
    for step in range(STEPS):
        batch = tokens(step, 0, group.rank, group.world_size, 1)
        loss = cross_entropy(model(batch[:, :-1]), batch[:, 1:])
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        _load(parameters, hybrid_step(shard, F.pad(gradient, (0, len(gradient) % 2)), inside, across))
        losses.append(group.all_reduce(loss.detach(), "avg").item())
    weights = torch.cat([p.detach().flatten() for p in parameters])
    everyone = group.all_gather(weights[None])
    return {"losses": losses, "apart": [(everyone[0] - other).abs().max().item() for other in everyone]}


def _load(parameters: list[Tensor], flat: Tensor) -> None:
    start = 0
    for parameter in parameters:
        parameter.data.copy_(flat[start : start + parameter.numel()].view(parameter.shape))
        start += parameter.numel()


def on_two_nodes() -> tuple[dict[str, int], dict[str, Any]]:
    """(`traffic`, `hunt`) as rank 0 saw them."""

    def run(group: Group) -> tuple:
        return traffic(group), hunt(group)

    return launch(run, 4, device="cpu")[0]
