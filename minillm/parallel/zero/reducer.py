"""The DDP reducer with a reduce-scatter: of each bucket's average, this rank gets 1/N.

stage 1   own part of the bucket <─ reduce-scatter ─ bucket        at the end: the full gradients stay
stage 2   a tensor of its own    <─ reduce-scatter ─ bucket ─> freed before the next one starts
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minillm.comm.operation import Work
from minillm.parallel.data_parallel.packing import Bucket, assign
from minillm.parallel.data_parallel.reducer import Reducer
from minillm.parallel.sharding.sharded_gradient import ShardedGradient
from minillm.parallel.sharding.slices import LocalShard, ShardSettings


class ScatterReducer(Reducer):
    """Averages end up as the gradients of `shards`, one for each bucket.

    Stage 2 waits for a bucket and frees it before the next one starts: so a bucket on its way and one that fills are
    all there is of full gradients.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        settings: ShardSettings,
        stage: int,
        cap_bytes: float,
        find_unused: bool,
    ) -> None:
        names = {p: name for name, p in named.items() if p.requires_grad}
        for p in names:
            p.data = p.detach().contiguous()  # slices are of elements in row-major order
        packing = {"multiple_of": settings.group.world_size, "gradient_groups": settings.gradient_groups}
        buckets = assign(named.items(), cap_bytes, **packing)
        super().__init__(names, buckets, settings.groups, self._scatter, find_unused=find_unused)
        self.stage, self.settings = stage, [settings.of(bucket.names[0]) for bucket in buckets]
        self._nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in names]  # they live as long as held
        self._hooks += [node.register_prehook(self._before(p)) for node, p in zip(self._nodes, names, strict=True)]
        self._places: dict[nn.Parameter, tuple[int, int]] = {}
        self.shards = [self._shard(index, bucket) for index, bucket in enumerate(buckets)]
        self._arriving: dict[int, Tensor] = {}  # by bucket: where its reduction puts this rank's part
        self.is_reduced = False  # since start_over

    def _shard(self, index: int, bucket: Bucket) -> LocalShard:
        """Moves the bucket's weights into one flat tensor, of which this rank steps its part."""
        flat = bucket.empty()
        for p, view in zip(bucket.parameters, bucket.views(flat), strict=True):
            p.data, p.grad = view.copy_(p.detach()), None
            self._places[p] = _memory_of(p)
        named = zip(bucket.names, bucket.parameters, strict=True)
        return LocalShard(f"bucket{index}", flat, named, self.settings[index], is_lasting=True)

    def _before(self, p: nn.Parameter) -> Callable[[Any], None]:
        """Before autograd adds to p.grad: make that a view into its bucket. (A tensor's own hook would not do: it also
        runs in the inner passes of recomputation, which add to no .grad.)"""

        def attach(_: Any) -> None:
            if self.is_reduced and self.stage == 1:
                raise ValueError(
                    f"the gradient of {self.names[p]} has been reduced already: run all microbatches but the last "
                    "under no_sync() of the optimizer, or call zero_grad() if there is no step."
                )
            self._attach(p)

        return attach

    def _start(self) -> None:
        if self.stage == 2 and self._works:
            self._settle(len(self._works) - 1)
        super()._start()

    def _scatter(self, bucket: Bucket, flat: Tensor) -> Work:
        index = len(self._works)
        settings = self.settings[index]
        own = flat.view(settings.group.world_size, -1)[settings.group.rank]
        self._arriving[index] = own if self.stage == 1 else torch.empty_like(own)
        return settings.reduce_scatter(flat, out=self._arriving[index])

    def _settle(self, index: int) -> None:
        self._works[index].wait()
        if (average := self._arriving.pop(index, None)) is not None:  # for the first time
            self.shards[index].add_gradient(average)
            if self.stage == 2:
                self._free(index)

    def finish(self) -> None:
        if self._expected:
            super().finish()
            self.is_reduced = True
            for shard in self.shards:
                shard.clear_unused_gradients({self.names[p] for p in self.unused})
            for p in self.names:  # of stage 1: whole, but an average in this rank's part only
                if p.grad is not None:
                    p.grad = ShardedGradient.of(p.grad, self.group)

    def finish_late(self) -> None:
        """Reduces what no backward has reduced: all microbatches ran under no_sync, or none reached a parameter on this
        rank."""
        if not self.is_reduced:
            self.expect()
            self.finish()

    def give_gradients(self, index: int) -> None:
        """Gives a shard's slices their gradients, if they are not there yet; then the full ones can go."""
        if self.shards[index].waiting is not None:
            self.shards[index].give_gradients()
            self._free(index)

    def drop(self, index: int) -> None:
        """Frees all gradients of a bucket."""
        self.shards[index].drop_gradients()
        self._free(index)

    def check_in_charge(self) -> None:
        """ValueError where a step would move nothing: a later wrapper gets the gradients, or the weights have left."""
        if self.is_closed:
            raise ValueError(
                "a later wrapper reduces this module's gradients, so this optimizer gets none: make the optimizer "
                "after all wrappers, and step that one."
            )
        for p, place in self._places.items():
            if _memory_of(p) != place:
                raise ValueError(
                    f"{self.names[p]} was moved or cast after the optimizer was made, which would go on stepping its "
                    "earlier memory: move or cast the module before."
                )

    def _free(self, index: int) -> None:
        """Frees a bucket's full gradients."""
        for p in self.buckets[index].parameters:
            p.grad = None
        self._flats[index] = self._views[index] = None

    def start_over(self) -> None:
        """Frees all gradients."""
        self.is_reduced = False
        for index in range(len(self.shards)):
            self.drop(index)

    @property
    def held(self) -> list[Tensor]:
        """The gradients that this rank holds besides those of slices."""
        waiting = [shard.waiting for shard in self.shards]
        return [tensor for tensor in [*self._flats, *waiting, *self._arriving.values()] if tensor is not None]


def _memory_of(tensor: Tensor) -> tuple[int, int]:
    """Which storage holds it, and from where on: a number that a tensor without memory (a fake one) has, too."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset()
