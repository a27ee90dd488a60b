"""An optimizer over this rank's slices of parameters, and its state: whole as one process has it, or by rank.

    rank 0   exp_avg of its part of a weight ─┐                                                         ┌─ rank 0 of 3
    rank 1   exp_avg of its part of a weight ─┴─ gather ─> {"state": {0: {"exp_avg": ..., "step": ...}}} ─ cut ─ ...

The full state is that of a plain torch optimizer over whole parameters, with two keys more that torch does not look
at: "names" (in the order of "state") and "masters" (float32 weights by name, where the model has 16-bit ones). Moments
are gathered and cut as the parameters are; numbers of a parameter, such as Adam's `step`, are the same for all its
parts. Rank 0's own state is 1/N of it: saving that alone, as if it were all, is a classic way to lose a run.
"""

import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.parallel.data_parallel.packing import Named
from minillm.parallel.sharding.offload import Offload
from minillm.parallel.sharding.placement import Placement, clip_grad_norm_, gather
from minillm.parallel.sharding.sharded_gradient import plain

MakeOptimizer = Callable[[Named], torch.optim.Optimizer]
Entries = dict[str, dict[str, Any]]  # by parameter name, by key ("exp_avg"): a tensor, or a number of the parameter
Groups = list[list[str]]  # names by the optimizer's parameter groups: the order in which torch numbers parameters

AT_ONCE = 32  # tensors that are gathered together
WHOLE_MATRICES = {"Adafactor", "Muon", "LBFGS", "LAMB", "Lamb", "FusedLAMB", "LARS", "Lars", "Shampoo", "SOAP", "CAME"}


class SlicedOptimizer(torch.optim.Optimizer):
    """What ZeroOptimizer and FullyShard's optimizer share: `inner`, a torch optimizer over this rank's slices.

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
        """What the slices have in .grad."""
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
        gradients = self.gradients_by_name()
        return clip_grad_norm_(gradients, self.placements, self.norm_group, max_norm, loss_scale, norm_type)

    def step_inner(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # a ShardedGradient looks at each of its operations
            self.inner.step()

    def step_slices(self, chosen: Iterable[nn.Parameter]) -> None:
        """One step of these slices: the others are kept from the optimizer meanwhile."""
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
        raise ValueError(
            f"a {type(self).__name__} belongs to this process's group: copy its full_state_dict() instead."
        )

    # What is saved and compared.

    def full_gradients(self) -> dict[str, Tensor]:
        """name -> the averaged gradient, whole, on the CPU of every rank, after `prepare_gradients`. Every rank calls
        it."""
        whole = self._state_layout().gather(self.gradients_by_name())
        return {name: whole[name] for name in self.slices if name in whole}

    def masters(self) -> dict[str, Tensor]:
        """Slices of float32 weights whose model has 16-bit ones."""
        return {name: part.detach() for name, part in self.slices.items() if part.is_master}

    def layout(self) -> dict[str, Any]:
        """Which shard this rank has: elements `start` to `stop` of its part of each parameter."""
        ranges = {name: (placed.parts[-1].start, placed.parts[-1].stop) for name, placed in self.placements.items()}
        return {"rank": self.norm_group.rank, "world_size": self.norm_group.world_size, "slices": ranges}

    def full_state_dict(self) -> dict[str, Any]:
        """The state in torch's layout, as `make(module.named_parameters())` on one process would have it, on the CPU of
        every rank: any number of ranks can load it, and so can that optimizer. All ranks have to call it."""
        return self._state_layout().full({**self.inner.state_dict(), "masters": self.masters()})

    def state_dict(self) -> dict[str, Any]:
        """`full_state_dict`, as torch habits expect; every rank calls it."""
        return self.full_state_dict()

    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's part, which only the same rank of the same layout can load; no communication."""
        return {**self.inner.state_dict(), "masters": self.masters(), "shard": self.layout()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Either form of state, or what a plain optimizer of the same parameters saved; no communication. Load the
        module first: masters that `state` does not hold are copied from its weights.
        ValueError: a state of another model, or another rank's or layout's shard."""
        saved, here = state.get("shard"), self.layout()
        if saved not in (None, here):
            raise ValueError(
                f"this is the shard of rank {saved['rank']} of {saved['world_size']}, cut otherwise than that of rank "
                f"{here['rank']} of {here['world_size']} here: save full_state_dict(), which fits any layout."
            )
        own = state if saved else self._state_layout().own(state)
        entries = {at: {key: _copy(value) for key, value in entry.items()} for at, entry in own["state"].items()}
        self.inner.load_state_dict({"state": entries, "param_groups": own["param_groups"]})
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.home.keep(self.inner)
        for name, master in own["masters"].items():
            self.slices[name].copy_(master)

    def _state_layout(self) -> "StateLayout":
        names = names_by_group(self.inner, self.slices.items())
        return StateLayout(self.norm_group, names, names, self.placements)


@dataclass
class StateLayout:
    """How an optimizer's parameters lie on the ranks of `group`.

    here: names of this rank's, everywhere: of all parameters, the same on every rank; placements: of those here.
    """

    group: Group
    here: Groups
    everywhere: Groups
    placements: Mapping[str, Placement]

    def full(self, state: dict[str, Any]) -> dict[str, Any]:
        """state: of this rank's optimizer, and its "masters" by name. Every rank calls it and gets all of all."""
        mine = {name: entry for name, entry in by_name(state, self.here).items() if not is_empty(entry)}
        told = self.group.gather_objects((per_element(mine), bool(state["masters"])))
        spread = set().union(*(keys for keys, _ in told))
        numbers = {name: {k: _host(v) for k, v in e.items() if k not in spread} for name, e in mine.items()}
        entries: Entries = {}
        for theirs in self.group.gather_objects(numbers):
            entries = theirs | entries
        for key in sorted(spread):
            parts = {name: entry[key] for name, entry in mine.items() if key in entry}
            for name, tensor in self.gather(parts).items():
                entries[name][key] = tensor
        names = list(itertools.chain(*self.everywhere))
        return {
            "state": {place: entries[name] for place, name in enumerate(names) if name in entries},
            "param_groups": numbered(state["param_groups"], self.everywhere),
            "names": names,
            "masters": self.gather(state["masters"]) if any(has for _, has in told) else {},
        }

    def gather(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts -> whole tensors on the CPU, some at a time; every rank calls it."""
        names, found = list(itertools.chain(*self.everywhere)), {}
        for start in range(0, len(names), AT_ONCE):
            chosen = {name: parts[name] for name in names[start : start + AT_ONCE] if name in parts}
            found |= gather(chosen, self.placements, self.group)
        return found

    @torch.no_grad()
    def own(self, state: dict[str, Any]) -> dict[str, Any]:
        """A full state, or what a plain optimizer of the same parameters saved -> what this rank's optimizer loads.

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
        entries, places = by_name(state, self.everywhere), list(itertools.chain(*self.here))
        spread = per_element(entries)
        cut = [
            {k: self._part(k, name, v) if k in spread else _copy(v) for k, v in entries.get(name, {}).items()}
            for name in places
        ]
        masters = state.get("masters", {})
        return {
            "state": {place: entry for place, entry in enumerate(cut) if entry},
            "param_groups": numbered(state["param_groups"], self.here),
            "masters": {name: self._part("master", name, masters[name]) for name in masters if name in self.placements},
        }

    def _part(self, key: str, name: str, whole: Any) -> Any:
        if not isinstance(whole, Tensor):
            return whole
        placement = self.placements[name]
        if whole.shape != placement.shape:
            raise ValueError(
                f"{key} of {name} has shape {list(whole.shape)}, the parameter {list(placement.shape)}: "
                "this optimizer state is of another model."
            )
        return placement.cut(whole)


def names_by_group(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]]) -> Groups:
    names = {id(parameter): name for name, parameter in named}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


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


def by_name(state: dict[str, Any], groups: Groups) -> Entries:
    names = enumerate(itertools.chain(*groups))
    return {name: state["state"][place] for place, name in names if state["state"].get(place)}


def numbered(param_groups: list[dict[str, Any]], groups: Groups) -> list[dict[str, Any]]:
    """The groups' settings, with the parameters numbered as torch does."""
    number = itertools.count()
    numbers = [[next(number) for _ in names] for names in groups]
    return [{**settings, "params": own} for settings, own in zip(param_groups, numbers, strict=True)]


def per_element(entries: Entries) -> set[str]:
    """Keys of what an optimizer keeps per element (moments). A tensor without dimensions may be a scalar parameter's,
    or count steps: that the other parameters tell."""
    return {k for entry in entries.values() for k, v in entry.items() if isinstance(v, Tensor) and v.dim()}


def is_empty(entry: dict[str, Any]) -> bool:
    """True for the state of an empty slice. Its step counter may lag behind, so another rank's is used."""
    return any(isinstance(value, Tensor) and not value.numel() for value in entry.values())


def _host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
