"""One flat parameter on N ranks: each keeps a part of it, and all of it only while a block computes.

    weights     [ q_proj | k_proj | v_proj | …           | pad ]   one dtype, padded to a multiple of N
    rank r            [ part r ]                                   the shard: the only lasting copy
    unshard     all-gather of the shards into `full`, of which the module's weights are views
    reshard     full's memory goes back; the views, and what autograd saved of them, wait for the next unshard
    reduce      the weights' gradients, flattened: a reduce-scatter adds the average of part r to the slices' .grad

A *slice* is what a shard holds of one weight, in one dimension and possibly empty: what optimizers step. While a weight
is resharded its module holds a placeholder on "meta", so that using it is an error and not a read of freed memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.comm.work import Work
from minillm.parallel.offload import Offload
from minillm.parallel.optimizer_state import ShardedGradient, plain, slice_of
from minillm.parallel.placement import FlatShard, Placement

Initialize = Callable[[str, tuple[int, ...]], Tensor]  # (name, shape) -> the initial value of that parameter


@dataclass(frozen=True)
class How:
    """What all flat parameters of a FullyShard share; see there."""

    group: Group
    replicate_group: Group | None
    norm_group: Group
    offload: Offload
    master: bool
    reduce_dtype: torch.dtype | None
    initialize: Initialize | None
    placements: Mapping[str, Placement]


@dataclass(eq=False)
class ParamInfo:
    """A parameter, under all the names it has (several if it is tied) and in all the modules that own it."""

    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)

    @staticmethod
    def all_of(module: nn.Module) -> list["ParamInfo"]:
        """In the order of `named_parameters`."""
        found: dict[nn.Parameter, ParamInfo] = {}
        for prefix, owner in module.named_modules(remove_duplicate=False):
            for key, parameter in owner._parameters.items():
                if parameter is not None:
                    info = found.setdefault(parameter, ParamInfo(parameter))
                    info.names.append(f"{prefix}.{key}" if prefix else key)
                    info.owners.append((owner, key))
        return list(found.values())


@dataclass(eq=False)
class ShardedParam:
    """One weight in a flat parameter: elements `start` to `stop` of it, and the slice of it in this rank's shard."""

    names: list[str]
    owners: list[tuple[nn.Module, str]]
    start: int
    stop: int
    placement: Placement  # of the slice
    full: nn.Parameter  # a view of the flat parameter's memory
    placeholder: nn.Parameter  # what the module holds while that memory is freed
    slice: nn.Parameter  # a view of the shard

    @property
    def name(self) -> str:
        return self.names[0]

    def use(self, parameter: nn.Parameter) -> None:
        """Makes the module compute with `full`, or hold the placeholder."""
        for owner, key in self.owners:
            owner._parameters[key] = parameter


