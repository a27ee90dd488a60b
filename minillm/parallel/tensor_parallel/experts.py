"""Experts under tensor parallelism: of every expert's hidden layer a rank has 1/t, as of an MLP's.

The region lies around the experts alone: routers see whole rows and sums, so that they are the same on every rank, with
the same gradients; what is reduced is a row for each of a token's experts. With sequence parallelism the whole layer
sees whole sequences on every rank.

For inference a rank may have 1/t of the experts instead, each of them whole. All ranks have all tokens, so no row
travels to an expert: a rank answers for the experts that it has, and what is reduced is a row for each token.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.model.moe import MoE
from minillm.model.moe.experts import Experts
from minillm.model.moe.permute import sort_by_expert
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


def keep_own_experts(layer: MoE, group: Group) -> None:
    """This rank keeps its experts, in place; answers are added up over the ranks. ValueError unless they divide."""
    experts, count = layer.experts, layer.config.num_experts
    if count % group.world_size:
        raise ValueError(
            f"{count} experts do not divide over {group.world_size} ranks: every rank takes equally many; use fewer "
            "ranks, or leave out ep, which gives each rank a part of every expert."
        )
    for name, parameter in list(experts.named_parameters()):
        part = Shard(0, group.rank, group.world_size).cut(parameter.detach()).clone()
        setattr(experts, name, nn.Parameter(part, requires_grad=False))
    layer.dispatch = OwnExperts(group, count // group.world_size)


class OwnExperts:
    """A layer's dispatch, see `MoE`: x is the same on all ranks, which have `count` experts each."""

    def __init__(self, group: Group, count: int) -> None:
        self.group, self.count = group, count

    def __call__(
        self, experts: Experts, x: Tensor, chosen: Tensor, weights: Tensor, dropless: bool
    ) -> Callable[[], Tensor]:
        own = chosen - self.group.rank * self.count
        elsewhere = (own < 0) | (own >= self.count)
        routes = sort_by_expert(own.masked_fill(elsewhere, self.count), self.count + 1, dropless=True)
        place = routes.place.masked_fill(elsewhere, -1)  # sorted behind all others, and not waited for: see `Routes`
        routes = replace(routes, place=place, counts=routes.counts[:-1], all=False)

        def answer() -> Tensor:
            done = experts(routes.to_experts(x), routes.counts)
            return self.group.all_reduce(routes.from_experts(done, weights.to(done.dtype)))

        return answer


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
