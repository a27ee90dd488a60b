"""Whole state of a model that is split over ranks: by the names and shapes of the whole model, for any other layout.

    a rank's slice of its stage's parameter  ── gather ──▶  joined (splits.py), by its name in the whole model
    whole tensor                             ── cut ─────▶  this rank's slice

Under it the updater may be ZeRO's, whose whole state is that of this rank's slices: a state is joined twice then, and
cut twice. A tied embedding may have two copies on one rank, under two names here and one in the whole model.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from minillm.parallel.optimizer_state import Spread, names_by_group
from minillm.parallel.tensor_parallel.layers import whole_shapes
from minillm.parallel.tensor_parallel.plan import join, split_of
from minillm.parallel.zero.optimizer import ZeroOptimizer
from minillm.train.optimizer import Updater

if TYPE_CHECKING:
    from minillm.train.strategies.hybrid import Hybrid


def whole_tensors(form: "Hybrid", parts: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """This rank's tensors by names in the whole model (None: others have all of it), cut as the parameters are -> the
    whole model's, on the CPU of every rank. Every rank calls it. What this rank holds is in it as *this* rank has it:
    copies that have drifted apart show."""
    splits, layout = {form.names[name]: split for name, split in form.splits.items()}, form.layout
    own = {name: (splits[name].part, tensor.detach().cpu()) for name, tensor in parts.items() if tensor is not None}
    counted = own.keys() & {form.names[name] for name in form.counted}
    sent = {name: own[name] for name in counted} if form.mesh.dp.rank == 0 else {}
    pieces: dict[str, dict[int, Tensor]] = {}
    for theirs in [*form.group.gather_objects(sent), own]:
        for name, (part, tensor) in theirs.items():
            pieces.setdefault(name, {})[part] = tensor
    found = {}
    for name, shape in whole_shapes(form.config).items():
        if name in pieces:
            first = split_of(form.config, name, 0, layout.tp, layout.sequence)
            each = [dataclasses.replace(first, part=part) for part in range(first.parts)]
            found[name] = join([pieces[name][split.part] for split in each], each, shape)
    return found


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
        state = self.inner_updater.state_dict(whole)
        if not whole:
            return state | {"local": True}
        masters = {self.form.names[name]: master for name, master in state["masters"].items()}
        return self._spread().whole({**state, "masters": masters})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After the weights' own. A whole state, which every rank loads, or this rank's own."""
        if "local" in state:
            self.inner_updater.load_state_dict({key: value for key, value in state.items() if key != "local"})
            return
        own = self._spread().own(state)
        masters = {here: own["masters"][name] for here, name in self.form.names.items() if name in own["masters"]}
        self.inner_updater.load_state_dict({**own, "masters": masters})

    def _spread(self) -> Spread:
        form, shapes = self.form, whole_shapes(self.form.config)
        splits = {form.names[name]: split for name, split in form.splits.items()}
        here = [[form.names[name] for name in group] for group in names_by_group(self.inner, self.named())]
        held = [set().union(*groups) for groups in zip(*form.group.gather_objects(here), strict=True)]
        return Spread(
            group=form.group,
            here=here,
            everywhere=[[name for name in shapes if name in names] for names in held],
            shapes={name: shapes[name] for name in splits},
            join=functools.partial(whole_tensors, form),
            cut=lambda name, whole: splits[name].cut(whole),
        )
