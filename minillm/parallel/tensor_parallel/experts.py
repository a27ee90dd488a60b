"""Experts under tensor parallelism: of every expert's hidden layer a rank has 1/t, as of an MLP's.

The region lies around the experts alone: routers see whole rows and sums, so that they are the same on every rank, with
the same gradients; what is reduced is a row for each of a token's experts. With sequence parallelism the whole layer
sees whole sequences on every rank.
"""

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.model.moe import MoE
from minillm.parallel.sharding.placement import Shard
from minillm.parallel.tensor_parallel.regions import Region, copy_to, reduce_from


def cut_experts(layer: MoE, region: Region) -> None:
    """Cuts the experts of a layer in place."""
    experts, group = layer.experts, region.group
    if region.sequence:
        layer.register_forward_pre_hook(lambda _, inputs: (whole_from(inputs[0], group), *inputs[1:]))
        layer.register_forward_hook(lambda *args: own_from(args[-1], group))
    for name, parameter in list(experts.named_parameters()):
        part = Shard(2, group.rank, group.world_size).cut(parameter.detach()).clone()
        setattr(experts, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    experts.register_forward_pre_hook(lambda _, inputs: (copy_to(inputs[0], group), *inputs[1:]))
    experts.register_forward_hook(lambda *args: reduce_from(args[-1], group))


def whole_from(x: Tensor, group: Group) -> Tensor:
    """x: [..., seq / t, hidden] -> [..., seq, hidden], for what every rank computes alike (a router, which has to see
    whole sequences): so its gradient is whole on every rank, which keeps its positions of it."""
    return _Whole.apply(x, Region(group, sequence=True))


def own_from(y: Tensor, group: Group) -> Tensor:
    """y: [..., seq, hidden], which every rank has computed -> its positions; their gradients are gathered."""
    return _Own.apply(y, Region(group, sequence=True))


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, region):
        ctx.region = region
        return region.begin(x)

    @staticmethod
    def backward(ctx, dx):
        return ctx.region.own(dx), None


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, region):
        ctx.region = region
        return region.own(y)

    @staticmethod
    def backward(ctx, dy):
        return ctx.region.end_backward(dy), None
