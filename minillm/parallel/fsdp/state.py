"""A FullyShard's optimizer, and its weights saved and restored: whole, as one process would have them, or by rank.

    whole     {"blocks.0.attention.q_proj.weight": [hidden, hidden], ...}    from any number of ranks to any other
    sharded   {"world_size": N, "rank": r, "slices": {name: [elements]}, ...}    1/N of the bytes, back to N ranks only

How the optimizer's state becomes whole is in spread_state.py.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from minillm.parallel.optimizer_state import Spread, names_by_group, restore

if TYPE_CHECKING:
    from minillm.parallel.fsdp.fully_shard import FullyShard

Make = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps the slices of a FullyShard; gradients are reduced by then, so each rank steps for itself.

    make(named): see `FullyShard.optimizer`. Every rank's optimizer has the same parameters by name and order, many of
    them of no elements, so its state can be put together into that of one process.
    """

    def __init__(self, sharded: "FullyShard", make: Make):
        self.sharded = sharded
        self.inner = make([(name, slice_) for name, slice_ in sharded.named_parameters() if slice_.requires_grad])
        super().__init__(self.inner.param_groups, self.inner.defaults)  # the same dicts: a scheduler sees and sets them
        self.state = self.inner.state

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The slices that this rank steps."""
        return [slice_ for group in self.inner.param_groups for slice_ in group["params"] if slice_.numel()]

    def collect(self) -> None:
        """For loops that look at gradients before `step`: the slices have theirs since the end of backward."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.inner.step(closure)
        self.sharded.home.keep(self.inner)
        return loss

    def clip_grad_norm_(self, max_norm: float | None, loss_scale: float = 1.0) -> Tensor:
        return self.sharded.clip_grad_norm_(max_norm, loss_scale)

    def state_dict(self, whole: bool = True) -> dict[str, Any]:
        """whole: torch's own layout, as an optimizer of the plain module's parameters would save it, on every rank's
        CPU; every rank calls it. Otherwise this rank's part."""
        state, sharded = self.inner.state_dict(), self.sharded
        if not whole:  # masters: the model's own shards
            return {"world_size": sharded.group.world_size, "rank": sharded.group.rank, **state}
        masters = {w.name: w.slice.detach() for f in sharded.flats if f.shard.dtype != f.dtype for w in f.weights}
        return self._spread().whole({**state, "masters": masters})

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Either form of `state_dict`, or what a plain optimizer of the same parameters saved; no communication.

        Load the model first: masters that `state` does not hold are what it brought.
        """
        if "world_size" in state:
            check_place(state, self.sharded)
        else:
            state = self._spread().own(state)
            for name, part in state["masters"].items():
                self.sharded.weights[name].slice.copy_(part)
        restore(self, state)
        self.sharded.home.keep(self.inner)

    def _spread(self) -> Spread:
        sharded, weights = self.sharded, self.sharded.weights
        names = names_by_group(self.inner, sharded.named_parameters())
        shapes = {name: weight.slice.whole_shape for name, weight in weights.items()}
        return Spread(sharded.group, names, names, shapes, sharded.join, lambda name, whole: weights[name].cut(whole))


@torch.no_grad()
def whole_state(sharded: "FullyShard") -> dict[str, Tensor]:
    state = {name: tensor.cpu() for name, tensor in _buffers(sharded).items()}
    for flat in sharded.flats:
        values = flat.join({weight.name: weight.slice for weight in flat.weights})
        state |= {name: values[weight.name].to(flat.dtype) for weight in flat.weights for name in weight.names}
    return {name: state[name] for name in sharded.module.state_dict()}


@torch.no_grad()
def shard_state(sharded: "FullyShard") -> dict[str, Any]:
    slices = {name: weight.slice.detach() for name, weight in sharded.weights.items()}
    buffers = _buffers(sharded)
    return {"world_size": sharded.group.world_size, "rank": sharded.group.rank, "slices": slices, "buffers": buffers}


@torch.no_grad()
def load_state(sharded: "FullyShard", state: dict[str, Any]) -> None:
    buffers = _buffers(sharded)
    if "world_size" in state:
        check_place(state, sharded)
        slices, saved = state["slices"], state["buffers"]
    else:
        _check_names(sharded, state)
        slices = {name: weight.cut(state[name]) for name, weight in sharded.weights.items()}
        saved = state
    for name, weight in sharded.weights.items():
        weight.slice.copy_(slices[name])
    for name, buffer in buffers.items():
        buffer.copy_(saved[name])


def check_place(state: dict[str, Any], sharded: "FullyShard") -> None:
    group = sharded.group
    if (state["world_size"], state["rank"]) != (group.world_size, group.rank):
        raise ValueError(
            f"this is the part of rank {state['rank']} of {state['world_size']}, but here is rank {group.rank} of "
            f"{group.world_size}: save with state_dict(whole=True) to restore on other ranks."
        )


def _check_names(sharded: "FullyShard", state: dict[str, Tensor]) -> None:
    wanted = sharded.module.state_dict()
    for name in [*wanted, *state]:
        if name not in state or name not in wanted:
            raise ValueError(
                f"{name} is {'missing in' if name in wanted else 'no part of the module but in'} the state."
            )
        if state[name].shape != wanted[name].shape:
            raise ValueError(f"{name} is {list(state[name].shape)} in the state, {list(wanted[name].shape)} here.")


def _buffers(sharded: "FullyShard") -> dict[str, Tensor]:
    """Those that are saved; every rank has them whole."""
    saved = sharded.module.state_dict()
    return {name: buffer for name, buffer in sharded.module.named_buffers() if name in saved}
