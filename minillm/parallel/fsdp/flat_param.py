"""One flat parameter on N ranks: each keeps a part of it, and all of it only while a block computes.

    weights     [ q_proj | k_proj | v_proj | …           | pad ]   one dtype, padded to a multiple of N
    rank r            [ part r ]                                   the shard: the only lasting copy
    unshard     all-gather of the shards into `full`, of which the module's weights are views
    reshard     full's memory goes back; the views, and what autograd saved of them, wait for the next unshard
    reduce      the weights' gradients, flattened: a reduce-scatter adds the average of part r to the slices' .grad

A *slice* is what a shard holds of one weight, in one dimension and possibly empty: what optimizers step. While a weight
is resharded its module holds a placeholder on "meta", so that using it is an error and not a read of freed memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from minillm.comm.operation import Work
from minillm.parallel.sharding.placement import Placement
from minillm.parallel.sharding.slices import Initialize, LocalShard, ShardSettings


@dataclass(eq=False)
class ParamInfo:
    """A parameter, under all the names it has (several if it is tied) and in all the modules that own it."""

    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)

    @staticmethod
    def all_of(module: nn.Module) -> list["ParamInfo"]:
        """The parameters of a module, in the order of `named_parameters`."""
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
    """One weight in a flat parameter."""

    names: list[str]
    owners: list[tuple[nn.Module, str]]
    placement: Placement  # of the slice
    slice: nn.Parameter  # what this rank's shard holds of it
    full: nn.Parameter  # a view of the flat parameter's memory
    placeholder: nn.Parameter  # what the module holds while that memory is freed

    @property
    def name(self) -> str:
        return self.names[0]

    def use(self, parameter: nn.Parameter) -> None:
        """Makes the module compute with `full`, or hold the placeholder."""
        for owner, key in self.owners:
            owner._parameters[key] = parameter


class FlatParam:
    """See the top. key: unique on this rank. With masters, the shard is float32, whatever is unsharded."""

    def __init__(self, key: str, infos: Sequence[ParamInfo], settings: ShardSettings) -> None:
        first, sizes = infos[0].parameter, [info.parameter.numel() for info in infos]
        settings = settings if first.requires_grad else replace(settings, master=False)  # nothing steps frozen weights
        self.settings, self.group, self.is_trained = settings, settings.group, first.requires_grad
        self.reduce_dtype, self.numel = settings.reduce_dtype or first.dtype, sum(sizes)
        padded = -(-self.numel // self.group.world_size) * self.group.world_size
        self.full = torch.zeros(padded, dtype=first.dtype, device=self.group.device)
        views = self.full[: self.numel].split(sizes)
        for info, view in zip(infos, views, strict=True):
            view.copy_(_initial_value(info, settings.initialize).reshape(-1))
        for group in settings.groups:  # parts of differently initialised models would be a patchwork
            group.broadcast(self.full)
        named = [(info.names[0], info.parameter) for info in infos]
        self.shard = LocalShard(key, self.full, named, settings, is_lasting=False)
        self.params = [self._sharded(info, view) for info, view in zip(infos, views, strict=True)]
        self._unsharding: Work | None = None
        self._reducing: Work | None = None
        self.reshard()

    @property
    def dtype(self) -> torch.dtype:
        return self.full.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole flat parameter, padding included, as it is gathered."""
        return self.full.numel() * self.full.itemsize

    def start_unshard(self) -> None:
        self.full.untyped_storage().resize_(self.nbytes)
        self.shard.write_weights()
        self._unsharding = self.group.all_gather(self.shard.own, out=self.full, async_op=True)

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
        """Takes the weights' gradients and starts averaging them. Returns the names of weights without one: they count
        as zero."""
        flat = torch.empty_like(self.full, dtype=self.reduce_dtype)
        flat[self.numel :] = 0
        missing, start = [], 0
        for param in self.params:
            into, start = flat[start : start + param.full.numel()], start + param.full.numel()
            if param.full.grad is None:
                missing.append(param.name)
                into.zero_()
            else:
                into.copy_(param.full.grad.reshape(-1))
                param.full.grad = None
        self._reducing = self.settings.reduce_scatter(flat)
        return missing

    def finish_reduce(self) -> None:
        """Adds the averages to the slices' gradients."""
        self.shard.add_gradient(self._reducing.wait())
        self._reducing = None

    def _sharded(self, info: ParamInfo, view: Tensor) -> ShardedParam:
        parameter, name = info.parameter, info.names[0]
        # .data: a view with a version of its own, or autograd would take each unshard for a change of saved weights
        full = nn.Parameter(view.view(parameter.shape).data, requires_grad=self.is_trained)
        full.__dict__.update(parameter.__dict__)
        placeholder = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=self.is_trained)
        info.parameter = placeholder  # the memory of the module's own parameter can go now
        own = self.shard.placements[name], self.shard.slices[name]
        return ShardedParam(info.names, info.owners, *own, full, placeholder)


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
