"""Whole state of a model that is split over ranks: by the names and shapes of the whole model, for any other layout.

    a rank's slice of its stage's parameter  ── gather ──▶  joined (splits.py), by its name in the whole model
    whole tensor                             ── cut ─────▶  this rank's slice

Under it the updater may be ZeRO's, whose whole state is that of this rank's slices: a state is joined twice then, and
cut twice. A tied embedding may have two copies on one rank, under two names here and one in the whole model.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from minillm.parallel.optimizer_state import StateLayout, names_by_group
from minillm.parallel.placement import Placement, Replicate, Shard, gather
from minillm.parallel.tensor_parallel.layers import whole_shapes
from minillm.parallel.zero.optimizer import ZeroOptimizer
from minillm.train.optimizer import Updater

if TYPE_CHECKING:
    from minillm.train.strategies.hybrid import Hybrid


def whole_tensors(form: "Hybrid", parts: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """This rank's tensors by names in the whole model (None: others have all of it), cut as the parameters are -> the
    whole model's, on the CPU of every rank. Every rank calls it. What this rank holds is in it as *this* rank has it:
    copies that have drifted apart show."""
    here = {name: tensor for name, tensor in parts.items() if tensor is not None}
    found = gather(here, placements(form), form.group)
    return {name: found[name] for name in whole_shapes(form.config) if name in found}


def placements(form: "Hybrid") -> dict[str, Placement]:
    """This rank's parameters by their names in the whole model: parts of its tensors, one of all copies counted."""
    shapes, found = whole_shapes(form.config), {}
    counted = {form.names[name] for name in form.counted} if form.mesh.dp.rank == 0 else set()
    for name, split in form.splits.items():
        whole = form.names[name]
        copy = 0 if whole in counted else 1
        part = Replicate(copy) if split.dim is None else Shard(split.dim, split.part, split.parts, copy)
        found[whole] = Placement(shapes[whole], (part,))
    return found


class SplitUpdater:
    """An updater of this rank's slices whose whole state is that of a single process; see `optimizer.Updater`."""

    def __init__(self, form: "Hybrid", inner_updater: Updater | ZeroOptimizer) -> None:
        self.form, self.inner_updater, self.inner = form, inner_updater, inner_updater.inner
        self.prepare_gradients, self.step = inner_updater.prepare_gradients, inner_updater.step
        self.zero_grad = inner_updater.zero_grad

    @property
    def parameters(self) -> list[Tensor]:
        return self.inner_updater.parameters

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """What is stepped: parameters, their masters or ZeRO's slices of them, with their names on this rank."""
        if isinstance(self.inner_updater, ZeroOptimizer):
            return iter(self.inner_updater.slices.items())
        return zip(self.inner_updater.names, self.inner_updater.parameters, strict=True)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of this rank's parameters by name, reduced over dp, after `prepare_gradients`."""
        if isinstance(self.inner_updater, ZeroOptimizer):
            return self.inner_updater.full_gradients()
        return {name: p.grad for name, p in self.form.model.named_parameters() if p.grad is not None}

    def sharded_state_dict(self) -> dict[str, Any]:
        """What this rank has, for this rank to go back to."""
        return self.inner_updater.sharded_state_dict() | {"local": True}

    def full_state_dict(self) -> dict[str, Any]:
        """In the layout of torch's optimizers over the whole model, on the CPU of every rank; all call it."""
        state = self.inner_updater.full_state_dict()
        masters = {self.form.names[name]: master for name, master in state["masters"].items()}
        return self._state_layout().full({**state, "masters": masters})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After the weights' own. A whole state, which every rank loads, or this rank's own."""
        if "local" in state:
            self.inner_updater.load_state_dict({key: value for key, value in state.items() if key != "local"})
            return
        own = self._state_layout().own(state)
        masters = {here: own["masters"][name] for here, name in self.form.names.items() if name in own["masters"]}
        self.inner_updater.load_state_dict({**own, "masters": masters})

    def _state_layout(self) -> StateLayout:
        form, shapes = self.form, whole_shapes(self.form.config)
        here = [[form.names[name] for name in group] for group in names_by_group(self.inner, self.named())]
        held = [set().union(*groups) for groups in zip(*form.group.gather_objects(here), strict=True)]
        everywhere = [[name for name in shapes if name in names] for names in held]
        return StateLayout(form.group, here, everywhere, placements(form))
