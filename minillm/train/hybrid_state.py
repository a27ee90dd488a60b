"""Whole state of a model that is split over ranks: by the names and shapes of the whole model, for any other layout.

    a rank's slice of its stage's parameter  ── gather ──▶  joined (splits.py), by its name in the whole model
    whole tensor                             ── cut ─────▶  this rank's slice

Optimizer state is cut like its parameter where it has the parameter's shape (Adam's moments, masters); numbers such as
`step` are the same for all parts.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minillm.train.optimizer import Updater
from minillm.train.splits import join, split_of
from minillm.train.tensor import whole_shapes
from minillm.train.zero import ZeroOptimizer

if TYPE_CHECKING:
    from minillm.train.hybrid import Hybrid


def whole_tensors(form: "Hybrid", named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's tensors by their names here, cut as the parameters are -> the whole model's, by their names there, on
    the CPU of every rank. Every rank calls it. What this rank holds is in it as *this* rank has it: copies that have
    drifted apart show."""
    shapes = whole_shapes(form.config)
    own = {form.names[name]: (form.splits[name].part, tensor.detach().cpu()) for name, tensor in named.items()}
    counted = {form.names[name] for name in named if name in form.counted}
    sent = {name: own[name] for name in counted} if form.mesh.dp.rank == 0 else {}
    pieces: dict[str, dict[int, Tensor]] = {}
    for theirs in [*form.group.gather_objects(sent), own]:
        for name, (part, tensor) in theirs.items():
            pieces.setdefault(name, {})[part] = tensor
    return {name: _joined(form, name, pieces[name], shape) for name, shape in shapes.items() if name in pieces}


def _joined(form: "Hybrid", name: str, parts: dict[int, Tensor], shape: torch.Size) -> Tensor:
    layout = form.layout
    by_part = {}
    for rank in range(layout.tp):
        split = split_of(form.config, name, rank, layout.tp, layout.sequence)
        by_part[split.part] = split
    return join([parts[part] for part in sorted(by_part)], [by_part[part] for part in sorted(by_part)], shape)


class SplitUpdater:
    """An updater of this rank's slices whose whole state is that of a single process; see `optimizer.Updater`."""

    def __init__(self, form: "Hybrid", inner_updater: Updater | ZeroOptimizer) -> None:
        self.form, self.inner_updater, self.inner = form, inner_updater, inner_updater.inner
        self.collect, self.step, self.zero_grad = inner_updater.collect, inner_updater.step, inner_updater.zero_grad

    @property
    def parameters(self) -> list[Tensor]:
        return self.inner_updater.parameters

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """What is stepped: parameters, their masters or ZeRO's slices of them, with their names on this rank."""
        if isinstance(self.inner_updater, ZeroOptimizer):
            return iter(self.inner_updater.slices.items())
        return zip(self.inner_updater.names, self.inner_updater.parameters, strict=True)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of this rank's parameters by name, reduced over dp, after `collect`."""
        if isinstance(self.inner_updater, ZeroOptimizer):
            return self.inner_updater.whole_gradients()
        return {name: p.grad for name, p in self.form.model.named_parameters() if p.grad is not None}

    def state_dict(self, whole: bool = True) -> dict[str, Any]:
        """whole: in the layout of torch's optimizers over the whole model, on the CPU of every rank; all call it."""
        if not whole:
            return self.inner_updater.state_dict(False) | {"local": True}
        state, form = self.inner_updater.state_dict(True), self.form
        order = self._order()
        kept = {name: state["state"].get(place, {}) for place, name in enumerate(order)}
        shapes = {name: p.shape for name, p in form.model.named_parameters()}
        merged: dict[str, dict[str, Any]] = {}
        masters = whole_tensors(form, state["masters"]) if state["masters"] else {}
        numbers = {  # of a parameter, not of its elements
            form.names[name]: {key: value for key, value in values.items() if not _cut_like(value, shapes[name])}
            for name, values in kept.items()
        }
        for theirs in form.group.gather_objects(numbers):
            merged = theirs | merged
        keys = {key for values in kept.values() for key in values}
        for key in sorted(set().union(*form.group.gather_objects(keys))):
            cut = {name: v[key] for name, v in kept.items() if key in v and _cut_like(v[key], shapes[name])}
            for name, tensor in whole_tensors(form, cut).items():
                merged[name] = {**merged.get(name, {}), key: tensor}
        return {**self._packed(merged, state["param_groups"]), "masters": masters}

    def _packed(self, merged: dict[str, dict[str, Any]], param_groups: list[dict[str, Any]]) -> dict[str, Any]:
        """By name -> by number, as torch counts: group by group, in the order of the whole model."""
        names, groups, numbers = self._names_by_group(), [], {}
        everybody = self.form.group.gather_objects(names)
        for place, options in enumerate(param_groups):
            held = set().union(*(theirs[place] for theirs in everybody))
            ordered = [name for name in whole_shapes(self.form.config) if name in held]
            groups.append({**options, "params": list(range(len(numbers), len(numbers) + len(ordered)))})
            numbers |= {name: len(numbers) + i for i, name in enumerate(ordered)}
        return {
            "state": {numbers[name]: values for name, values in merged.items() if values},
            "param_groups": groups,
            "names": list(numbers),
        }

    def _names_by_group(self) -> list[list[str]]:
        """Names in the whole model of what each of the optimizer's groups steps here."""
        return [[self.form.names[name] for name in group] for group in self._groups()]

    def _groups(self) -> list[list[str]]:
        names = {id(parameter): name for name, parameter in self.named()}
        return [[names[id(parameter)] for parameter in group["params"]] for group in self.inner.param_groups]

    def _order(self) -> list[str]:
        return [name for group in self._groups() for name in group]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After the weights' own. A whole state, or this rank's own."""
        if "local" in state:
            self.inner_updater.load_state_dict({key: value for key, value in state.items() if key != "local"})
            return
        form, shapes = self.form, whole_shapes(self.form.config)
        by_name = dict(zip(state["names"], range(len(state["names"])), strict=True))
        own: dict[int, dict[str, Any]] = {}
        for place, name in enumerate(self._order()):
            whole_name = form.names[name]
            values = state["state"].get(by_name[whole_name], {})
            own[place] = {key: self._own(name, value, shapes[whole_name]) for key, value in values.items()}
        local, groups = self.inner_updater.state_dict(True), []
        for mine, saved in zip(local["param_groups"], state["param_groups"], strict=True):
            groups.append({**saved, "params": mine["params"]})
        masters = {
            name: form.splits[name].cut(state["masters"][form.names[name]]) for name in form.names if state["masters"]
        }
        self.inner_updater.load_state_dict(
            {**local, "state": {place: values for place, values in own.items() if values}, "param_groups": groups}
            | {"masters": masters}
        )

    def _own(self, name: str, value: Any, shape: torch.Size) -> Any:
        if _cut_like(value, shape):
            return self.form.splits[name].cut(value)
        return value.clone() if isinstance(value, Tensor) else value  # a tied embedding's two copies count their steps


def _cut_like(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape == shape and value.dim() > 0
