"""ZeRO stage 3: no rank keeps more than 1/N of anything; a block's weights are whole only while it computes.

    forward     rest │ block 0 │ block 1 │ … │ block L-1 │ rest        unshard before, reshard after; `prefetch` ahead
    backward    rest │ block L-1 │ … │ block 0 │                       unshard before, reshard and reduce-scatter after

A *group* is a block, or the *rest*: embedding, final norm and head, needed at both ends of the forward pass. What comes
last in forward stays for the backward pass that begins with it, so every group is gathered twice and reduced once per
microbatch: 3P(N-1)/N bytes (Rajbhandari et al. 2020, §7.2.2), K times that when K microbatches are accumulated. With
prefetch=1 at most two groups are unsharded at any time (`unshard_stats`), and there are gradients of at most two blocks
and the rest.

Every rank goes through the same groups in the same order, also past a block that it does not run itself, since the
others need its part: whatever a rank's data makes it skip, no collective is left alone.

Under a pipeline (`pipelined=True`) there is no one order of blocks to prefetch by: a microbatch's forward and its
backward lie far apart, with others' between them. The runtime says when weights are needed (`unsharded`), and gradients
stay whole until the last microbatch, as in torch's pipelining over FSDP2 (`reduce_gradients`):

                F0        F1        B0        F2        B1   ...                  after the schedule
    weights     gather    gather    gather    gather    gather                    (N-1)/N · P_part each, freed after it
    gradients                       add up in full on this rank                   one reduce-scatter, (N-1)/N · P

The runtime may also keep them (`keep=True`) until the gradients are reduced: one gather in a step, for the memory of
whole weights. The closed forms are `predict.training.sharding.pipelined_fully_shard_bytes` and `pipelined_gathered`.

Torch's own forms: FullyShardedDataParallel (Zhao et al., VLDB 2023) and `fully_shard`. Autocast would keep 16-bit
copies of all gathered weights until backward: build the module in 16 bits and use `master=True` instead.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from minillm.comm import Group
from minillm.parallel.data_parallel.replicas import (
    BufferSync,
    check_plain,
    check_same,
    no_gradient,
    remove_previous_reducers,
)
from minillm.parallel.fsdp.flat_param import ParamInfo, ShardedParam
from minillm.parallel.fsdp.param_group import ParamGroup, PrefetchOrder, UnshardStats, build_groups, reads_weights
from minillm.parallel.fsdp.state import ShardedModule
from minillm.parallel.sharding.offload import Offload
from minillm.parallel.sharding.placement import Placement
from minillm.parallel.sharding.slices import Initialize, ShardSettings


class FullyShard(ShardedModule):
    """A module of which every rank keeps 1/N; forward passes through, gradients are averaged over the group.

        model = FullyShard(Transformer(config, seed=0), group)
        optimizer = model.optimizer(lambda named: adamw(named, config))
        loss.backward()                          # reduces
        norm = optimizer.clip_grad_norm_(1.0)    # of the whole gradient, the same on every rank
        if norm.isfinite(): optimizer.step()
        optimizer.zero_grad()

    blocks: modules or their names, in the order they run; default: each of module.blocks, or of the longest
    nn.ModuleList. All that is not in one is the rest, whose parameters may be used before the first block and after the
    last, but not in between.
    prefetch: how many groups are unsharded ahead; each costs a group's memory.
    master: keep the shards in float32; weights are gathered in the module's own, 16-bit, dtype.
    reduce_dtype: what gradients travel in; default: the weights' dtype.
    offload: where shards and optimizer state live, see offload.py.
    find_unused: let parameters get no gradient on some ranks (it counts as zeros) or on all (they are left alone), for
    one small all-reduce per backward; without it that is an error which names them.
    initialize: (name, shape) -> tensor, the first values of parameters on "meta"; one group at a time is ever whole.
    replicate_group: ranks that have the same shard of other rows: their gradients are averaged too (hybrid sharding).
    placements: of the module's parameters, where they are parts of larger ones themselves (tensor parallel), and
    norm_group: all ranks that hold such parts; `group` by default. gradient_groups: see `BucketedDDP`.
    pipelined: `module` holds the parts of a pipeline with `blocks`; it is never called itself, see above.

    `parameters()` are this rank's slices: 1-D, `whole_shape` the parameter's own. Every rank starts from rank 0's
    values. Freeze before sharding; recomputation inside blocks may be set up before or after.
    ValueError: ranks have different modules, tied weights lie in different groups, a block runs twice in one pass.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        blocks: Sequence[str | nn.Module] | None = None,
        *,
        prefetch: int = 1,
        offload: str | Path | None = None,
        master: bool = False,
        reduce_dtype: torch.dtype | None = None,
        find_unused: bool = False,
        initialize: Initialize | None = None,
        replicate_group: Group | None = None,
        placements: Mapping[str, Placement] | None = None,
        norm_group: Group | None = None,
        gradient_groups: Mapping[str, Group] | None = None,
        pipelined: bool = False,
    ) -> None:
        super().__init__()
        if prefetch < 0:
            raise ValueError(f"prefetch {prefetch} must be at least 0: that many groups are unsharded ahead of use.")
        self.module, self.group, self.prefetch, self.find_unused = module, group, prefetch, find_unused
        self.home, self.unshard_stats, self.pipelined = Offload(offload, group.device), UnshardStats(), pipelined
        self.settings = settings = ShardSettings(
            group=group,
            replicate_group=replicate_group,
            norm_group=norm_group or group,
            placements=placements or {},
            master=master,
            home=self.home,
            gradient_groups=gradient_groups or {},
            reduce_dtype=reduce_dtype,
            initialize=initialize,
        )
        self.norm_group = settings.norm_group
        if not (everything := ParamInfo.all_of(module)):
            raise ValueError(f"the {type(module).__name__} has no parameters: there is nothing to shard.")
        check_plain(module)
        remove_previous_reducers({info.parameter: info.names[0] for info in everything})
        for each in settings.groups:
            check_same([(", ".join(info.names), info.parameter) for info in everything], each)
        built = build_groups(module, blocks, everything, self.unshard_stats, settings)
        chosen, self.block_groups, self.rest = built
        for each in settings.groups:
            BufferSync(module, each)
        self.groups = [*self.block_groups, *self.rest]
        found = {param.name: param for flat in self.flats for param in flat.params}
        self.params: dict[str, ShardedParam] = {info.names[0]: found[info.names[0]] for info in everything}
        for index, flat in enumerate(self.flats):  # so that a memory tracker finds them
            self.register_buffer(f"unsharded_{index}", flat.full, persistent=False)
        self._order: PrefetchOrder | None = None
        self._pass, self._stem_trains, self._stem_reads = 0, True, False
        self._reducing: ParamGroup | None = None
        self._missing: list[str] = []  # names of parameters without gradient in this backward pass
        outside = (owner for group in self.rest for owner in group.owners if owner is not module)
        if not pipelined:
            self._add_hooks(chosen, dict.fromkeys(outside))

    # Forward: unshard, compute, reshard.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.pipelined:
            raise ValueError("a pipeline's parts run by `Pipeline`: call its step, not the FullyShard around them.")
        self._forget()
        self._pass += 1
        order = [*self.rest, *self.block_groups, *(self.rest if self.block_groups else [])]
        self._order = PrefetchOrder(order, self.prefetch, leave=ParamGroup.reshard)
        self._order.wait()
        output = self.module(*args, **kwargs)
        self._order.to_end()
        outputs = [x for x in tree_leaves(output) if _trains(x)]
        for x in outputs:
            x.register_hook(functools.partial(self._before_backward, None, self._pass))
        if not outputs:
            self._order.group.reshard()
        self._order = None
        return output

    def _forget(self) -> None:
        """What is left of a pass that nobody went back through, or not to its end."""
        self._settle()
        for group in self.groups:
            group.reshard()
        for param in self.params.values():
            param.full.grad = None
        self._missing = []

    def _add_hooks(self, blocks: Sequence[nn.Module], owners: Iterable[nn.Module]) -> None:
        """Hooks in the module: before and after each block, and before what owns parameters of the rest."""
        for group, block in zip(self.block_groups, blocks, strict=True):
            before, after = functools.partial(self._before_block, group), functools.partial(self._after_block, group)
            block.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            block.register_forward_hook(after)
        for owner in owners:
            owner.register_forward_pre_hook(lambda *_: self._before_rest(), prepend=True)

    def _before_block(self, group: ParamGroup, block: nn.Module, args: tuple, kwargs: dict) -> None:
        self._check_running(group)
        if self._order.position == 0 and not self._order.backward:
            self._look_at_stem([x for x in tree_leaves((args, kwargs)) if _trains(x)])
        self._order.to(group)  # in backward: a recomputation, and where it stands already

    def _look_at_stem(self, inputs: Sequence[Tensor]) -> None:
        """inputs: what the first block gets that gradients go on to, so has the rest computed with trained weights."""
        self._stem_trains = bool(inputs)
        self._stem_reads = bool(self.rest) and reads_weights(inputs)
        for x in inputs if self._stem_reads else ():
            x.register_hook(functools.partial(self._before_stem, self._pass))

    def _after_block(self, group: ParamGroup, block: nn.Module, args: tuple, output: Any) -> None:
        if self._order.backward:
            return
        for x in tree_leaves(output):
            if _trains(x):
                x.register_hook(functools.partial(self._before_backward, group, self._pass))
        if group is self.block_groups[-1]:
            self._order.to_end()

    def _before_rest(self) -> None:
        self._check_running(self.rest[0])
        if self._order.position > 0 and not self._order.backward:
            self._order.to_end()

    def _check_running(self, group: ParamGroup) -> None:
        if self._order is None:
            raise ValueError(f"{group.name} is sharded: call the FullyShard itself, not the module in it.")

    # Backward: the same way back, with gradients left behind.

    def _before_backward(self, group: ParamGroup | None, number: int, gradient: Tensor) -> None:
        """Before the backward of a block (None: of what follows the last): its output's gradient is there."""
        if number != self._pass:
            raise ValueError("backward goes through an earlier forward pass than the last: run it before the next one.")
        if self._order is None:
            trained = [bool(group.trained) for group in self.block_groups]
            first = 0 if self._stem_trains else [*trained, True].index(True)  # a rule of every rank
            order = [*self.rest, *reversed(self.block_groups[first:]), *(self.rest if self._stem_reads else [])]
            self._order = PrefetchOrder(order, self.prefetch, self._leave, backward=True)
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)
        if group is not None:
            self._order.to(group)
        self._order.wait()

    def _before_stem(self, number: int, gradient: Tensor) -> None:
        """Before the backward of what the rest computes ahead of the first block, if that reads weights."""
        if self._order is not None and number == self._pass:
            self._order.to_end()

    def _leave(self, group: ParamGroup) -> None:
        group.reshard()
        if group not in self.rest:
            self._reduce(group)

    def _reduce(self, group: ParamGroup) -> None:
        """Starts averaging the group's gradients, once those of the group before are in the shards."""
        self._settle()
        for flat in group.trained:
            self._missing += flat.start_reduce()
        self._reducing = group

    def _settle(self) -> None:
        for flat in self._reducing.trained if self._reducing else ():
            flat.finish_reduce()
        self._reducing = None

    @torch.no_grad()
    def _finish_backward(self) -> None:
        """At the end of every backward: the blocks it did not reach, the rest's gradients, what is still under way."""
        self._order.to_end()
        self._leave(self._order.group)
        for group in self.rest:
            self._reduce(group)
        self._settle()
        self._order = None
        late = [name for name, param in self.params.items() if param.full.grad is not None]
        missing, self._missing = self._missing, []
        if late:
            raise ValueError(f"{late[0]} got a gradient after its group was reduced: it is used outside of its block.")
        if self.find_unused:
            self._clear_unused_gradients(set(missing))
        elif missing:
            raise ValueError(no_gradient(missing, self.group.rank, self.group))

    def _clear_unused_gradients(self, missing: set[str]) -> None:
        """Sets .grad to None for parameters that received no gradient on any rank. missing: those without one here."""
        names = [name for name, param in self.params.items() if param.slice.requires_grad]
        used = torch.tensor([name not in missing for name in names], dtype=torch.uint8, device=self.group.device)
        for group in self.settings.groups:
            group.all_reduce(used, "max")
        unused = {name for name, anywhere in zip(names, used.tolist(), strict=True) if not anywhere}
        for flat in self.flats:
            if flat.is_trained:
                flat.shard.clear_unused_gradients(unused)

    # Under a pipeline, whose runtime calls these.

    @contextlib.contextmanager
    def unsharded(self, groups: Sequence[ParamGroup], keep: bool = False) -> Iterator[None]:
        """Inside, the modules of these groups have their whole weights; with `keep` until `reduce_gradients`."""
        for group in groups:
            group.unshard()
        for group in groups:
            group.wait()
        try:
            yield
        finally:
            for group in () if keep else groups:
                group.reshard()

    def groups_of(self, part: nn.Module) -> list[ParamGroup]:
        """The groups that hold parameters of a part, in the order of `groups`, which is the same on all ranks."""
        held = {id(parameter) for parameter in part.parameters()}
        return [
            group
            for group in self.groups
            if any(id(kind) in held for flat in group.flats for p in flat.params for kind in (p.full, p.placeholder))
        ]

    def reduce_gradients(self) -> None:
        """Averages what has added up, into the slices' .grad; a parameter without gradient counts as zero. Frees kept
        weights."""
        for group in self.groups:
            group.reshard()
            self._reduce(group)
        self._settle()
        self._missing = []


def _trains(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad
