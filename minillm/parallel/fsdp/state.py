"""A FullyShard's optimizer, and its weights saved and restored: whole, as one process would have them, or by rank.

    full      {"blocks.0.attention.q_proj.weight": [hidden, hidden], ...}    from any number of ranks to any other
    sharded   {"world_size": N, "rank": r, "slices": {name: [elements]}, ...}    1/N of the bytes, back to N ranks only

How the optimizer's state becomes whole is in `parallel/optimizer_state.py`.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.parallel.fsdp.flat_param import FlatParam, ShardedParam
from minillm.parallel.offload import Offload
from minillm.parallel.optimizer_state import MakeOptimizer, SlicedOptimizer
from minillm.parallel.placement import Placement, gather


class Sharded(Protocol):
    """What is read of a `FullyShard`."""

    module: nn.Module
    group: Group
    norm_group: Group
    home: Offload
    flats: list[FlatParam]
    params: dict[str, ShardedParam]
    placements: dict[str, Placement]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def clip_grad_norm_(self, max_norm: float | None, loss_scale: float, norm_type: float) -> Tensor: ...


class FullyShardOptimizer(SlicedOptimizer):
    """Steps the slices of a FullyShard; gradients are reduced by then, so each rank steps for itself.

    make(named): see `FullyShard.optimizer`. Every rank's optimizer has the same parameters by name and order, many of
    them of no elements, so its state can be put together into that of one process.
    """

    def __init__(self, sharded: Sharded, make: MakeOptimizer) -> None:
        self.sharded = sharded
        slices = {name: part for name, part in sharded.named_parameters() if part.requires_grad}
        super().__init__(make, slices, sharded.placements, sharded.norm_group, sharded.home)

    def prepare_gradients(self) -> None:
        """For loops that look at gradients before `step`: the slices have theirs since the end of backward."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.inner.step(closure)
        self.home.keep(self.inner)
        return loss

    def clip_grad_norm_(self, max_norm: float | None, loss_scale: float = 1.0, norm_type: float = 2.0) -> Tensor:
        return self.sharded.clip_grad_norm_(max_norm, loss_scale, norm_type)

    def masters(self) -> dict[str, Tensor]:
        wide = (flat for flat in self.sharded.flats if flat.shard.dtype != flat.dtype)
        return {param.name: param.slice.detach() for flat in wide for param in flat.params}

    def layout(self) -> dict[str, Any]:
        group = self.sharded.group
        flats = [[param.name for param in flat.params] for flat in self.sharded.flats]
        return {"rank": group.rank, "world_size": group.world_size, "flats": flats}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "shard" in state:  # masters are the model's own shards, which it has loaded
            state = state | {"masters": {}}
        super().load_state_dict(state)


@torch.no_grad()
def full_state(sharded: Sharded) -> dict[str, Tensor]:
    state = {name: tensor.cpu() for name, tensor in _buffers(sharded).items()}
    for flat in sharded.flats:
        whole = gather({p.name: p.slice for p in flat.params}, sharded.placements, sharded.norm_group)
        state |= {name: whole[param.name].to(flat.dtype) for param in flat.params for name in param.names}
    return {name: state[name] for name in sharded.module.state_dict()}


@torch.no_grad()
def sharded_state(sharded: Sharded) -> dict[str, Any]:
    slices = {name: param.slice.detach() for name, param in sharded.params.items()}
    buffers = _buffers(sharded)
    return {"world_size": sharded.group.world_size, "rank": sharded.group.rank, "slices": slices, "buffers": buffers}


@torch.no_grad()
def load_state(sharded: Sharded, state: dict[str, Any]) -> None:
    group, buffers = sharded.group, _buffers(sharded)
    if "world_size" in state:
        if (state["world_size"], state["rank"]) != (group.world_size, group.rank):
            raise ValueError(
                f"this is the shard of rank {state['rank']} of {state['world_size']}, but here is rank {group.rank} of "
                f"{group.world_size}: save full_state_dict(), which fits any number of ranks."
            )
        slices, saved = state["slices"], state["buffers"]
    else:
        _check_names(sharded, state)
        slices = {name: param.placement.cut(state[name]) for name, param in sharded.params.items()}
        saved = state
    for name, param in sharded.params.items():
        param.slice.copy_(slices[name])
    for name, buffer in buffers.items():
        buffer.copy_(saved[name])


def _check_names(sharded: Sharded, state: dict[str, Tensor]) -> None:
    shapes = {name: tensor.shape for name, tensor in sharded.module.state_dict().items()}
    shapes |= {name: param.placement.shape for param in sharded.params.values() for name in param.names}
    for name in [*shapes, *state]:
        if name not in state or name not in shapes:
            raise ValueError(
                f"{name} is {'missing in' if name in shapes else 'no part of the module but in'} the state."
            )
        if state[name].shape != shapes[name]:
            raise ValueError(f"{name} is {list(state[name].shape)} in the state, {list(shapes[name])} here.")


def _buffers(sharded: Sharded) -> dict[str, Tensor]:
    """Those that are saved; every rank has them whole."""
    saved = sharded.module.state_dict()
    return {name: buffer for name, buffer in sharded.module.named_buffers() if name in saved}
