"""What a rank holds of a run: parts of whole tensors, under names that no layout changes, and the optimizer's numbers.

    model/blocks.0.attention.q.weight                  a weight, in the dtype of the model, or a buffer
    master/blocks.0.attention.q.weight                 its float32 copy, where the model has 16-bit weights
    optimizer/exp_avg/blocks.0.attention.q.weight      what the optimizer keeps per element

    LocalState ─┬─ full_state: gathered and joined ─▶ what one process would have ─ load_full: cut ─┬─▶ load_parts
                └─ written to files (train/checkpoint) ─────────────────────────── read from files ─┘

Each tensor comes with the placement that says which part of it this rank has. The numbers are the optimizer's settings,
and what it counts per parameter (Adam's `step`), which is the same for all parts. Rank 0's own state is one part of
many: saving that alone, as if it were all, is a classic way to lose a run.
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from minillm.comm.operands import dtype_name
from minillm.parallel.sharding.placement import Placement


class Weights(Protocol):
    """Where the weights are. names: of all parameters of the whole model, in its order."""

    names: Sequence[str]
    weight_placements: Mapping[str, Placement]
    buffer_placements: Mapping[str, Placement]

    def parts(self) -> Mapping[str, Tensor]: ...

    def buffers(self) -> Mapping[str, Tensor]: ...


class Stepped(Protocol):
    """What steps them. inner: the torch optimizer; placements: of all that `named` has."""

    inner: torch.optim.Optimizer
    placements: Mapping[str, Placement]

    def named(self) -> Mapping[str, nn.Parameter]:
        """What is stepped, by name: weights, slices of them, or their float32 copies."""

    def masters(self) -> Mapping[str, Tensor]:
        """Those of `named` that are float32 copies of 16-bit weights."""

    def load_local(self, state: dict[str, Any]) -> None:
        """state: of `inner`, and "masters" by name; those that are missing are copied from the weights."""


class LocalState:
    """What this rank has at this moment, whole or in part; no communication.

    stepped, weights: None for the state of the other alone. dtype: of the weights in the model; None: as they are held.
    """

    def __init__(
        self, stepped: Stepped | None, weights: Weights | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self.stepped, self.weights, self.dtype = stepped, weights, dtype
        self._named = stepped.named() if stepped else {}
        self._stepped_placements = stepped.placements if stepped else {}
        state = stepped.inner.state if stepped else {}
        self._entries = {name: entry for name, part in self._named.items() if (entry := state.get(part))}
        self._kept = per_element(self._entries)

    @property
    def names(self) -> list[list[str]]:
        """Names of the parameters that this rank steps, by the optimizer's groups."""
        if self.stepped is None:
            return []
        names = {id(parameter): name for name, parameter in self._named.items()}
        return [[names[id(parameter)] for parameter in group["params"]] for group in self.stepped.inner.param_groups]

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name. Weights that are held in another dtype than the model's are copied."""
        parts, buffers = (self.weights.parts(), self.weights.buffers()) if self.weights else ({}, {})
        found = {f"model/{name}": part.detach().to(self.dtype or part.dtype) for name, part in parts.items()}
        found |= {f"model/{name}": buffer for name, buffer in buffers.items()}
        return found | {key: tensor.detach() for key, (_, tensor) in self._stepped.items()}

    @cached_property
    def _stepped(self) -> dict[str, tuple[str, Tensor]]:
        """By name of a tensor: of which parameter it is, and the tensor."""
        found = {
            f"optimizer/{key}/{name}": (name, entry[key])
            for name, entry in self._entries.items()
            for key in entry
            if key in self._kept
        }
        masters = self.stepped.masters() if self.stepped else {}
        return found | {f"master/{name}": (name, master) for name, master in masters.items()}

    def placements(self) -> dict[str, Placement]:
        """Placements of `tensors`: which parts of the whole tensors they are."""
        stepped = {key: self._stepped_placements[name] for key, (name, _) in self._stepped.items()}
        return self._weight_placements() | stepped

    def parts(self) -> dict[str, tuple[Tensor, Placement]]:
        """The tensors, each with its placement."""
        placements = self.placements()
        return {key: (tensor, placements[key]) for key, tensor in self.tensors.items()}

    def _weight_placements(self) -> dict[str, Placement]:
        weights = self.weights
        places = {**weights.weight_placements, **weights.buffer_placements} if weights else {}
        return {f"model/{name}": placement for name, placement in places.items()}

    def numbers(self, of_empty_parts: bool = False) -> dict[str, Any]:
        """The optimizer's numbers, as JSON has them: "groups", its settings with the names of this rank's parameters;
        "counted", the [value, dtype] of each number of a parameter, by name and key. of_empty_parts: also where this
        rank has no elements, whose numbers may lag behind other ranks'."""
        kept = [
            (name, key, value)
            for name, entry in self._entries.items()
            for key, value in entry.items()
            if key not in self._kept and (of_empty_parts or self._named[name].numel())
        ]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for _, _, value in kept:
            if isinstance(value, Tensor):
                by_dtype.setdefault(value.dtype, []).append(value)
        read = {dtype: iter(torch.stack(alike).tolist()) for dtype, alike in by_dtype.items()}  # one wait for a GPU
        counted: dict[str, dict[str, list[Any]]] = {}
        for name, key, value in kept:
            is_tensor = isinstance(value, Tensor)
            number = [next(read[value.dtype]), dtype_name(value)] if is_tensor else [value, None]
            counted.setdefault(name, {})[key] = number
        groups = self.stepped.inner.param_groups if self.stepped else []
        settings = [group | {"params": own} for group, own in zip(groups, self.names, strict=True)]
        return {"groups": settings, "counted": counted}

    def required_parts(
        self, saved: Mapping[str, torch.Size], what: str = "it", *, masters: bool = True
    ) -> dict[str, Placement]:
        """Which part of which saved tensor this rank needs. saved: shapes of whole tensors. what: a name for them in
        messages. masters: whether there have to be those of this rank. ValueError if they are of another model."""
        found, placements = self._weight_placements(), self._stepped_placements
        keys = {name.split("/")[1] for name in saved if name.startswith("optimizer/")}
        for name in itertools.chain(*self.names):
            kept = [f"optimizer/{key}/{name}" for key in keys]
            found |= {each: placements[name] for each in kept if each in saved}
        found |= {f"master/{name}": place for name, place in placements.items() if f"master/{name}" in saved}
        if masters and self.stepped:
            found |= {f"master/{name}": placements[name] for name in self.stepped.masters()}
        for name, placement in found.items():
            if name not in saved:
                raise ValueError(f"{what} is of another model: it has no {name}")
            if saved[name] != placement.shape:
                has, needs = list(saved[name]), list(placement.shape)
                raise ValueError(f"{what} is of another model: its {name} is {has}, not {needs}")
        return found

    @torch.no_grad()
    def load_parts(self, parts: Mapping[str, Tensor], numbers: dict[str, Any]) -> None:
        """Gives this rank what `required_parts` named, and the optimizer's `numbers`. `parts` may be kept."""
        if self.weights:
            for name, part in itertools.chain(self.weights.parts().items(), self.weights.buffers().items()):
                part.copy_(parts[f"model/{name}"])
        if self.stepped is None:
            return
        state, names = {}, self.names
        keys = sorted({name.split("/")[1] for name in parts if name.startswith("optimizer/")})
        for place, name in enumerate(itertools.chain(*names)):
            entry = {key: parts[at] for key in keys if (at := f"optimizer/{key}/{name}") in parts}
            entry |= {key: value_of(*number) for key, number in numbers["counted"].get(name, {}).items()}
            if entry:
                state[place] = entry
        # JSON has made lists of tuples
        groups = [{k: tuple(v) if isinstance(v, list) else v for k, v in each.items()} for each in numbers["groups"]]
        masters = {name: parts[at] for name in self._named if (at := f"master/{name}") in parts}
        self.stepped.load_local({"state": state, "param_groups": numbered(groups, names), "masters": masters})


def value_of(value: Any, dtype: str | None) -> Any:
    """A number of `LocalState.numbers`, as the optimizer keeps it."""
    return value if dtype is None else torch.tensor(value, dtype=getattr(torch, dtype))


def number_of(value: Any) -> list[Any]:
    """The inverse of `value_of`: [value, dtype]."""
    return [value.item(), dtype_name(value)] if isinstance(value, Tensor) else [value, None]


def per_element(entries: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Keys of what an optimizer keeps per element (moments). A tensor without dimensions may belong to a scalar
    parameter or count steps; the other parameters tell which."""
    return {k for entry in entries.values() for k, v in entry.items() if isinstance(v, Tensor) and v.dim()}


def numbered(param_groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """The groups' settings, with parameters numbered as in torch."""
    number = itertools.count()
    numbers = [[next(number) for _ in group] for group in names]
    return [{**settings, "params": own} for settings, own in zip(param_groups, numbers, strict=True)]
