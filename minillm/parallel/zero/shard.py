"""One bucket as one rank of ZeRO sees it: all of the weights, a part to step, gradients that come and go.

weights    flat       [ w w w | w w w | w w w | w w w ]    the module's parameters are views of it
                                own                        this rank's part; slices: the parameters within it
gradients  full       [ g g g | g g g | g g g | g g g ]    of this rank's batch; each p.grad is a view of it
           gradient           [ G G G ]                    this rank's part of the average over ranks
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.parallel.data_parallel.reducer import Bucket
from minillm.parallel.offload import Offload


class Shard:
    """flat: [padded]; own, weights, gradient: [padded / N]. `weights` is what is stepped: `own` itself, or a copy of it
    that is wider (float32 masters of 16-bit weights) or offloaded.
    """

    def __init__(self, bucket: Bucket, group: Group, home: Offload, master: bool, name: str) -> None:
        self.bucket, self.group, self.flat = bucket, group, bucket.zeros()
        for parameter, view in zip(bucket.parameters, bucket.views(self.flat), strict=True):
            view.copy_(parameter.detach())
            parameter.data, parameter.grad = view, None
        self.own = bucket.shard(self.flat, group.rank, group.world_size)
        self.wide = master and bucket.dtype.itemsize == 2
        copied = self.wide or home.active
        self.weights = home.place(name, self.own, torch.float32 if self.wide else None) if copied else self.own
        size, ends = self.own.numel(), [*bucket.offsets[1:], bucket.numel]
        first = group.rank * size
        self.ranges = {
            name: slice(min(max(begin - first, 0), size), min(max(end - first, 0), size))
            for name, begin, end in zip(bucket.names, bucket.offsets, ends, strict=True)
        }
        parameters = dict(zip(bucket.names, bucket.parameters, strict=True))
        self.slices = {name: slice_of(parameters[name], self.weights[part]) for name, part in self.ranges.items()}
        self.arrived: set[int] = set()  # in this backward pass
        self.used: set[int] = set()  # since zero_grad
        self._clear()

    def _clear(self) -> None:
        self.full = self.views = self.gradient = self.arriving = self.handle = None
        self.collected = False  # whether `gradient` is where `weights` is, in its dtype

    @property
    def gradients(self) -> list[Tensor]:
        return [tensor for tensor in (self.gradient, self.arriving, self.full) if tensor is not None]

    @property
    def is_complete(self) -> bool:
        return len(self.arrived) == len(self.bucket.parameters)

    def attach(self, place: int) -> None:
        """Makes the .grad of one parameter a view of `full`, with what was in it."""
        if self.full is None:
            self.full = self.bucket.zeros()
            self.views = self.bucket.views(self.full)
        parameter, view = self.bucket.parameters[place], self.views[place]
        if parameter.grad is not view:
            view.zero_() if parameter.grad is None else view.copy_(parameter.grad)
            parameter.grad = view

    def start(self, in_place: bool) -> None:
        full = self.bucket.zeros() if self.full is None else self.full
        own = self.bucket.shard(full, self.group.rank, self.group.world_size)
        self.full, self.arriving = full, own if in_place else torch.empty_like(own)
        self.handle = self.group.reduce_scatter(full, "avg", async_op=True, out=self.arriving)

    def finish(self, free: bool) -> None:
        """Wait for the reduction, add its result to the shard's gradient; free: the full gradients go."""
        if self.handle is None:
            return
        self.handle.wait()
        self.gradient = self.arriving if self.gradient is None else self.gradient.add_(self.arriving)
        self.arriving = self.handle = None
        if free:
            self._free_full()
        if self.weights is self.own:
            self.offer()

    def collect(self, home: Offload) -> None:
        """Brings the gradient to where the weights are stepped, in their dtype."""
        if self.collected:
            return
        self.gradient = home.down(self.gradient).to(self.weights.dtype)
        self.collected = True
        if self.weights is not self.own:
            self._free_full()

    def offer(self, left_alone: frozenset[str] = frozenset()) -> None:
        """Gives every slice its part of the gradient, but those of parameters that nobody used."""
        for name, part in self.slices.items():
            part.grad = self.gradient[self.ranges[name]] if part.numel() and name not in left_alone else None

    def publish(self, home: Offload) -> None:
        """What was stepped becomes this rank's part of the weights."""
        if self.weights is not self.own:
            home.up(self.weights, self.own)

    def forget(self) -> None:
        """Frees all gradients."""
        for part in self.slices.values():
            part.grad = None
        self.used.clear()
        self._free_full()
        self._clear()

    # Between slices and whole tensors.

    def join(self, parts: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Slices of something that goes with these parameters (None: others have all of it) -> all of it, on the CPU.
        Every rank calls it with the same names."""
        names = [name for name in self.slices if name in parts]
        if not names:
            return {}
        own = torch.zeros_like(self.own, dtype=self.weights.dtype)
        for name in names:
            if parts[name] is not None:
                own[self.ranges[name]] = parts[name]
        views = dict(zip(self.bucket.names, self.bucket.views(self.group.all_gather(own)), strict=True))
        return {name: views[name].to("cpu", copy=True) for name in names}

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """What this rank's slice holds of a tensor in the parameter's shape."""
        place, part = self.bucket.names.index(name), self.ranges[name]
        stored = torch.empty_like(self.bucket.parameters[place], dtype=whole.dtype, device=whole.device).copy_(whole)
        skipped = max(0, self.group.rank * self.own.numel() - self.bucket.offsets[place])
        return stored.as_strided((stored.numel(),), (1,))[skipped : skipped + part.stop - part.start]  # as in memory

    def _free_full(self) -> None:
        for parameter in self.bucket.parameters:
            parameter.grad = None
        self.full = self.views = None


def slice_of(parameter: nn.Parameter, part: Tensor) -> nn.Parameter:
    """part: [n] of the parameter's elements, as a parameter that remembers what it is a part of."""
    slice_ = nn.Parameter(part, requires_grad=parameter.requires_grad)
    slice_.whole_shape = parameter.shape
    return slice_
