"""An optimizer's state over parts of parameters, and over whole ones: what makes a run on 4 ranks go on on 3, or on 1.

    rank 0   exp_avg of its part of a weight ─┐                                                        ┌─ rank 0 of 3
    rank 1   exp_avg of its part of a weight ─┴─ join ─> {"state": {0: {"exp_avg": ..., "step": ...}}} ─ cut ─ ...

The whole state is that of a plain torch optimizer over whole parameters, with two keys more that torch does not look
at: "names" (in the order of "state") and "masters" (float32 weights by name, where the model has 16-bit ones). Moments
are joined and cut as the parameters are; numbers of a parameter, such as Adam's `step`, are the same for all its parts.

Rank 0's own state is 1/N of it: saving that alone, as if it were whole, is a classic way to lose a run.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minillm.comm import Group

Entries = dict[str, dict[str, Any]]  # by parameter name, by key ("exp_avg"): a tensor, or a number of the parameter
Groups = list[list[str]]  # names by the optimizer's parameter groups: the order in which torch numbers parameters


@dataclass
class Spread:
    """How an optimizer's parameters lie on the ranks of `group`.

    here: this rank's parts; everywhere: all parameters, the same on every rank; shapes: of those here, when whole.
    join: {name: this rank's part, None if others have all of it} -> {name: whole, on the CPU}. Every rank calls it.
    cut: (name, whole) -> this rank's part.
    """

    group: Group
    here: Groups
    everywhere: Groups
    shapes: Mapping[str, torch.Size]
    join: Callable[[dict[str, Tensor | None]], dict[str, Tensor]]
    cut: Callable[[str, Tensor], Tensor]

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """state: of this rank's optimizer, and its "masters" by name. Every rank calls it and gets all of all."""
        mine = {name: entry for name, entry in _by_name(state, self.here).items() if not _is_empty(entry)}
        spread = _per_element(mine)
        known = {name: {k: ... if k in spread else _host(v) for k, v in entry.items()} for name, entry in mine.items()}
        entries: Entries = {}
        for theirs in self.group.gather_objects(known):  # `...` stands for a tensor that is spread
            entries = theirs | entries
        for key in sorted({key for entry in entries.values() for key, value in entry.items() if value is ...}):
            names = [name for name, entry in entries.items() if entry.get(key) is ...]
            for name, tensor in self.join({name: mine.get(name, {}).get(key) for name in names}).items():
                entries[name][key] = tensor
        names = list(itertools.chain(*self.everywhere))
        return {
            "state": {place: entries[name] for place, name in enumerate(names) if name in entries},
            "param_groups": _numbered(state["param_groups"], self.everywhere),
            "names": names,
            "masters": self.join(state["masters"]) if state["masters"] else {},
        }

    @torch.no_grad()
    def own(self, state: dict[str, Any]) -> dict[str, Any]:
        """A whole state, or what a plain optimizer of the same parameters saved -> what this rank's optimizer loads.

        ValueError: it is of another model, or its optimizer groups parameters otherwise.
        """
        names = list(itertools.chain(*self.everywhere))
        for mine, theirs in itertools.zip_longest(names, state.get("names", names)):
            if mine != theirs:
                raise ValueError(
                    f"this optimizer state is of another model or another make(): it has {theirs} in place of {mine}."
                )
        saved = [len(group["params"]) for group in state["param_groups"]]
        if saved != (wanted := [len(group) for group in self.everywhere]):
            raise ValueError(
                f"this optimizer state is of another model or another make(): its groups have {saved} parameters, "
                f"{wanted} here."
            )
        entries, places = _by_name(state, self.everywhere), list(itertools.chain(*self.here))
        spread = _per_element(entries)
        cut = [
            {k: self._part(k, name, v) if k in spread else _copy(v) for k, v in entries.get(name, {}).items()}
            for name in places
        ]
        masters = state.get("masters", {})
        return {
            "state": {place: entry for place, entry in enumerate(cut) if entry},
            "param_groups": _numbered(state["param_groups"], self.here),
            "masters": {name: self._part("master", name, masters[name]) for name in masters if name in self.shapes},
        }

    def _part(self, key: str, name: str, whole: Any) -> Any:
        if not isinstance(whole, Tensor):
            return whole
        if whole.shape != self.shapes[name]:
            raise ValueError(
                f"{key} of {name} has shape {list(whole.shape)}, the parameter {list(self.shapes[name])}: "
                "this optimizer state is of another model."
            )
        return self.cut(name, whole).clone()


def names_by_group(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]]) -> Groups:
    names = {id(parameter): name for name, parameter in named}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def restore(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """For one that wraps an `inner` of the same param_groups and state. state: of this rank's parts; it is copied, as
    torch would keep what it is given, and step the caller's moments."""
    entries = {place: {key: _copy(value) for key, value in entry.items()} for place, entry in state["state"].items()}
    optimizer.inner.load_state_dict({"state": entries, "param_groups": state["param_groups"]})
    optimizer.param_groups, optimizer.state = optimizer.inner.param_groups, optimizer.inner.state


def _by_name(state: dict[str, Any], groups: Groups) -> Entries:
    names = enumerate(itertools.chain(*groups))
    return {name: state["state"][place] for place, name in names if state["state"].get(place)}


def _numbered(param_groups: list[dict[str, Any]], groups: Groups) -> list[dict[str, Any]]:
    """The groups' settings, with the parameters numbered as torch does."""
    number = itertools.count()
    numbers = [[next(number) for _ in names] for names in groups]
    return [{**settings, "params": own} for settings, own in zip(param_groups, numbers, strict=True)]


def _per_element(entries: Entries) -> set[str]:
    """Keys of what an optimizer keeps per element (moments). A tensor without dimensions may be a scalar parameter's,
    or count steps: that the other parameters tell."""
    return {k for entry in entries.values() for k, v in entry.items() if isinstance(v, Tensor) and v.dim()}


def _is_empty(entry: dict[str, Any]) -> bool:
    """Whether it is of a part without elements: such a part may have missed steps, and others know them."""
    return any(isinstance(value, Tensor) and not value.numel() for value in entry.values())


def _host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
