"""A rank's part of a model as an engine takes it, and what the ranks have to agree on before the first step.

Its configuration is that of the part: as many heads as the rank has, so that keys and values of these alone take
memory; vocabulary, layers and context stay those of the whole. Where there are fewer key and value heads than ranks,
several ranks hold the same one.
"""

from dataclasses import replace
from typing import Any

import torch

from minillm.comm import Group
from minillm.model import ModelConfig, Transformer
from minillm.serve.ranks.stage import Stage


def as_part(model: Transformer | Stage, group: Group) -> Transformer | Stage:
    """A model that `tensor_parallel` has cut over the group, with its part's configuration."""
    model.config = part_config(model.config, group.world_size)
    return model


def part_config(config: ModelConfig, world_size: int) -> ModelConfig:
    kv_heads = config.num_kv_heads // min(world_size, config.num_kv_heads)
    heads = {"num_heads": config.num_heads // world_size, "num_kv_heads": kv_heads}
    return replace(config, head_dim=config.head_dim, **heads)


def layers_of(model: Any) -> range:
    """The layers that this rank has, and whose keys and values it keeps."""
    return model.layers if isinstance(model, Stage) else range(model.config.num_layers)


def group_of(model: Any) -> Group | None:
    """The ranks that the model is cut over; None for a whole one."""
    return model.group if isinstance(model, Stage) else sharers_of(model)


def sharers_of(model: Any) -> Group | None:
    """The ranks that share this rank's layers, each with its heads and words; None for a whole model."""
    if isinstance(model, Stage):
        return model.mesh.tp
    region = getattr(model.embedding, "region", None)
    return None if region is None else region.group


def agreed(model: Any, value: int, op: str = "min") -> int:
    """The least (op "max": largest) of the ranks' values; the value itself for a whole model."""
    group = group_of(model)
    if group is None or group.world_size == 1:
        return value
    return int(group.all_reduce(torch.tensor([value], dtype=torch.int64, device=group.device), op))


def ranks_here(model: Any) -> int:
    """How many of the model's ranks share this machine and its memory."""
    group = group_of(model)
    return 1 if group is None else len(group.world.local_ranks.intersection(group.ranks))
