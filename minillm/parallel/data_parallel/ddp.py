"""Data parallelism: every rank has the whole model and a part of the batch; gradients are averaged over the ranks.

                    backward ────────────────────────────▶
    NaiveDDP        computes computes computes computes    reduce reduce reduce reduce      one call per tensor
    FlatDDP         computes computes computes computes    reduce all                       one call, at the end
    BucketedDDP     computes computes computes computes
                             reduce 0  reduce 1   reduce 2                                  hidden, but for the last

Each sends the same bytes, 2P(N-1)/N per rank for gradients of P bytes: they differ in how often latency is paid and in
how much of the communication hides behind backward. A mean over ranks is the big batch's gradient only if each rank's
loss is divided by the tokens of all ranks over N (`SingleDevice.loss_divisor` in train/strategies). Habits of torch's
DistributedDataParallel carry over (Li et al., "PyTorch Distributed", VLDB 2020):

    model = BucketedDDP(model, group)
    with model.no_sync():                      # all microbatches but the last
        loss_of(model(x)).backward()
    loss_of(model(x)).backward()               # returns when every gradient is reduced
    optimizer.step()
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.comm.operation import Work
from minillm.parallel.data_parallel.packing import Bucket, Named, assign
from minillm.parallel.data_parallel.reducer import Reducer
from minillm.parallel.data_parallel.replicas import BufferSync, no_gradient, replicate

MB = 1 << 20

Hook = Callable[[Bucket, Tensor, Group], None]
"""(bucket, flat, group): replaces the all-reduce. Leaves in `flat` what stands for the mean over the ranks."""


class RepackingReducer(Reducer):
    """After its first reduction, packs the buckets again in the order in which gradients became ready on rank 0.
    packing: what `assign` is told."""

    def __init__(self, named: Named, group: Group, reduce: Callable, packing: dict[str, Any], **options: Any) -> None:
        named, self.packing, self._packed_again = list(named), packing, False
        names = {p: name for name, p in named if p.requires_grad}
        super().__init__(names, assign(named, **packing), [group], reduce, **options)

    def _report(self, order: list[str], missing: list[str]) -> None:
        """The first time, every rank hears what is missing on any of them."""
        if self._packed_again:
            return super()._report(order, missing)
        self._packed_again = True
        told = self.group.gather_objects((order if self.group.rank == 0 else [], missing))
        parameters = {name: p for p, name in self.names.items()}
        ready = dict.fromkeys([*told[0][0], *reversed(parameters)])  # first place counts
        buckets = assign([(name, parameters[name]) for name in reversed(ready)], **self.packing)
        if [b.names for b in self.buckets] != [b.names for b in buckets]:
            self._use(buckets)
        for rank, (_, lacking) in enumerate(told):
            if lacking:
                raise ValueError(no_gradient(lacking, rank, self.group))


class _Replicated(nn.Module):
    """What the three forms share: replicas that start out equal, and gradients that a `Reducer` averages."""

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        packing: dict,
        hook: Hook | None = None,
        gradient_groups: Mapping[str, Group] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if hook and gradient_groups:
            raise ValueError("a hook averages over one group: leave it out where experts have a group of their own.")
        replicate(module, group, gradient_groups)
        self.module, self.group, self.hook, self.gradient_groups = module, group, hook, dict(gradient_groups or {})
        packing |= {"multiple_of": group.world_size if hook else 1, "gradient_groups": self.gradient_groups}
        self.reducer = RepackingReducer(module.named_parameters(), group, self._reduce, packing, **options)
        BufferSync(module, group, self.reducer.reduces)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(f"a {type(self).__name__} belongs to this process's group: copy or save its .module instead.")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.reducer.free_idle()
        if torch.is_grad_enabled() and self.reducer.sync:
            self.reducer.expect()
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward inside only accumulates; the first one outside reduces the sum. torch's DDP decides by where forward
        runs, this class by where backward runs: keep both inside."""
        return self.reducer.syncing(False)

    def finish(self) -> None:
        """Wait until every gradient is reduced. Backward ends with it; calling it again does nothing. A rank whose loss
        reaches no parameter has to call it, since the others wait for its zeros."""
        self.reducer.finish()

    def _reduce(self, bucket: Bucket, flat: Tensor) -> Work:
        if (own := self.gradient_groups.get(bucket.names[0])) is not None:
            return own.all_reduce(flat.div_(self.group.world_size), async_op=True)
        if self.hook is None:
            return self.group.all_reduce(flat, "avg", async_op=True)
        how = f"hook={getattr(self.hook, '__name__', type(self.hook).__name__)}"
        return self.group.run("all_reduce", flat, partial(self.hook, bucket, flat, self.group), async_op=True, how=how)


class NaiveDDP(_Replicated):
    """One all-reduce per tensor, after backward: pays the latency of each and hides nothing."""

    def __init__(self, module: nn.Module, group: Group, find_unused: bool = False) -> None:
        super().__init__(module, group, {"cap_bytes": 1}, overlap=False, find_unused=find_unused)


class FlatDDP(_Replicated):
    """One all-reduce (per dtype), after backward: the fewest messages, and nothing hidden."""

    def __init__(self, module: nn.Module, group: Group, find_unused: bool = False) -> None:
        super().__init__(module, group, {"cap_bytes": math.inf}, overlap=False, find_unused=find_unused)


class BucketedDDP(_Replicated):
    """Buckets of about `bucket_cap_mb` MiB, each reduced as soon as its gradients are there, while backward goes on.

    first_bucket_mb: cap of the first bucket, small so that communication starts early; at most `bucket_cap_mb` counts.
    find_unused: parameters may get no gradient on some or all ranks; costs one byte per parameter and step.
    hook: compression, see `compression.py`.
    gradient_groups: by name, the group of a parameter that fewer ranks have in common than `group` has (an expert, see
        `expert_parallel`). It has seen the tokens of all of `group`, so its gradient is summed over its own group and
        divided by the size of `group`.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        bucket_cap_mb: float = 25,
        first_bucket_mb: float = 1,
        find_unused: bool = False,
        hook: Hook | None = None,
        gradient_groups: Mapping[str, Group] | None = None,
    ) -> None:
        for name, cap in (("bucket_cap_mb", bucket_cap_mb), ("first_bucket_mb", first_bucket_mb)):
            if not cap > 0:
                raise ValueError(f"{name} is {cap}: a bucket needs a size above 0, for example 25")
        caps = {"cap_bytes": bucket_cap_mb * MB, "first_cap_bytes": min(first_bucket_mb, bucket_cap_mb) * MB}
        super().__init__(module, group, caps, hook, gradient_groups, find_unused=find_unused)
