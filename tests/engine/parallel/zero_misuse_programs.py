"""What ranks run in the tests of what a ZeroOptimizer is told when somebody else changes its module afterwards."""

from collections.abc import Callable

import torch
from seam_programs import Net, make, rows, said
from torch import nn

from minillm.comm import Group
from minillm.parallel import BucketedDDP, FullyShard, ZeroOptimizer

TorchDDP = nn.parallel.DistributedDataParallel


def one_step(change: Callable[[nn.Module], nn.Module], stage: int, group: Group) -> tuple[str, float]:
    """What a step says after `change` of the module, and how far it has moved the weights."""
    model = Net()
    optimizer = ZeroOptimizer(model, group, stage, make=make)
    module = change(model)
    before = [p.detach().clone() for p in model.parameters()]

    def step() -> None:
        module(rows(0, group.rank, group.world_size).to(next(model.parameters()).dtype)).backward()
        optimizer.step()

    text = said(step)
    return text, max((a - b).abs().max().item() for a, b in zip(before, model.parameters(), strict=True))


def clipped_by_torch(group: Group) -> str:
    model = Net()
    ZeroOptimizer(model, group, 1, make=make)
    model(rows(0, group.rank, group.world_size)).backward()
    return said(nn.utils.clip_grad_norm_, model.parameters(), 1.0)


def norms_by_hand(group: Group) -> list[str]:
    """What torch's norms say of slices, of stage 2 and of FullyShard."""
    found = []
    for stage in (2, 3):
        model = Net()
        module = FullyShard(model, group) if stage == 3 else model
        optimizer = module.optimizer(make) if stage == 3 else ZeroOptimizer(model, group, 2, make=make)
        module(rows(0, group.rank, group.world_size)).backward()
        gradients = [p.grad for each in optimizer.param_groups for p in each["params"] if p.grad is not None]
        for norm in (torch.Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm, torch.norm):
            found.append(said(lambda norm=norm, gradients=gradients: torch.stack([norm(each) for each in gradients])))
    return found


def ignored_by_torch(group: Group) -> tuple[str, float]:
    """A DDP that leaves the layers to ZeRO, and they do not sit still."""
    model = Net()
    optimizer = ZeroOptimizer(model.layers, group, 1, make=make)
    TorchDDP._set_params_and_buffers_to_ignore_for_model(
        model, [f"layers.{n}" for n, _ in model.layers.named_parameters()]
    )
    module, before = TorchDDP(model), model.layers[0][0].weight.detach().clone()

    def step() -> None:
        module(rows(0, group.rank, group.world_size)).backward()
        optimizer.step()

    return said(step), (model.layers[0][0].weight - before).abs().max().item()


def misuses(group: Group) -> dict:
    changes = {
        "torch": TorchDDP,
        "ours": lambda model: BucketedDDP(model, group),
        "float": nn.Module.float,
        "to": lambda model: model.to(torch.bfloat16),
        "nothing": nn.Module.double,
    }
    found = {(name, stage): one_step(change, stage, group) for name, change in changes.items() for stage in (1, 2)}
    found["norms"] = norms_by_hand(group)
    found["clip"] = clipped_by_torch(group)
    found["ignored"] = ignored_by_torch(group)
    try:
        TorchDDP(FullyShard(Net(), group))
    except RuntimeError as error:
        found["fsdp"] = str(error)
    found["ddp"] = said(TorchDDP(BucketedDDP(Net(), group)), rows(0))
    return found
