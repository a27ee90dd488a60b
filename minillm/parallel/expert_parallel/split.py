"""`expert_parallel(module, group)`: of each layer's experts, this rank keeps its part; rows travel to the others.

    mesh of dp ranks         ep = 2: rank 0 has experts 0 1, rank 1 experts 2 3, rank 2 experts 0 1, rank 3 experts 2 3

        ep ->   0  1         attention, norms, routers: the same on all four ranks, gradients averaged over all four
    replicas    2  3         experts 0 1: the same on ranks 0 and 2, which have seen the tokens of all four

Experts see the tokens of their whole expert group. So their gradients are *summed* over the ranks that have the same
experts and divided by all ranks that share the batch: an average over the former alone is ep times too large, which no
loss tells and Adam hides (`gradient_groups` of BucketedDDP, ZeroOptimizer and FullyShard).
"""

from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from minillm.comm import Group
from minillm.model import ModelConfig
from minillm.model.moe import Dispatch, MoE
from minillm.parallel.expert_parallel.dispatch import ExpertDispatch
from minillm.parallel.expert_parallel.nodes import NodeDispatch
from minillm.parallel.sharding.placement import Part, Replicate, Shard
from minillm.parallel.tensor_parallel.plan import EXPERTS, whole_shapes

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def is_expert(name: str) -> bool:
    """Whether a parameter is one of routed experts, stacked along dimension 0."""
    return name.endswith(EXPERTS)


def expert_part_of(name: str, rank: int, world_size: int) -> Part:
    """Which part of parameter `name` `rank` of `world_size` expert-parallel ranks holds."""
    return Shard(0, rank, world_size) if is_expert(name) else Replicate()


def expert_parallel(
    module: AnyModule, config: ModelConfig, group: Group, *, node: Group | None = None, across: Group | None = None
) -> AnyModule:
    """Cuts a Transformer, or a pipeline's part of one, in place; every rank has the whole one, or builds it on "meta".

    node, across: if the group lies over several nodes, the ranks of this one's node, and those with its place in every
    node: then rows travel in two levels (`NodeDispatch`). Tensor-parallel slices of experts are cut once more.
    ValueError for experts that do not divide over the ranks, and for nodes that are not the group's.
    """
    if config.moe is None:
        raise ValueError(f"ep {group.world_size} spreads experts, but this model has none: use ep 1.")
    dispatch = _dispatch(config.moe.num_experts, group, node, across)
    for layer in module.modules():
        if isinstance(layer, MoE):
            layer.dispatch = dispatch
            for name, parameter in layer.experts.named_parameters():
                part = expert_part_of(f".experts.{name}", group.rank, group.world_size).cut(parameter.detach())
                setattr(layer.experts, name, nn.Parameter(part.clone(), requires_grad=parameter.requires_grad))
    module.draw = partial(_draw_part, draw=module.draw, group=group)
    return module


def _dispatch(num_experts: int, group: Group, node: Group | None, across: Group | None) -> Dispatch:
    if node is None and across is None:
        return ExpertDispatch(group, num_experts)
    if node is None or across is None:
        raise ValueError("two levels need both groups: pass the ranks of this one's node and those across nodes.")
    size = node.world_size
    if group.world_size != size * across.world_size or (across.rank, node.rank) != divmod(group.rank, size):
        raise ValueError(
            f"group {group.name!r} of {group.world_size} ranks is not {across.world_size} nodes of {size} neighbours: "
            "cut node and across out of it."
        )
    return NodeDispatch(node, across, num_experts)


def _draw_part(config: ModelConfig, name: str, shape: Any, seed: int, *, draw: Any, group: Group) -> Tensor:
    """This rank's part of what `draw`, which is asked for the whole parameter (or a buffer), makes."""
    whole = draw(config, name, tuple(whole_shapes(config).get(name, shape)), seed)
    return expert_part_of(name, group.rank, group.world_size).cut(whole)
