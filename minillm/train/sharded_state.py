"""Saving and restoring what is spread over ranks: whole, as one process would have it, or as each rank has it.

    whole     {"blocks.0.attention.q_proj.weight": [hidden, hidden], ...}    from any number of ranks to any other
    sharded   {"world_size": N, "rank": r, "slices": {name: [elements]}, ...}    1/N of the bytes, back to N ranks only

Rank 0's own optimizer state is 1/N of it: saving that alone, as if it were whole, is a classic way to lose a run.
"""

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from minillm.train.flat import Weight

if TYPE_CHECKING:
    from minillm.train.fully_shard import FullyShard

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
        return [weight.slice for weight in self._weights() if weight.slice.numel()]

    def collect(self) -> None:
        """For loops that look at gradients before `step`: the slices have theirs since the end of backward."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.inner.step(closure)
        self.sharded.home.keep(self.inner)
        return loss

    def clip_grad_norm_(self, max_norm: float | None, loss_scale: float = 1.0) -> Tensor:
        return self.sharded.clip_grad_norm_(max_norm, loss_scale)

    @torch.no_grad()
    def state_dict(self, whole: bool = True) -> dict[str, Any]:
        """whole: torch's own layout, as an optimizer of the plain module's parameters would save it, on every rank's
        CPU; every rank calls it. Otherwise this rank's part.

        Two keys more than torch's: "names", in the order of "state", and "masters", float32 weights by name.
        """
        state = self.inner.state_dict()
        if not whole:
            group = self.sharded.group
            return {"world_size": group.world_size, "rank": group.rank, **state}  # masters: the model's shards
        places = {weight.name: place for place, weight in enumerate(self._weights())}
        entries = {
            place: {key: value if _is_spread(value) else _copy(value) for key, value in entry.items()}
            for place, entry in state["state"].items()
        }
        keys = {key: None for entry in entries.values() for key, value in entry.items() if _is_spread(value)}
        for flat, key in itertools.product(self.sharded.flats, keys):
            found = flat.whole(lambda weight, key=key: entries.get(places.get(weight.name), {}).get(key))
            for name, value in found.items():
                entries[places[name]][key] = value
        masters = {}
        for flat in self.sharded.flats:
            if flat.shard.dtype != flat.dtype:
                masters |= flat.whole(lambda weight: weight.slice)
        return {**state, "state": entries, "names": list(places), "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Either form of `state_dict`, or what a plain optimizer of the same parameters saved; no communication.

        Load the model first: masters that `state` does not hold are what it brought.
        """
        entries, weights = state["state"], self._weights()
        if "world_size" in state:
            check_place(state, self.sharded)
        else:
            names = [weight.name for weight in weights]
            for mine, theirs in itertools.zip_longest(names, state.get("names", names)):
                if mine != theirs:
                    raise ValueError(
                        f"this state is of another model or optimizer: it has {theirs} in place of {mine}."
                    )
            for name, value in state.get("masters", {}).items():
                self.sharded.weights[name].slice.copy_(self.sharded.weights[name].cut(value))
            entries = {
                place: {key: weights[place].cut(value) if _is_spread(value) else value for key, value in entry.items()}
                for place, entry in entries.items()
            }
        # Copies: torch would keep what it is given, and step the caller's moments.
        entries = {place: {key: _copy(value) for key, value in entry.items()} for place, entry in entries.items()}
        self.inner.load_state_dict({"state": entries, "param_groups": state["param_groups"]})
        self.state = self.inner.state
        for mine, loaded in zip(self.param_groups, self.inner.param_groups, strict=True):
            mine.update(loaded)
        self.inner.param_groups = self.param_groups
        self.sharded.home.keep(self.inner)

    def _weights(self) -> list[Weight]:
        """By place: as torch numbers parameters in a state_dict."""
        weights = {id(weight.slice): weight for weight in self.sharded.weights.values()}
        return [weights[id(slice_)] for group in self.inner.param_groups for slice_ in group["params"]]


@torch.no_grad()
def whole_state(sharded: "FullyShard") -> dict[str, Tensor]:
    state = {name: tensor.cpu() for name, tensor in _buffers(sharded).items()}
    for flat in sharded.flats:
        values = flat.whole(lambda weight: weight.slice)
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


def _is_spread(value: Any) -> bool:
    """Whether an optimizer keeps this per element (moments), and not once per parameter (step)."""
    return isinstance(value, Tensor) and value.dim() > 0


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)
