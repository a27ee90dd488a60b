"""What one rank has of a flat tensor of whole parameters, and steps: the shard of ZeRO and of FSDP.

flat      [ q_proj | k_proj | v_proj | …    | pad ]    whole parameters of one dtype, padded to N equal parts
own                   [ part r      ]                  this rank's
weights               [ part r      ]                  what the optimizer steps: `own`, or a copy of it that is
slices                [ k  | v      ]                  wider (float32 masters) or elsewhere (offloaded)
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.comm.operation import Work
from minillm.parallel.sharding.offload import Offload
from minillm.parallel.sharding.placement import FlatShard, Placement
from minillm.parallel.sharding.sharded_gradient import ShardedGradient, plain

Initialize = Callable[[str, tuple[int, ...]], Tensor]  # (name, shape) -> the initial value of that parameter


@dataclass(frozen=True)
class ShardSettings:
    """How a module is sharded, and over which ranks.

    group: ranks that share its parameters; replicate_group: ranks that have the same shard of other rows (hybrid
    sharding); norm_group: all ranks that hold parts of the model.
    placements: of parameters that are parts of larger ones themselves (tensor parallel).
    master, home: see `ZeroOptimizer`. gradient_groups: see `BucketedDDP`. reduce_dtype, initialize: see `FullyShard`.
    share: what averages over `group` are multiplied by, see `of`.
    """

    group: Group
    replicate_group: Group | None
    norm_group: Group
    placements: Mapping[str, Placement]
    master: bool
    home: Offload
    gradient_groups: Mapping[str, Group] = field(default_factory=dict)
    reduce_dtype: torch.dtype | None = None
    initialize: Initialize | None = None
    share: float = 1.0

    def of(self, name: str) -> "ShardSettings":
        """The settings of one parameter, sharded over the ranks of `group` that have it in common. Its gradient is
        averaged over all of `group` even so, whose tokens they have seen, and over `replicate_group`."""
        if name not in self.gradient_groups:
            return self
        own = self.gradient_groups[name]
        return replace(self, group=own, gradient_groups={}, share=own.world_size / self.group.world_size)

    @property
    def groups(self) -> list[Group]:
        """The groups to average over in turn: their ranks have different rows, so together this is one average over all
        rows."""
        return [self.replicate_group, self.group] if self.replicate_group else [self.group]

    def placement_of(self, name: str, parameter: Tensor) -> Placement:
        """Placement of the whole parameter."""
        return self.placements.get(name, Placement(parameter.shape))

    def reduce_scatter(self, flat: Tensor, out: Tensor | None = None) -> Work:
        """flat: [N * n] on each rank. Starts averaging it; the result is this rank's part, [n].

        With replicas a second operation waits for the first: both hide behind backward, and those of each group come
        in the order in which every rank launches them.
        """
        if self.share != 1.0:
            flat.mul_(self.share)
        first = self.group.reduce_scatter(flat, "avg", async_op=True, out=out)
        if self.replicate_group is None:
            return first

        def second() -> Tensor:
            return self.replicate_group.all_reduce(first.wait(), "avg")

        own = flat[: flat.numel() // self.group.world_size]
        averaged = self.replicate_group.run("all_reduce", own, second, async_op=True, how="op=avg")

        def wait() -> Tensor:
            result = averaged.wait()
            first.wait()  # on the stream that launched it, which lets go of `flat`
            return result

        return Work(wait, averaged.done)


class LocalShard:
    """flat: [N * n]; own, weights: [n]. slices: by name, 1-D, maybe empty, views of `weights`; placements: theirs.

    named: the parameters in `flat`, one after the other. key: a name for the shard that no other has on this rank.
    is_lasting: whether `flat` stays, as in ZeRO. Then `weights` is a copy only if it has to be; the gradient of a copy
    stays on the device and in the flat tensor's dtype until `give_gradients`. Otherwise both happen at once.
    """

    def __init__(
        self, key: str, flat: Tensor, named: Iterable[tuple[str, Tensor]], settings: ShardSettings, is_lasting: bool
    ) -> None:
        self.flat, self.home = flat, settings.home
        self.norm_group, self.group = settings.norm_group, settings.group
        size = flat.numel() // self.group.world_size
        low = size * self.group.rank
        self.own = flat[low : low + size]
        dtype = torch.promote_types(flat.dtype, torch.float32) if settings.master else flat.dtype
        is_elsewhere = dtype != flat.dtype or self.home.active
        self.is_copied, self.is_deferred = is_elsewhere or not is_lasting, is_elsewhere and is_lasting
        self.weights = self.home.place(key, self.own, dtype) if self.is_copied else self.own
        self.placements: dict[str, Placement] = {}
        self._sizes, begin, named = [], 0, list(named)
        for name, parameter in named:
            end = begin + parameter.numel()
            part = FlatShard.of_range(begin, end, low, low + size)
            self.placements[name] = settings.placement_of(name, parameter).within(part)
            self._sizes.append(part.stop - part.start)
            begin = end
        views = zip(named, self.split(self.weights), strict=True)
        self.slices = {name: slice_of(parameter, view) for (name, parameter), view in views}
        self.waiting: Tensor | None = None  # a gradient that `give_gradients` will give
        self._fresh: set[str] = set()  # without gradient before the last reduction

    def split(self, part: Tensor) -> list[Tensor]:
        """part: [n] -> its pieces by parameter; padding comes last."""
        return list(part[: sum(self._sizes)].split(self._sizes))

    def add_gradient(self, average: Tensor) -> None:
        """Adds average: [n], the result of a reduction, to those of earlier ones."""
        if not self.is_deferred:
            self._add(average)
        elif self.waiting is None:
            self.waiting, self._fresh = average, set(self.slices)
        else:
            self.waiting += average

    def clear_unused_gradients(self, unused: set[str]) -> None:
        """Sets .grad to None for parameters that received no gradient on any rank, as in one process. Call it after
        `add_gradient`. unused: the names of these parameters in the last reduction."""
        self._fresh &= unused
        if self.waiting is None:
            for name in self._fresh:
                self.slices[name].grad = None

    def give_gradients(self) -> None:
        """Hands the gradients that were kept to the slices."""
        if self.waiting is not None:
            unused, average, self.waiting = self._fresh, self.waiting, None
            self._add(average)
            self.clear_unused_gradients(unused)

    def _add(self, average: Tensor) -> None:
        """Adds it to the slices' .grad, where the weights are and in their dtype."""
        parts = self.split(self.home.down(average).to(self.weights.dtype))
        earlier = []
        self._fresh = {name for name, slice_ in self.slices.items() if slice_.grad is None}
        for (name, slice_), part in zip(self.slices.items(), parts, strict=True):
            if name in self._fresh:
                slice_.grad = ShardedGradient.of(part, self.norm_group)
            else:
                earlier.append((plain(slice_.grad), part))
        if earlier:
            torch._foreach_add_([gradient for gradient, _ in earlier], [part for _, part in earlier])

    def drop_gradients(self) -> None:
        self.waiting = None
        for slice_ in self.slices.values():
            slice_.grad = None

    def write_weights(self) -> None:
        """Copies the stepped weights into this rank's part of `flat`."""
        if self.is_copied:
            self.home.up(self.weights, self.own)


def slice_of(parameter: Tensor, part: Tensor) -> nn.Parameter:
    """part: [n] of the parameter's elements, as a parameter that knows the whole one (`whole_shape`)."""
    slice_ = nn.Parameter(part, requires_grad=parameter.requires_grad)
    slice_.whole_shape, slice_.is_master = parameter.shape, part.dtype != parameter.dtype
    return slice_
