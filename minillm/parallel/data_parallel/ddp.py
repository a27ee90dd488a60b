"""Data parallelism: every rank has the whole model and a part of the batch; gradients are averaged over the ranks.

                    backward ────────────────────────────▶
    NaiveDDP        computes computes computes computes    reduce reduce reduce reduce      one call per tensor
    FlatDDP         computes computes computes computes    reduce all                       one call, at the end
    BucketedDDP     computes computes computes computes
                             reduce 0  reduce 1   reduce 2                                  hidden, but for the last

Each sends the same bytes, 2P(N-1)/N per rank for gradients of P bytes: they differ in how often latency is paid and in
how much of the communication hides behind backward. A mean over ranks is the big batch's gradient only if each rank's
loss is divided by the tokens of all ranks over N (`DataParallel.loss_divisor` in train/strategies). Habits of torch's
DistributedDataParallel carry over (Li et al., "PyTorch Distributed", VLDB 2020):

    model = BucketedDDP(model, group)
    with model.no_sync():                      # all microbatches but the last
        loss_of(model(x)).backward()
    loss_of(model(x)).backward()               # returns when every gradient is reduced
    optimizer.step()
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.comm.work import Work
from minillm.parallel.data_parallel.reducer import Bucket, Reducer

MB = 1 << 20

Hook = Callable[[Bucket, Tensor, Group], None]
"""(bucket, flat, group): replaces the all-reduce. Leaves in `flat` what stands for the mean over the ranks."""


def replicate(module: nn.Module, group: Group) -> None:
    """Makes every rank's parameters and buffers equal to rank 0's. ValueError, on every rank, if models differ in more
    than values, or are not on the group's device, or if another wrapper has them that cannot be taken off."""
    check_plain(module)
    _check_devices(module, group)
    check_same(_tensors(module), group)
    for _, tensor in _tensors(module):
        group.broadcast(tensor.detach())


def check_plain(module: nn.Module) -> None:
    """ValueError if torch's DDP reduces the module's gradients, or its parameters are slices of a FullyShard."""
    if any(isinstance(each, nn.parallel.DistributedDataParallel) for each in module.modules()):
        raise ValueError("torch's DistributedDataParallel reduces these gradients already: wrap its .module instead.")
    if any(hasattr(parameter, "whole_shape") for parameter in module.parameters()):
        raise ValueError("these parameters are sharded already: wrap the plain module, once.")


class BufferSync:
    """Before a forward pass that follows one in training mode, every rank gets rank 0's saved buffers (statistics of
    BatchNorm), as with torch's DDP. Tables that are not saved never change. Nothing is sent under `no_sync`."""

    def __init__(self, module: nn.Module, group: Group, reducer: Reducer | None = None) -> None:
        saved = module.state_dict(keep_vars=True)
        unique = {id(buffer): name for name, buffer in module.named_buffers() if name in saved}
        self.module, self.group, self.reducer, self.names = module, group, reducer, list(unique.values())
        self.may_differ = False
        if self.names:
            module.register_forward_pre_hook(self._before_forward)

    @torch.no_grad()
    def _before_forward(self, *_: Any) -> None:
        syncs = self.reducer is None or (self.reducer.sync and not self.reducer.is_closed)
        if self.may_differ and syncs:
            buffers = [self.module.get_buffer(name) for name in self.names]
            for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
                alike = [buffer for buffer in buffers if buffer.dtype == dtype]
                flat = self.group.broadcast(torch.cat([buffer.reshape(-1) for buffer in alike]))
                parts = flat.split([buffer.numel() for buffer in alike])
                views = [part.view_as(buffer) for part, buffer in zip(parts, alike, strict=True)]
                torch._foreach_copy_(alike, views)
            self.may_differ = False
        self.may_differ = self.may_differ or self.module.training

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the module belongs to no group


