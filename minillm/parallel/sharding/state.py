"""What a rank holds of a run: parts of whole tensors, under names that no layout changes, and numbers.

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
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.parallel.sharding.gather import gather
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
        """Those that are float32 copies of 16-bit weights."""

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
        self.placements_of_stepped = stepped.placements if stepped else {}
        state = stepped.inner.state if stepped else {}
        self._entries = {name: entry for name, part in self._named.items() if (entry := state.get(part))}
        self._kept = _per_element(self._entries)

    @property
    def names(self) -> list[list[str]]:
        """Of the parameters that this rank steps, by the optimizer's groups."""
        if self.stepped is None:
            return []
        names = {id(parameter): name for name, parameter in self._named.items()}
        return [[names[id(parameter)] for parameter in group["params"]] for group in self.stepped.inner.param_groups]

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Weights in another dtype than the model's are copies."""
        found = {}
        if self.weights:
            parts = {name: part.detach() for name, part in self.weights.parts().items()}
            found = {f"model/{name}": part.to(self.dtype or part.dtype) for name, part in parts.items()}
            found |= {f"model/{name}": buffer for name, buffer in self.weights.buffers().items()}
        return found | {key: tensor.detach() for key, (_, tensor) in self._stepped.items()}

    @cached_property
    def _stepped(self) -> dict[str, tuple[str, Tensor]]:
        """What goes with a parameter of which name."""
        found = {
            f"optimizer/{key}/{name}": (name, entry[key])
            for name, entry in self._entries.items()
            for key in entry
            if key in self._kept
        }
        masters = self.stepped.masters() if self.stepped else {}
        return found | {f"master/{name}": (name, master) for name, master in masters.items()}

    def placements(self) -> dict[str, Placement]:
        """Which parts of the whole tensors these are."""
        stepped = {key: self.placements_of_stepped[name] for key, (name, _) in self._stepped.items()}
        return self._weight_placements() | stepped

    def parts(self) -> dict[str, tuple[Tensor, Placement]]:
        placements = self.placements()
        return {key: (tensor, placements[key]) for key, tensor in self.tensors.items()}

    def _weight_placements(self) -> dict[str, Placement]:
        if self.weights is None:
            return {}
        found, placements = {}, self.weights.weight_placements
        for name in self.weights.parts():
            found[f"model/{name}"] = placements[name]
        return found | {f"model/{name}": placement for name, placement in self.weights.buffer_placements.items()}

    def numbers(self, of_empty_parts: bool = False) -> Callable[[], dict[str, Any]]:
        """Reads the optimizer's numbers now; the returned function puts them into words, for JSON: "groups", its
        settings with the names of this rank's parameters, and "counted", by name and key the [value, dtype] of each
        parameter. of_empty_parts: also where this rank has no elements, whose numbers may lag behind other ranks'."""
        numbers = [
            (name, key, value)
            for name, entry in self._entries.items()
            for key, value in entry.items()
            if key not in self._kept and (of_empty_parts or self._named[name].numel())
        ]
        tensors: dict[torch.dtype, list[Tensor]] = {}
        for _, _, value in numbers:
            if isinstance(value, Tensor):
                tensors.setdefault(value.dtype, []).append(value)
        read = {dtype: torch.stack(alike).cpu() for dtype, alike in tensors.items()}  # all of a kind in one read
        groups = self.stepped.inner.param_groups if self.stepped else []
        settings = [group | {"params": own} for group, own in zip(groups, self.names, strict=True)]

        def in_words() -> dict[str, Any]:
            values = {dtype: iter(alike.tolist()) for dtype, alike in read.items()}
            counted: dict[str, dict[str, list[Any]]] = {}
            for name, key, value in numbers:
                is_tensor = isinstance(value, Tensor)
                words = [next(values[value.dtype]), _dtype_name(value)] if is_tensor else [value, None]
                counted.setdefault(name, {})[key] = words
            return {"groups": settings, "counted": counted}

        return in_words

    def required_parts(
        self, saved: Mapping[str, torch.Size], what: str = "it", *, masters: bool = True
    ) -> dict[str, Placement]:
        """Which part of which saved tensor this rank needs. saved: the shapes of whole tensors by name. what: a name
        for the saved state in messages. masters: whether it must have those that this rank has.
        ValueError if the saved state is of another model."""
        found, placements = self._weight_placements(), self.placements_of_stepped
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
                shapes = f"{list(saved[name])}, not {list(placement.shape)}"
                raise ValueError(f"{what} is of another model: its {name} is {shapes}")
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
        for number, name in enumerate(itertools.chain(*names)):
            entry = {key: parts[at] for key in keys if (at := f"optimizer/{key}/{name}") in parts}
            entry |= {key: value_of(*words) for key, words in numbers["counted"].get(name, {}).items()}
            if entry:
                state[number] = entry
        groups = [{key: _setting(value) for key, value in group.items()} for group in numbers["groups"]]
        masters = {name: parts[at] for name in self._named if (at := f"master/{name}") in parts}
        self.stepped.load_local({"state": state, "param_groups": _numbered(groups, names), "masters": masters})


