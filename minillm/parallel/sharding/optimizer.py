"""A torch optimizer over this rank's slices of parameters: what ZeRO and FSDP step, clip, save and restore.

Its state becomes that of one process, and the other way round, in `full_state.py`.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.parallel.data_parallel.packing import Named
from minillm.parallel.sharding.full_state import full_state, load_full
from minillm.parallel.sharding.offload import Offload
from minillm.parallel.sharding.placement import Placement, clip_grad_norm_
from minillm.parallel.sharding.sharded_gradient import plain
from minillm.parallel.sharding.state import LocalState

MakeOptimizer = Callable[[Named], torch.optim.Optimizer]

WHOLE_MATRICES = {"Adafactor", "Muon", "LBFGS", "LAMB", "Lamb", "FusedLAMB", "LARS", "Lars", "Shampoo", "SOAP", "CAME"}


class SlicedOptimizer(torch.optim.Optimizer):
    """FullyShard's optimizer, and what ZeroOptimizer adds to: `inner`, a torch optimizer over this rank's slices.

    slices: by name, in the order of the parameters, each 1-D and possibly empty (see `slices.slice_of`).
    placements: of the slices; group: all ranks that hold parts. home: where the inner optimizer keeps its state.
    ValueError: `make` builds an optimizer that looks at whole matrices, of which it would see slices.
    """

    def __init__(
        self,
        make: MakeOptimizer,
        slices: Mapping[str, nn.Parameter],
        placements: Mapping[str, Placement],
        group: Group,
        home: Offload,
    ) -> None:
        self.slices, self.placements, self.norm_group, self.home = dict(slices), placements, group, home
        self.inner, self._is_built = make(list(self.slices.items())), False
        _check_elementwise(self.inner)
        super().__init__(self.inner.param_groups, self.inner.defaults)  # the same dicts: schedulers set them
        self.state, self._is_built = self.inner.state, True

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The slices that this rank steps."""
        return [part for group in self.inner.param_groups for part in group["params"] if part.numel()]

    def named(self) -> dict[str, nn.Parameter]:
        """All slices by name, also those of frozen parameters."""
        return self.slices

    def gradients_by_name(self) -> dict[str, Tensor]:
        """The gradients of the slices, by name."""
        return {name: plain(part.grad) for name, part in self.slices.items() if part.grad is not None}

    def prepare_gradients(self) -> None:
        """For loops that see or change gradients before `step`: the slices have theirs, where they are stepped."""

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float | None, loss_scale: float = 1.0, norm_type: float = 2.0) -> Tensor:
        """Norm of the whole model's gradient / loss_scale, a float64 scalar, then scaled down to at most max_norm.

        One all-reduce of 8 bytes, so the norm, and whether it is finite, is the same on every rank. With masters it is
        done in float32, so that float16 gradients do not underflow.
        """
        self.prepare_gradients()
        how = (self.placements, self.norm_group, max_norm, loss_scale, norm_type)
        return clip_grad_norm_(self.gradients_by_name(), *how)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps this rank's slices."""
        with torch.enable_grad():
            loss = closure() if closure else None
        self.step_inner()
        self.home.keep(self.inner)
        return loss

    def step_inner(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # a ShardedGradient looks at each of its operations
            self.inner.step()

    def step_slices(self, chosen: Iterable[nn.Parameter]) -> None:
        """Steps these slices only; the optimizer does not see the others meanwhile."""
        stepped = {id(part) for part in chosen}
        everything = [group["params"] for group in self.inner.param_groups]
        for group, members in zip(self.inner.param_groups, everything, strict=True):
            group["params"] = [part for part in members if id(part) in stepped]
        try:
            self.step_inner()
        finally:
            for group, members in zip(self.inner.param_groups, everything, strict=True):
                group["params"] = members

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_built:
            raise ValueError("add_param_group comes too late for a sharded optimizer: make all groups in make(named).")
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(f"a {type(self).__name__} belongs to this process's group: copy its state_dict() instead.")

    # What is saved and compared.

    def masters(self) -> dict[str, Tensor]:
        """Slices of float32 weights whose model has 16-bit ones."""
        return {name: part.detach() for name, part in self.slices.items() if part.is_master}

    def state_dict(self) -> dict[str, Any]:
        """The state in torch's layout, as `make(module.named_parameters())` on one process would have it, on the CPU of
        every rank: any number of ranks can load it, and so can that optimizer. All ranks have to call it."""
        return full_state(LocalState(self), self.norm_group)["optimizer"]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What `state_dict` has returned, or that of a plain optimizer of the same parameters; no communication. Load
        the module first: masters that `state` does not hold are copied from its weights.
        ValueError: a state of another model."""
        load_full(LocalState(self), state)

    @torch.no_grad()
    def load_local(self, state: dict[str, Any]) -> None:
        """See `state.Stepped`."""
        self.inner.load_state_dict({key: state[key] for key in ("state", "param_groups")})
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.home.keep(self.inner)
        for name, master in state["masters"].items():
            self.slices[name].copy_(master)


def _check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    if named := WHOLE_MATRICES & {kind.__name__ for kind in type(optimizer).__mro__}:
        raise ValueError(
            f"{named.pop()} looks at whole matrices or norms and would see slices of them: use an optimizer that works "
            "element by element, such as AdamW or SGD."
        )
    dims = [{len(p.whole_shape) > 1 for p in group["params"]} for group in optimizer.param_groups]
    if set() in dims and {True, False} in dims:
        warnings.warn(
            "a parameter group is empty and another has matrices and vectors: sharded parameters are 1-D slices, so "
            "choose groups by len(parameter.whole_shape), as minillm.train.decay_groups does.",
            stacklevel=4,
        )