class FlatParam:
    """See the top. name: unique on this rank. With `master`, the shard is float32, whatever is unsharded."""

    def __init__(self, name: str, infos: Sequence[ParamInfo], how: How) -> None:
        first, sizes = infos[0].parameter, [info.parameter.numel() for info in infos]
        self.how, self.group, self.offload, self.is_trained = how, how.group, how.offload, first.requires_grad
        self.reduce_dtype = how.reduce_dtype or first.dtype
        self.numel = sum(sizes)
        self.part = -(-self.numel // self.group.world_size)  # elements per rank
        self.start = self.group.rank * self.part
        self.full = torch.zeros(self.part * self.group.world_size, dtype=first.dtype, device=self.group.device)
        for info, view in zip(infos, self.full[: self.numel].split(sizes), strict=True):
            view.copy_(_initial_value(info, how.initialize).reshape(-1))
        for group in (how.replicate_group, how.group):  # parts of differently initialised models would be a patchwork
            if group:
                group.broadcast(self.full)
        wide = torch.promote_types(first.dtype, torch.float32) if how.master else first.dtype
        self.shard = how.offload.place(name, self._own_part(), wide)
        stops = torch.tensor(sizes).cumsum(0).tolist()
        ranges = [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
        own = [FlatShard.of_range(*each, self.start, self.start + self.part) for each in ranges]
        self.slice_sizes = [placed.stop - placed.start for placed in own]
        columns = zip(infos, ranges, own, self.split(self.shard), strict=True)
        self.params = [self._sharded(*column) for column in columns]
        self._unsharding: Work | None = None
        self._reducing: Work | None = None
        self.reshard()

    @property
    def dtype(self) -> torch.dtype:
        return self.full.dtype

    @property
    def nbytes(self) -> int:
        """Of the whole flat parameter, padding included, as it is gathered."""
        return self.full.numel() * self.full.itemsize

    def split(self, part: Tensor) -> list[Tensor]:
        """part: [elements per rank] -> what is of each weight; padding comes last."""
        return list(part[: sum(self.slice_sizes)].split(self.slice_sizes))

    def start_unshard(self) -> None:
        self.full.untyped_storage().resize_(self.nbytes)
        own = self._own_part()
        self.offload.up(self.shard, own)
        self._unsharding = self.group.all_gather(own, out=self.full, async_op=True)

    def finish_unshard(self) -> None:
        if self._unsharding is not None:
            self._unsharding.wait()
            self._unsharding = None
            for param in self.params:
                param.use(param.full)

    def reshard(self) -> None:
        for param in self.params:
            param.use(param.placeholder)
        self.full.untyped_storage().resize_(0)

    def start_reduce(self) -> list[str]:
        """Takes the weights' gradients away. Returns the names of those that have none: they count as zero."""
        gradient = torch.empty_like(self.full, dtype=self.reduce_dtype)
        gradient[self.numel :] = 0
        missing = []
        for param in self.params:
            if param.full.grad is None:
                missing.append(param.name)
                gradient[param.start : param.stop] = 0
            else:
                gradient[param.start : param.stop] = param.full.grad.reshape(-1)
                param.full.grad = None
        self._reducing = self.group.reduce_scatter(gradient, op="avg", async_op=True)
        return missing

    def finish_reduce(self) -> list[str]:
        """Adds the averages to the slices' gradients. Returns the names of the slices that had none before."""
        average = self._reducing.wait()
        self._reducing = None
        if self.how.replicate_group:
            self.how.replicate_group.all_reduce(average, "avg")
        parts = self.split(self.offload.down(average).to(self.shard.dtype))
        pairs = list(zip(self.params, parts, strict=True))
        fresh = [param.name for param in self.params if param.slice.grad is None]
        earlier = [(param.slice.grad, part) for param, part in pairs if param.slice.grad is not None]
        for param, part in pairs:
            if param.slice.grad is None:
                param.slice.grad = ShardedGradient.of(part, self.how.norm_group)
        if earlier:
            torch._foreach_add_([plain(gradient) for gradient, _ in earlier], [part for _, part in earlier])
        return fresh

    def _own_part(self) -> Tensor:
        return self.full[self.start : self.start + self.part]

    def _sharded(self, info: ParamInfo, place: tuple[int, int], own: FlatShard, part: Tensor) -> ShardedParam:
        parameter = info.parameter
        start, stop = place
        # .data: a view with a version of its own, or autograd would take each unshard for a change of saved weights
        full = nn.Parameter(self.full[start:stop].view(parameter.shape).data, requires_grad=self.is_trained)
        full.__dict__.update(parameter.__dict__)
        placeholder = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=self.is_trained)
        info.parameter = placeholder  # the memory of the module's own parameter can go now
        outer = self.how.placements.get(info.names[0], Placement(parameter.shape))
        return ShardedParam(
            info.names, info.owners, start, stop, outer.within(own), full, placeholder, slice_of(full, part)
        )


def _initial_value(info: ParamInfo, initialize: Initialize | None) -> Tensor:
    parameter, name = info.parameter, info.names[0]
    if parameter.device.type != "meta":
        return parameter.detach()
    if initialize is None:
        raise ValueError(f"{name} is on 'meta': say what it starts as, initialize=lambda name, shape: a tensor.")
    value = initialize(name, tuple(parameter.shape))
    if value.shape != parameter.shape:
        raise ValueError(f"initialize({name!r}) is {list(value.shape)}, but the parameter {list(parameter.shape)}.")
    return value
