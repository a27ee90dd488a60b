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

Torch's own forms: FullyShardedDataParallel (Zhao et al., VLDB 2023) and `fully_shard`. Autocast would keep 16-bit
copies of all gathered weights until backward: build the module in 16 bits and use `master=True` instead.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from minillm.comm import Group
from minillm.parallel.data_parallel.ddp import BufferSync, check_plain, check_same
from minillm.parallel.data_parallel.reducer import no_gradient, take_over
from minillm.parallel.fsdp.flat_param import FlatParam, How, Initialize, ParamInfo, ShardedParam
from minillm.parallel.fsdp.param_group import ParamGroup, PrefetchOrder, UnshardStats, build_groups, reads_weights
from minillm.parallel.fsdp.state import FullyShardOptimizer, full_state, load_state, sharded_state
from minillm.parallel.offload import Offload
from minillm.parallel.optimizer_state import MakeOptimizer, plain
from minillm.parallel.placement import Placement, gather, global_norm, scale_


class FullyShard(nn.Module):
    """A module of which every rank keeps 1/N; forward passes through, gradients are averaged over the group.

        model = FullyShard(Transformer(config, seed=0), group)
        optimizer = model.optimizer(lambda named: adamw(named, config))
        loss.backward()                          # reduces
        norm = model.clip_grad_norm_(1.0)        # of the whole gradient, the same on every rank
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
    norm_group: all ranks that hold such parts; `group` by default.

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
    ) -> None:
        super().__init__()
        if prefetch < 0:
            raise ValueError(f"prefetch {prefetch} must be at least 0: that many groups are unsharded ahead of use.")
        self.module, self.group, self.prefetch, self.find_unused = module, group, prefetch, find_unused
        self.norm_group = norm_group or group
        self.home, self.unshard_stats = Offload(offload, group.device), UnshardStats()
        if not (everything := ParamInfo.all_of(module)):
            raise ValueError(f"the {type(module).__name__} has no parameters: there is nothing to shard.")
        check_plain(module)
        take_over({info.parameter: info.names[0] for info in everything})
        for each in (replicate_group, group) if replicate_group else (group,):
            check_same([(", ".join(info.names), info.parameter) for info in everything], each)
        settings = (self.home, master, reduce_dtype, initialize, placements or {})
        how = How(group, replicate_group, self.norm_group, *settings)
        chosen, self.block_groups, self.rest = build_groups(module, blocks, everything, self.unshard_stats, how)
        BufferSync(module, group)
        self.groups = [*self.block_groups, *self.rest]
        found = {param.name: param for flat in self.flats for param in flat.params}
        self.params: dict[str, ShardedParam] = {info.names[0]: found[info.names[0]] for info in everything}
        for index, flat in enumerate(self.flats):  # so that a memory tracker finds them
            self.register_buffer(f"unsharded_{index}", flat.full, persistent=False)
        self._order: PrefetchOrder | None = None
        self._pass, self._stem_trains, self._stem_reads = 0, True, False
        self._reducing: ParamGroup | None = None
        self._missing: list[str] = []  # names of parameters without gradient in this backward pass,
        self._fresh: list[str] = []  # and of those that had none from an earlier one
        outside = (owner for group in self.rest for owner in group.owners if owner is not module)
        self._watch(chosen, dict.fromkeys(outside))

    # Forward: unshard, compute, reshard.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
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
        self._missing, self._fresh = [], []

    def _watch(self, blocks: Sequence[nn.Module], owners: Iterable[nn.Module]) -> None:
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
            self._fresh += flat.finish_reduce()
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
        missing, fresh, self._missing, self._fresh = self._missing, self._fresh, [], []
        if late:
            raise ValueError(f"{late[0]} got a gradient after its group was reduced: it is used outside of its block.")
        if self.find_unused:
            self._drop_unused(missing, fresh)
        elif missing:
            raise ValueError(no_gradient(missing, self.group.rank, self.group))

    def _drop_unused(self, missing: Sequence[str], fresh: Sequence[str]) -> None:
        """Parameters that no rank used have no gradient, as in one process, rather than zeros."""
        names = [name for name, param in self.params.items() if param.slice.requires_grad]
        used = torch.tensor([name not in set(missing) for name in names], dtype=torch.uint8, device=self.group.device)
        for name, anywhere in zip(names, self.group.all_reduce(used, "max").tolist(), strict=True):
            if not anywhere and name in set(fresh):
                self.params[name].slice.grad = None

    # What torch habits expect.

    @property
    def flats(self) -> list[FlatParam]:
        return [flat for group in self.groups for flat in group.flats]

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator:
        """(name, this rank's slice), by the names and in the order of the module's own parameters."""
        return ((prefix + ("." if prefix else "") + name, param.slice) for name, param in self.params.items())

    def no_sync(self) -> contextlib.AbstractContextManager:
        """For loops written for DDP, and without effect: every microbatch is reduced into the shard, because the full
        gradients that could wait are what stage 3 does not hold. Results are the same, the traffic is K-fold."""
        return contextlib.nullcontext()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float | None, loss_scale: float = 1.0, norm_type: float = 2.0) -> Tensor:
        """Norm of the whole model's gradient / loss_scale, which is then scaled down to at most max_norm.

        One scalar all-reduce, so the norm, and whether it is finite, is the same on every rank.
        """
        gradients = self._gradients()
        norm = global_norm(gradients, self.placements, self.norm_group, norm_type) / loss_scale
        clip = torch.ones_like(norm) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
        if max_norm is not None or loss_scale != 1.0:
            scale_(gradients.values(), clip / loss_scale)
        return norm

    def optimizer(self, make: MakeOptimizer) -> FullyShardOptimizer:
        """make(named) builds any optimizer of torch's that works element by element; named: this rank's trained slices
        under the names of the whole parameters."""
        return FullyShardOptimizer(self, make)

    def _gradients(self) -> dict[str, Tensor]:
        return {name: plain(param.slice.grad) for name, param in self.params.items() if param.slice.grad is not None}

    @property
    def placements(self) -> dict[str, Placement]:
        """Of the slices, by name."""
        return {name: param.placement for name, param in self.params.items()}

    def full_state_dict(self) -> dict[str, Tensor]:
        """The module's own state_dict, on the CPU of every rank, gathered group by group; every rank calls it."""
        return full_state(self)

    def state_dict(self) -> dict[str, Tensor]:
        """`full_state_dict`, as torch habits expect; every rank calls it."""
        return self.full_state_dict()

    def sharded_state_dict(self) -> dict[str, Any]:
        """What this rank holds, masters included, for `load_state_dict` on the same rank of as many."""
        return sharded_state(self)

    def full_gradients(self) -> dict[str, Tensor]:
        """name -> the averaged gradient of that parameter, whole, on the CPU of every rank; every rank calls it."""
        gradients, found = self._gradients(), {}
        for flat in self.flats:
            own = {param.name: gradients[param.name] for param in flat.params if param.name in gradients}
            found |= gather(own, self.placements, self.norm_group)
        return {name: found[name] for name in self.params if name in found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Either form of state, or a plain module's; no communication."""
        load_state(self, state)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError("a FullyShard belongs to this process's group: copy or save its full_state_dict() instead.")

    def _apply(self, fn: Callable, recurse: bool = True) -> "FullyShard":
        raise ValueError("a sharded module stays where and what it is: move or cast it before sharding.")


def _trains(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad
