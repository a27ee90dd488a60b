"""ZeRO stage 3: no rank keeps more than 1/N of anything; a block's weights are whole only while it computes.

    forward     rest │ block 0 │ block 1 │ … │ block L-1 │ rest        gather before, free after; `prefetch` units ahead
    backward    rest │ block L-1 │ … │ block 0 │                       gather before, free and reduce-scatter after

A *unit* is a block, or the *rest*: embedding, final norm and head, needed at both ends of the forward pass. What comes
last in forward stays for the backward pass that begins with it, so every unit is gathered twice and reduced once per
microbatch: 3P(N-1)/N bytes (Rajbhandari et al. 2020, §7.2.2), K times that when K microbatches are accumulated. With
prefetch=1 at most two units are gathered at any time (`held`), and the gradients of at most two blocks and the rest.

Every rank walks through the same units in the same order, also past a block that it does not run itself, since the
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
from minillm.parallel.data_parallel.ddp import check_same
from minillm.parallel.fsdp.flat_param import Flat, Initialize, Owned, Weight
from minillm.parallel.fsdp.param_group import Held, Unit, Walk, choose, divide, materialise_buffers, reads_weights
from minillm.parallel.fsdp.state import Make, ShardedOptimizer, load_state, shard_state, whole_state
from minillm.parallel.gradients import clip_, squared_norm
from minillm.parallel.offload import Offload


class FullyShard(nn.Module):
    """A module of which every rank keeps 1/N; forward passes through, gradients are averaged over the group.

        model = FullyShard(Transformer(config, seed=0), group)
        optimizer = model.optimizer(lambda named: adamw(named, config))
        loss.backward()                          # reduces
        norm = model.clip_grad_norm_(1.0)        # of the whole gradient, the same on every rank
        if norm.isfinite(): optimizer.step()
        optimizer.zero_grad()

    blocks: modules or their names, in the order they run; default: each of module.blocks. All that is not in one is
    the rest, whose parameters may be used before the first block and after the last, but not in between.
    prefetch: how many units are gathered ahead; each costs a unit's memory.
    master: keep the shards in float32; weights are gathered in the module's own, 16-bit, dtype.
    reduce_dtype: what gradients travel in; default: the weights' dtype.
    offload: where shards and optimizer state live, see offload.py.
    find_unused: let parameters get no gradient on some ranks (it counts as zeros) or on all (they are left alone), for
    one small all-reduce per backward; without it that is an error which names them.
    initialize: (name, shape) -> tensor, the first values of parameters on "meta"; one unit at a time is ever whole.

    `parameters()` are this rank's slices: 1-D, `whole_shape` the parameter's own. Every rank starts from rank 0's
    values. Freeze before sharding; recomputation inside blocks may be set up before or after.
    ValueError: ranks have different modules, tied weights lie in different units, a block runs twice in one pass.
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
    ):
        super().__init__()
        if prefetch < 0:
            raise ValueError(f"prefetch {prefetch} must be at least 0: that many units are gathered ahead of use.")
        self.module, self.group, self.prefetch, self.find_unused = module, group, prefetch, find_unused
        self.home, self.held = Offload(offload, group.device), Held()
        if not (everything := Owned.all_of(module)):
            raise ValueError(f"the {type(module).__name__} has no parameters: there is nothing to shard.")
        check_same([(", ".join(owned.names), owned.parameter) for owned in everything], group)
        chosen = choose(module, blocks)
        *inside, outside = divide(chosen, everything, group.device)
        with torch.no_grad():
            how = {"group": group, "offload": self.home, "master": master, "reduce_dtype": reduce_dtype}
            make = functools.partial(Flat, **how, initialize=initialize)
            self.block_units = [Unit(name, owned, self.held, make) for name, owned in zip(chosen, inside, strict=True)]
            self.rest = [Unit("rest", outside, self.held, make)] if outside else []
            materialise_buffers(module, group.device, initialize)
            for buffer in module.buffers():
                group.broadcast(buffer)
        self.units = [*self.block_units, *self.rest]
        weights = {weight.name: weight for flat in self.flats for weight in flat.weights}
        self.weights: dict[str, Weight] = {owned.names[0]: weights[owned.names[0]] for owned in everything}
        for index, flat in enumerate(self.flats):  # so that a memory census finds them
            self.register_buffer(f"gathered_{index}", flat.full, persistent=False)
        self._walk: Walk | None = None
        self._pass, self._stem_trains, self._stem_reads = 0, True, False
        self._reducing: Unit | None = None
        self._missing: list[str] = []  # names of parameters without gradient in this backward pass,
        self._fresh: list[str] = []  # and of those that had none from an earlier one
        self._watch(list(chosen.values()), {owner for owned in outside for owner, _ in owned.owners} - {module})

    # Forward: gather, compute, free.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._forget()
        self._pass += 1
        order = [*self.rest, *self.block_units, *(self.rest if self.block_units else [])]
        self._walk = Walk(order, self.prefetch, leave=Unit.free)
        self._walk.wait()
        output = self.module(*args, **kwargs)
        self._walk.to_end()
        outputs = [x for x in tree_leaves(output) if _trains(x)]
        for x in outputs:
            x.register_hook(functools.partial(self._before_backward, None, self._pass))
        if not outputs:
            self._walk.unit.free()
        self._walk = None
        return output

    def _forget(self) -> None:
        """What is left of a pass that nobody went back through, or not to its end."""
        self._settle()
        for unit in self.units:
            unit.free()
        for weight in self.weights.values():
            weight.full.grad = None
        self._missing, self._fresh = [], []

    def _watch(self, blocks: Sequence[nn.Module], owners: Iterable[nn.Module]) -> None:
        """Hooks in the module: before and after each block, and before what owns parameters of the rest."""
        for unit, block in zip(self.block_units, blocks, strict=True):
            before, after = functools.partial(self._before_block, unit), functools.partial(self._after_block, unit)
            block.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            block.register_forward_hook(after)
        for owner in owners:
            owner.register_forward_pre_hook(lambda *_: self._before_rest(), prepend=True)

    def _before_block(self, unit: Unit, block: nn.Module, args: tuple, kwargs: dict) -> None:
        self._check_running(unit)
        if self._walk.position == 0 and not self._walk.backward:
            self._look_at_stem([x for x in tree_leaves((args, kwargs)) if _trains(x)])
        self._walk.to(unit)  # in backward: a recomputation, and where it stands already

    def _look_at_stem(self, inputs: Sequence[Tensor]) -> None:
        """inputs: what the first block gets that gradients go on to, so has the rest computed with trained weights."""
        self._stem_trains = bool(inputs)
        self._stem_reads = bool(self.rest) and reads_weights(inputs)
        for x in inputs if self._stem_reads else ():
            x.register_hook(functools.partial(self._before_stem, self._pass))

    def _after_block(self, unit: Unit, block: nn.Module, args: tuple, output: Any) -> None:
        if self._walk.backward:
            return
        for x in tree_leaves(output):
            if _trains(x):
                x.register_hook(functools.partial(self._before_backward, unit, self._pass))
        if unit is self.block_units[-1]:
            self._walk.to_end()

    def _before_rest(self) -> None:
        self._check_running(self.rest[0])
        if self._walk.position > 0 and not self._walk.backward:
            self._walk.to_end()

    def _check_running(self, unit: Unit) -> None:
        if self._walk is None:
            raise ValueError(f"{unit.name} is not gathered: call the FullyShard itself, not the module in it.")

    # Backward: the same way back, with gradients left behind.

    def _before_backward(self, unit: Unit | None, number: int, gradient: Tensor) -> None:
        """Before the backward of a block (None: of what follows the last): its output's gradient is there."""
        if number != self._pass:
            raise ValueError("backward goes through an earlier forward pass than the last: run it before the next one.")
        if self._walk is None:
            trained = [bool(unit.trained) for unit in self.block_units]
            first = 0 if self._stem_trains else [*trained, True].index(True)  # a rule of every rank
            order = [*self.rest, *reversed(self.block_units[first:]), *(self.rest if self._stem_reads else [])]
            self._walk = Walk(order, self.prefetch, self._leave, backward=True)
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)
        if unit is not None:
            self._walk.to(unit)
        self._walk.wait()

    def _before_stem(self, number: int, gradient: Tensor) -> None:
        """Before the backward of what the rest computes ahead of the first block, if that reads weights."""
        if self._walk is not None and number == self._pass:
            self._walk.to_end()

    def _leave(self, unit: Unit) -> None:
        unit.free()
        if unit not in self.rest:
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        """Starts averaging the unit's gradients, once those of the unit before are in the shards."""
        self._settle()
        for flat in unit.trained:
            self._missing += flat.start_reduce()
        self._reducing = unit

    def _settle(self) -> None:
        for flat in self._reducing.trained if self._reducing else ():
            self._fresh += flat.finish_reduce()
        self._reducing = None

    @torch.no_grad()
    def _finish_backward(self) -> None:
        """At the end of every backward: the blocks it did not reach, the rest's gradients, what is still under way."""
        self._walk.to_end()
        self._leave(self._walk.unit)
        for unit in self.rest:
            self._reduce(unit)
        self._settle()
        self._walk = None
        late = [name for name, weight in self.weights.items() if weight.full.grad is not None]
        missing, fresh, self._missing, self._fresh = self._missing, self._fresh, [], []
        if late:
            raise ValueError(f"{late[0]} got a gradient after its unit was reduced: it is used outside of its block.")
        if self.find_unused:
            self._drop_unused(missing, fresh)
        elif missing:
            names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise ValueError(
                f"no gradient on rank {self.group.rank} of group {self.group.name!r} for {names}: "
                "use find_unused=True, or freeze what never takes part before sharding."
            )

    def _drop_unused(self, missing: Sequence[str], fresh: Sequence[str]) -> None:
        """Parameters that no rank used have no gradient, as in one process, rather than zeros."""
        names = [name for name, weight in self.weights.items() if weight.slice.requires_grad]
        used = torch.tensor([name not in set(missing) for name in names], dtype=torch.uint8, device=self.group.device)
        for name, anywhere in zip(names, self.group.all_reduce(used, "max").tolist(), strict=True):
            if not anywhere and name in set(fresh):
                self.weights[name].slice.grad = None

    # What torch habits expect.

    @property
    def flats(self) -> list[Flat]:
        return [flat for unit in self.units for flat in unit.flats]

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator:
        """(name, this rank's slice), by the names and in the order of the module's own parameters."""
        return ((prefix + ("." if prefix else "") + name, weight.slice) for name, weight in self.weights.items())

    def no_sync(self) -> contextlib.AbstractContextManager:
        """For loops written for DDP, and without effect: every microbatch is reduced into the shard, because the full
        gradients that could wait are what stage 3 does not hold. Results are the same, the traffic is K-fold."""
        return contextlib.nullcontext()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float | None, loss_scale: float = 1.0) -> Tensor:
        """Norm of the whole model's gradient / loss_scale, which is then scaled down to at most max_norm.

        One scalar all-reduce of the shards' squares, so the norm, and whether it is finite, is the same on every rank.
        """
        slices = [weight.slice for weight in self.weights.values()]
        square = squared_norm(slices)
        total = self.group.all_reduce(square.to(self.group.device, torch.float64)).to(square)
        if loss_scale != 1.0:
            torch._foreach_div_([slice_.grad for slice_ in slices if slice_.grad is not None], loss_scale)
        norm = total.sqrt() / loss_scale
        clip_(slices, norm, max_norm)
        return norm

    def optimizer(self, make: Make) -> ShardedOptimizer:
        """make(named) builds any optimizer of torch's that works element by element; named: this rank's trained slices
        under the names of the whole parameters."""
        return ShardedOptimizer(self, make)

    def state_dict(self, whole: bool = True) -> dict[str, Any]:
        """whole: the module's own state_dict, on the CPU of every rank, gathered unit by unit; every rank calls it.
        Otherwise what this rank holds, masters included, for `load_state_dict` on the same rank of as many.
        """
        return whole_state(self) if whole else shard_state(self)

    @torch.no_grad()
    def whole_gradients(self) -> dict[str, Tensor]:
        """name -> the averaged gradient of that parameter, whole, on the CPU of every rank; every rank calls it."""
        gradients = {name: weight.slice.grad for name, weight in self.weights.items()}
        return self.join({name: gradient for name, gradient in gradients.items() if gradient is not None})

    def join(self, parts: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Slices of something that goes with the parameters (None: others have all of it), by name -> all of it, on the
        CPU of every rank; every rank calls it with the same names."""
        whole = {name: tensor for flat in self.flats for name, tensor in flat.join(parts).items()}
        return {name: whole[name] for name in parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Either form of `state_dict`, or a plain module's; no communication."""
        load_state(self, state)

    def _apply(self, fn: Callable, recurse: bool = True) -> "FullyShard":
        raise ValueError("a sharded module stays where and what it is: move or cast it before sharding.")


def _trains(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad
