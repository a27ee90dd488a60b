"""One flat parameter on N ranks: each keeps a part of it, and all of it only while a block computes.

    weights     [ q_proj | k_proj | v_proj | …           | pad ]   one dtype, padded to a multiple of N
    rank r            [ part r ]                                   the shard: the only lasting copy
    gather      all-gather of the shards into `full`, of which the module's weights are views
    free        full's memory goes back; the views, and what autograd saved of them, wait for the next gather
    reduce      the weights' gradients, flattened: a reduce-scatter adds the average of part r to the slices' .grad

A *slice* is what a shard holds of one weight, in one dimension and possibly empty: what optimizers step. While a weight
is not gathered its module holds a placeholder on "meta", so that using it is an error and not a read of freed memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.parallel.offload import Offload

Initialize = Callable[[str, tuple[int, ...]], Tensor]  # (name, shape) -> the initial value of that parameter


@dataclass(eq=False)
class Owned:
    """A parameter, under all the names it has (several if it is tied) and in all the modules that own it."""

    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)

    @staticmethod
    def all_of(module: nn.Module) -> list["Owned"]:
        """In the order of `named_parameters`."""
        found: dict[nn.Parameter, Owned] = {}
        for prefix, owner in module.named_modules(remove_duplicate=False):
            for key, parameter in owner._parameters.items():
                if parameter is not None:
                    owned = found.setdefault(parameter, Owned(parameter))
                    owned.names.append(f"{prefix}.{key}" if prefix else key)
                    owned.owners.append((owner, key))
        return list(found.values())


@dataclass(eq=False)
class Weight:
    """One weight in a flat parameter: elements `start` to `stop` of it.

    This rank's shard holds a slice of it: elements `low` to `high` of the shard, from element `skipped` of the weight.
    """

    names: list[str]
    owners: list[tuple[nn.Module, str]]
    start: int
    stop: int
    low: int
    high: int
    skipped: int
    full: nn.Parameter  # a view of the flat parameter's memory
    placeholder: nn.Parameter  # what the module holds while that memory is freed
    slice: nn.Parameter | None = None  # a view of the shard

    @property
    def name(self) -> str:
        return self.names[0]

    def show(self, gathered: bool) -> None:
        for owner, key in self.owners:
            owner._parameters[key] = self.full if gathered else self.placeholder

    def cut(self, whole: Tensor) -> Tensor:
        """What this rank's slice holds of a tensor in the weight's shape."""
        return whole.flatten()[self.skipped : self.skipped + self.high - self.low]


class Flat:
    """See the top. name: unique on this rank; master: keep the shard in float32, whatever is gathered."""

    def __init__(
        self,
        name: str,
        members: Sequence[Owned],
        group: Group,
        offload: Offload,
        master: bool,
        reduce_dtype: torch.dtype | None,
        initialize: Initialize | None,
    ):
        first, sizes = members[0].parameter, [owned.parameter.numel() for owned in members]
        self.group, self.offload, self.trained = group, offload, first.requires_grad
        self.reduce_dtype = reduce_dtype or first.dtype
        self.numel = sum(sizes)
        self.part = -(-self.numel // group.world_size)  # elements per rank
        self.start = group.rank * self.part
        self.full = torch.zeros(self.part * group.world_size, dtype=first.dtype, device=group.device)
        stops = torch.tensor(sizes).cumsum(0).tolist()
        self.weights = [self._weight(owned, stop) for owned, stop in zip(members, stops, strict=True)]
        for owned, weight in zip(members, self.weights, strict=True):
            weight.full.data.copy_(_initial_value(owned, initialize))
            owned.parameter = weight.placeholder  # whose memory was the module's can go now
        group.broadcast(self.full)  # parts of differently initialised models would make a patchwork
        own, dtype = self._own_part(), torch.promote_types(first.dtype, torch.float32) if master else first.dtype
        self.shard = offload.place(name, own, dtype)
        for weight in self.weights:
            weight.slice = nn.Parameter(self.shard[weight.low : weight.high], requires_grad=self.trained)
            weight.slice.whole_shape = weight.full.shape
        self._gathering = self._reducing = None
        self.free()

    @property
    def dtype(self) -> torch.dtype:
        return self.full.dtype

    @property
    def nbytes(self) -> int:
        """Of the whole flat parameter, padding included, as it is gathered."""
        return self.full.numel() * self.full.itemsize

    def start_gather(self) -> None:
        self.full.untyped_storage().resize_(self.nbytes)
        own = self._own_part()
        self.offload.up(self.shard, own)
        self._gathering = self.group.all_gather(own, out=self.full, async_op=True)

    def finish_gather(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            for weight in self.weights:
                weight.show(gathered=True)

    def free(self) -> None:
        for weight in self.weights:
            weight.show(gathered=False)
        self.full.untyped_storage().resize_(0)

    def start_reduce(self) -> list[str]:
        """Takes the weights' gradients away. Returns the names of those that have none: they count as zero."""
        gradient = torch.empty_like(self.full, dtype=self.reduce_dtype)
        gradient[self.numel :] = 0
        missing = []
        for weight in self.weights:
            if weight.full.grad is None:
                missing.append(weight.name)
                gradient[weight.start : weight.stop] = 0
            else:
                gradient[weight.start : weight.stop] = weight.full.grad.flatten()
                weight.full.grad = None
        self._reducing = self.group.reduce_scatter(gradient, op="avg", async_op=True)
        return missing

    def finish_reduce(self) -> list[str]:
        """Adds the averages to the slices' gradients. Returns the names of the slices that had none before."""
        reduced = self.offload.down(self._reducing.wait()).to(self.shard.dtype)
        self._reducing = None
        fresh = [weight.name for weight in self.weights if weight.slice.grad is None]
        for weight in self.weights:
            part = reduced[weight.low : weight.high]
            if weight.slice.grad is None:
                weight.slice.grad = part
            else:
                weight.slice.grad += part
        return fresh

    def join(self, parts: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Slices of something that goes with these weights (None: others have all of it) -> all of it, on the CPU.
        Every rank calls it with the same names."""
        weights = [weight for weight in self.weights if weight.name in parts]
        if not weights:
            return {}
        own = torch.zeros(self.part, dtype=self.shard.dtype, device=self.full.device)
        for weight in weights:
            if parts[weight.name] is not None:
                own[weight.low : weight.high] = parts[weight.name]
        flat = self.group.all_gather(own).cpu()
        return {w.name: flat[w.start : w.stop].view(w.full.shape).clone() for w in weights}

    def _own_part(self) -> Tensor:
        return self.full[self.start : self.start + self.part]

    def _weight(self, owned: Owned, stop: int) -> Weight:
        parameter, trained = owned.parameter, self.trained
        start = stop - parameter.numel()
        low, high = (min(max(place - self.start, 0), self.part) for place in (start, stop))
        # .data: a view with a version of its own, or autograd would take each gather for a change of saved weights
        full = nn.Parameter(self.full[start:stop].view(parameter.shape).data, requires_grad=trained)
        full.__dict__.update(parameter.__dict__)
        placeholder = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=trained)
        skipped = max(0, self.start - start)
        return Weight(owned.names, owned.owners, start, stop, low, high, skipped, full, placeholder)


def _initial_value(owned: Owned, initialize: Initialize | None) -> Tensor:
    parameter, name = owned.parameter, owned.names[0]
    if parameter.device.type != "meta":
        return parameter.detach()
    if initialize is None:
        raise ValueError(f"{name} is on 'meta': say what it starts as, initialize=lambda name, shape: a tensor.")
    value = initialize(name, tuple(parameter.shape))
    if value.shape != parameter.shape:
        raise ValueError(f"initialize({name!r}) is {list(value.shape)}, but the parameter {list(parameter.shape)}.")
    return value