class _Replicated(nn.Module):
    """What the three forms share: replicas that start out equal, and gradients that a `Reducer` averages."""

    def __init__(self, module: nn.Module, group: Group, hook: Hook | None = None, **options: Any) -> None:
        super().__init__()
        replicate(module, group)
        self.module, self.group, self.hook = module, group, hook
        options["multiple_of"] = group.world_size if hook else 1
        self.reducer = Reducer(module.named_parameters(), group, self._reduce, **options)
        BufferSync(module, group, self.reducer)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(f"a {type(self).__name__} belongs to this process's group: copy or save its .module instead.")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.reducer.sync:
            self.reducer.expect()
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside only accumulates; the first one outside reduces the sum. (Where torch asks where *forward*
        ran: with both inside, as above, the two agree.)"""
        before, self.reducer.sync = self.reducer.sync, False
        try:
            yield
        finally:
            self.reducer.sync = before

    def finish(self) -> None:
        """Wait until every gradient is reduced. Backward ends with it; calling it again does nothing. A rank whose loss
        reaches no parameter has to call it, since the others wait for its zeros."""
        self.reducer.finish()

    def _reduce(self, bucket: Bucket, flat: Tensor) -> Work:
        if self.hook is None:
            return self.group.all_reduce(flat, "avg", async_op=True)
        how = f"hook={getattr(self.hook, '__name__', type(self.hook).__name__)}"
        return self.group.run("all_reduce", flat, partial(self.hook, bucket, flat, self.group), async_op=True, how=how)


class NaiveDDP(_Replicated):
    """One all-reduce per tensor, after backward: pays the latency of each and hides nothing."""

    def __init__(self, module: nn.Module, group: Group, find_unused: bool = False) -> None:
        super().__init__(module, group, cap_bytes=1, overlap=False, find_unused=find_unused)


class FlatDDP(_Replicated):
    """One all-reduce (per dtype), after backward: the fewest messages, and nothing hidden."""

    def __init__(self, module: nn.Module, group: Group, find_unused: bool = False) -> None:
        super().__init__(module, group, cap_bytes=math.inf, overlap=False, find_unused=find_unused)


class BucketedDDP(_Replicated):
    """Buckets of about `bucket_cap_mb` MiB, each reduced as soon as its gradients are there, while backward goes on.

    first_bucket_mb: cap of the first bucket, small so that communication starts early; at most `bucket_cap_mb` counts.
    find_unused: parameters may get no gradient on some or all ranks; costs one byte per parameter and step.
    hook: compression, see `compression.py`.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        bucket_cap_mb: float = 25,
        first_bucket_mb: float = 1,
        find_unused: bool = False,
        hook: Hook | None = None,
    ) -> None:
        for name, cap in (("bucket_cap_mb", bucket_cap_mb), ("first_bucket_mb", first_bucket_mb)):
            if not cap > 0:
                raise ValueError(f"{name} is {cap}: a bucket needs a size above 0, for example 25")
        caps = {"cap_bytes": bucket_cap_mb * MB, "first_cap_bytes": min(first_bucket_mb, bucket_cap_mb) * MB}
        super().__init__(module, group, hook, find_unused=find_unused, **caps)


def _tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return itertools.chain(module.named_parameters(), module.named_buffers())


def _check_devices(module: nn.Module, group: Group) -> None:
    first: dict[str, str] = {}
    for name, tensor in _tensors(module):
        first.setdefault(tensor.device.type, name)
    if set(first) - {group.device.type}:
        places = ", ".join(f"{name} on {device}" for device, name in first.items())
        raise ValueError(f"group {group.name!r} is on {group.device}, but {places}: move the module there with .to()")


def check_same(named: Iterable[tuple[str, Tensor]], group: Group) -> None:
    """ValueError, on every rank, that names the first tensor in which a rank's model differs from rank 0's."""
    own = [f"{name} {list(t.shape)} {t.dtype}{'' if t.requires_grad else ' frozen'}" for name, t in named]
    first, *others = group.gather_objects(own)
    for rank, theirs in enumerate(others, start=1):
        for expected, found in itertools.zip_longest(first, theirs, fillvalue="nothing"):
            if expected != found:
                raise ValueError(
                    f"the model of rank {rank} has {found} where rank 0 has {expected}: build the same on every rank"
                )
