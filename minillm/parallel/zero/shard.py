"""One bucket as one rank of ZeRO sees it: all of the weights, a part to step, the gradient of that part.

weights    flat       [ w w w | w w w | w w w | w w w ]    the module's parameters are views of it
                                own                        this rank's part; slices: the parameters within it
gradient                      [ G G G ]                    this rank's part of the average over ranks
"""

import torch
from torch import Tensor

from minillm.comm import Group
from minillm.parallel.data_parallel.reducer import Bucket
from minillm.parallel.offload import Offload
from minillm.parallel.optimizer_state import ShardedGradient, slice_of
from minillm.parallel.placement import FlatShard


class Shard:
    """flat: [padded]; own, weights, gradient: [padded / N]. `weights` is what is stepped: `own` itself, or a copy of it
    that is wider (float32 masters of 16-bit weights) or offloaded. parts: what it holds of each parameter.
    """

    def __init__(self, bucket: Bucket, group: Group, home: Offload, master: bool, name: str) -> None:
        self.bucket, self.home, self.flat = bucket, home, bucket.zeros()
        ends = [*bucket.offsets[1:], bucket.numel]
        for parameter, begin, end in zip(bucket.parameters, bucket.offsets, ends, strict=True):
            view = self.flat[begin:end].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data, parameter.grad = view, None
        self.own = bucket.shard(self.flat, group.rank, group.world_size)
        self.is_wide = master and bucket.dtype.itemsize == 2
        self.is_copied = self.is_wide or home.active
        dtype = torch.float32 if self.is_wide else None
        self.weights = home.place(name, self.own, dtype) if self.is_copied else self.own
        low = group.rank * self.own.numel()
        high = low + self.own.numel()
        ranges = zip(bucket.names, bucket.offsets, ends, strict=True)
        self.parts = {name: FlatShard.of_range(begin, end, low, high) for name, begin, end in ranges}
        views = zip(bucket.names, bucket.parameters, self._split(self.weights), strict=True)
        self.slices = {name: slice_of(parameter, view) for name, parameter, view in views}
        self.gradient: Tensor | None = None
        self.is_prepared = False  # whether `gradient` lies where `weights` does, in its dtype

    def _split(self, part: Tensor) -> list[Tensor]:
        """[padded / N] -> what is of each parameter; padding comes last."""
        sizes = [placed.stop - placed.start for placed in self.parts.values()]
        return list(part[: sum(sizes)].split(sizes))

    def add_gradient(self, reduced: Tensor) -> None:
        """Adds what a reduction has brought."""
        self.gradient = reduced if self.gradient is None else self.gradient.add_(reduced)

    def prepare_gradient(self) -> None:
        """Brings the gradient to where the weights are stepped, in their dtype."""
        if not self.is_prepared:
            self.gradient = self.home.down(self.gradient).to(self.weights.dtype)
            self.is_prepared = True

    def gradients(self) -> dict[str, Tensor]:
        """By name, what of the gradient is each parameter's."""
        return dict(zip(self.slices, self._split(self.gradient), strict=True))

    def give_gradients(self, group: Group, unused: set[str]) -> None:
        """Gives every slice its part of the gradient, but those of parameters that no rank used."""
        for name, part in self.gradients().items():
            self.slices[name].grad = None if name in unused else ShardedGradient.of(part, group)

    def write_weights(self) -> None:
        """What was stepped becomes this rank's part of the module's weights."""
        if self.is_copied:
            self.home.up(self.weights, self.own)

    def drop_gradients(self) -> None:
        for slice_ in self.slices.values():
            slice_.grad = None
        self.gradient, self.is_prepared = None, False