def full_state(local: LocalState, group: Group | None) -> dict[str, Any]:
    """All ranks' local states put together: "model", whole weights and buffers by name, and "optimizer", in the layout
    of torch's optimizers over the whole model, with two keys more that torch does not look at: "names", in the order of
    "state", and "masters" by name. Every rank of `group` calls it, and gets copies on the CPU. None: of one process,
    whose tensors these are."""
    tensors = gather(local.tensors, local.placements(), group) if group else local.tensors
    numbers = local.numbers()()
    by_rank = group.gather_objects(numbers) if group else [numbers]
    state: dict[str, dict[str, Any]] = {}
    found: dict[str, dict[str, Tensor]] = {"model": {}, "master": {}}
    for key, tensor in tensors.items():
        kind, name = key.split("/", 1)
        if kind == "optimizer":
            key, name = name.split("/", 1)
            state.setdefault(name, {})[key] = tensor
        else:
            found[kind][name] = tensor
    counted: dict[str, dict[str, list[Any]]] = {}
    for theirs in by_rank:  # of a parameter on several ranks, the first one's
        counted = theirs["counted"] | counted
    for name, entry in counted.items():
        state.setdefault(name, {}).update({key: value_of(*words) for key, words in entry.items()})
    order = local.weights.names if local.weights else list(itertools.chain(*local.names))
    groups = []
    for alike in zip(*(theirs["groups"] for theirs in by_rank), strict=True):
        members = set(itertools.chain(*(group["params"] for group in alike)))
        groups.append([name for name in order if name in members])
    names = list(itertools.chain(*groups))
    optimizer = {
        "state": {number: state[name] for number, name in enumerate(names) if name in state},
        "param_groups": _numbered(numbers["groups"], groups),
        "names": names,
        "masters": found["master"],
    }
    return {"model": found["model"], "optimizer": optimizer}


def load_full(
    local: LocalState,
    optimizer: Mapping[str, Any],
    model: Mapping[str, Tensor] = {},
    what: str = "this optimizer state",
) -> None:
    """The inverse of `full_state`, on a rank of any layout; no communication. optimizer: may be what a plain optimizer
    of the same parameters has saved: then "names" are those of this rank, and masters are copied from the weights.
    ValueError: it is of another model, or its optimizer groups parameters otherwise."""
    own = local.names
    names = optimizer.get("names", list(itertools.chain(*own)))
    ordered, sizes = iter(names), [len(group["params"]) for group in optimizer["param_groups"]]
    groups = [list(itertools.islice(ordered, size)) for size in sizes]
    if local.weights is None:  # this rank steps parts of everything; with a pipeline, it may step less
        for mine, theirs in itertools.zip_longest(itertools.chain(*own), names):
            if mine != theirs:
                raise ValueError(f"{what} is of another model or another make(): it has {theirs} in place of {mine}.")
    if len(own) != len(groups) or any(set(mine) - set(theirs) for mine, theirs in zip(own, groups, strict=True)):
        here = [len(group) for group in own]
        raise ValueError(
            f"{what} is of another model or another make(): its groups have {sizes} parameters, {here} here."
        )
    entries = {name: optimizer["state"][number] for number, name in enumerate(names) if number in optimizer["state"]}
    kept = _per_element(entries)
    tensors = {f"model/{name}": tensor for name, tensor in model.items()}
    tensors |= {f"master/{name}": tensor for name, tensor in optimizer.get("masters", {}).items()}
    counted: dict[str, dict[str, list[Any]]] = {}
    for name, entry in entries.items():
        for key, value in entry.items():
            if key in kept and isinstance(value, Tensor):
                tensors[f"optimizer/{key}/{name}"] = value
            else:
                is_tensor = isinstance(value, Tensor)
                words = [value.item(), _dtype_name(value)] if is_tensor else [value, None]
                counted.setdefault(name, {})[key] = words
    required = local.required_parts({name: tensor.shape for name, tensor in tensors.items()}, what, masters=False)
    parts = {name: placement.cut(tensors[name]) for name, placement in required.items()}
    local.load_parts(parts, {"groups": optimizer["param_groups"], "counted": counted})


def value_of(value: Any, dtype: str | None) -> Any:
    """A number of `LocalState.numbers`, as the optimizer keeps it."""
    return value if dtype is None else torch.tensor(value, dtype=getattr(torch, dtype))


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _per_element(entries: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Keys of what an optimizer keeps per element (moments). A tensor without dimensions may be a scalar parameter's,
    or count steps: that the other parameters tell."""
    return {k for entry in entries.values() for k, v in entry.items() if isinstance(v, Tensor) and v.dim()}


def _numbered(param_groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """The groups' settings, with the parameters numbered as torch does."""
    number = itertools.count()
    numbers = [[next(number) for _ in group] for group in names]
    return [{**settings, "params": own} for settings, own in zip(param_groups, numbers, strict=True)]


def _setting(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value  # JSON knows no tuples
