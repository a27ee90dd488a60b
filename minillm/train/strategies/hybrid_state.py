"""Whole state of a model that is split over ranks: by the names and shapes of the whole model, for any other layout.

    a rank's part of its stage's parameter  ── gather ──▶  joined, by its name in the whole model
    whole tensor                            ── cut ─────▶  this rank's part

What a rank's part is, placements say (`sharding/placement.py`): a slice of a head's rows, and of that ZeRO's shard.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from minillm.comm import Group
from minillm.model import ModelConfig
from minillm.parallel.sharding.optimizer_state import SlicedOptimizer, StateLayout, names_by_group, plain
from minillm.parallel.sharding.placement import Placement
from minillm.parallel.tensor_parallel.plan import whole_shapes
from minillm.train.optimizer import Updater


class SplitModel(Protocol):
    """What is read of a `Hybrid`: all its ranks, the whole model's shape, and what this rank holds of it."""

    group: Group
    config: ModelConfig
    placements: Mapping[str, Placement]


def gather_all(
    strategy: SplitModel, parts: Mapping[str, Tensor], placements: Mapping[str, Placement]
) -> dict[str, Tensor]:
    """This rank's parts of parameters, or of what goes with them -> whole tensors by name, in the model's order, on the
    CPU of every rank. Every rank calls it."""
    names = list(whole_shapes(strategy.config))
    found = StateLayout(strategy.group, [], [names], placements).gather(parts)
    return {name: found[name] for name in names if name in found}


class SplitUpdater:
    """`source` steps this rank's parts; its full state is that of a single process. See `optimizer.Updater`."""

    def __init__(self, strategy: SplitModel, source: Updater | SlicedOptimizer) -> None:
        self.strategy, self.source, self.inner = strategy, source, source.inner
        self.prepare_gradients, self.step, self.zero_grad = source.prepare_gradients, source.step, source.zero_grad
        sliced = isinstance(source, SlicedOptimizer)
        self.placements: Mapping[str, Placement] = source.placements if sliced else strategy.placements

    @property
    def parameters(self) -> list[Tensor]:
        return self.source.parameters

    def named(self) -> dict[str, Tensor]:
        """What is stepped, by name: parameters, their masters or ZeRO's slices of them."""
        return self.source.named()

    def gradients(self) -> dict[str, Tensor]:
        """What these have in .grad, after `prepare_gradients`."""
        return {name: plain(part.grad) for name, part in self.named().items() if part.grad is not None}

    def full_state_dict(self) -> dict[str, Any]:
        """In the layout of torch's optimizers over the whole model, on the CPU of every rank; all call it."""
        if isinstance(self.source, SlicedOptimizer):
            return self._layout().full({**self.inner.state_dict(), "masters": self.source.masters()})
        return self._layout().full(self.source.full_state_dict())

    def sharded_state_dict(self) -> dict[str, Any]:
        """What this rank has, for this rank to go back to."""
        return {**self.source.sharded_state_dict(), "local": True}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After the weights' own. A full state, which every rank loads, or this rank's own."""
        if "local" in state:
            self.source.load_state_dict({key: value for key, value in state.items() if key != "local"})
            return
        own = self._layout().own(state)
        if isinstance(self.source, SlicedOptimizer):
            own["shard"] = self.source.layout()
        self.source.load_state_dict(own)

    def _layout(self) -> StateLayout:
        here = names_by_group(self.inner, self.named().items())
        held = [set().union(*groups) for groups in zip(*self.strategy.group.gather_objects(here), strict=True)]
        everywhere = [[name for name in whole_shapes(self.strategy.config) if name in names] for names in held]
        return StateLayout(self.strategy.group, here, everywhere, self.placements)
