"""How a module is divided: its blocks, the parameters of each, and the rest."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from minillm.parallel.fsdp.flat_param import Initialize, ParamInfo
from minillm.parallel.fsdp.param_group import REST, ParamGroup, UnshardStats
from minillm.parallel.slices import Sharding


@torch.no_grad()
def build_groups(
    module: nn.Module,
    blocks: Sequence[str | nn.Module] | None,
    everything: Sequence[ParamInfo],
    stats: UnshardStats,
    sharding: Sharding,
    **how: Any,
) -> tuple[list[nn.Module], list[ParamGroup], list[ParamGroup]]:
    """The blocks, a group for each, and the group of the rest, if there is any. Buffers become rank 0's.
    how: see `FlatParam`."""
    chosen, device = choose(module, blocks), sharding.group.device
    *inside, outside = divide(chosen, everything, device)
    pairs = zip(chosen, inside, strict=True)
    groups = [ParamGroup(name, members, stats, sharding, **how) for name, members in pairs]
    rest = [ParamGroup(REST, outside, stats, sharding, **how)] if outside else []
    materialise_buffers(module, device, how["initialize"])
    for buffer in module.buffers():
        for group in sharding.groups:
            group.broadcast(buffer)
    return list(chosen.values()), groups, rest


def choose(module: nn.Module, blocks: Sequence[str | nn.Module] | None) -> dict[str, nn.Module]:
    """name -> block, for blocks given by name or as modules; None means module.blocks, or the longest nn.ModuleList."""
    blocks = _blocks_of(module) if blocks is None else blocks
    modules = dict(module.named_modules())
    names = {inner: name for name, inner in modules.items()}
    chosen: dict[str, nn.Module] = {}
    for block in blocks:
        name = block if isinstance(block, str) else names.get(block)
        if name not in modules or modules[name] is module:
            raise ValueError(f"block {block!r} is no part of the {type(module).__name__}: use module.named_modules().")
        for other, earlier in chosen.items():
            if modules[name] in set(earlier.modules()) or earlier in set(modules[name].modules()):
                raise ValueError(f"blocks {other} and {name} overlap: name only one of them, a block holds no other.")
        chosen[name] = modules[name]
    return chosen


def _blocks_of(module: nn.Module) -> list[nn.Module]:
    if isinstance(getattr(module, "blocks", None), nn.ModuleList | nn.ModuleDict | list):
        return list(module.blocks.values() if isinstance(module.blocks, nn.ModuleDict) else module.blocks)
    lists = [each for each in module.modules() if isinstance(each, nn.ModuleList)]
    inside = {inner for each in lists for inner in each.modules() if inner is not each}
    outer = [each for each in lists if each not in inside and len(each)]
    if not outer:
        raise ValueError(
            f"{type(module).__name__} has no nn.ModuleList to shard by: name its blocks, blocks=['layer1', ...], or "
            "blocks=[] to gather all of it at once."
        )
    return list(max(outer, key=len))


def divide(
    chosen: dict[str, nn.Module], everything: Sequence[ParamInfo], device: torch.device
) -> list[list[ParamInfo]]:
    """The parameters of each block, and last those of the rest."""
    place = {inner: index for index, block in enumerate(chosen.values()) for inner in reversed([*block.modules()])}
    members: list[list[ParamInfo]] = [[] for _ in range(len(chosen) + 1)]
    for info in everything:
        where = {place.get(owner, len(chosen)) for owner, _ in info.owners}
        if len(where) > 1:
            raise ValueError(f"{' and '.join(info.names)} are tied but lie in different blocks: make those one block.")
        kind = info.parameter.device.type
        if kind not in ("meta", device.type):
            raise ValueError(f"{info.names[0]} is on {kind}, the group on {device.type}: move the module there first.")
        members[where.pop()].append(info)
    for name, info in zip(chosen, members, strict=False):
        if not info:
            raise ValueError(f"block {name} has no parameters of its own: leave it out.")
    return members


def materialise_buffers(module: nn.Module, device: torch.device, initialize: Initialize | None) -> None:
    """Buffers on "meta" come to `device`: those that modules make again themselves (see `Rope`), then by name."""
    for prefix, owner in module.named_modules():
        on_meta = [key for key, buffer in owner._buffers.items() if buffer is not None and buffer.is_meta]
        if on_meta and not owner._parameters:
            owner.to_empty(device=device, recurse=False)
        for key in on_meta:
            if owner._buffers[key].is_meta or key not in owner._non_persistent_buffers_set:
                name = f"{prefix}.{key}" if prefix else key
                if initialize is None:
                    raise ValueError(f"buffer {name} is on 'meta': give initialize=lambda name, shape: a tensor.")
                owner._buffers[key] = initialize(name, tuple(owner._buffers[key].shape)).to(device)
