"""Every layout of several ranks: data parallel with any ZeRO stage, or HSDP, times tensor, pipeline, context and expert
parallel.

    Mesh(dp, pp, cp, tp)  a rank holds      parts of the layers           (pp, parallel/pipeline_parallel)
                                            of each layer a slice         (tp, parallel/tensor_parallel)
                                            of each sequence a part       (cp, parallel/context_parallel)
                          and shares with   dp ranks the rows of the batch,
                                            dp * cp ranks its weights' gradients and ZeRO's shards   (`replicas`)

Which ranks these are, also with HSDP and with experts: groups.py.

A gradient is complete after three sums in any order: over dp * cp, whose ranks have the same weights and other tokens
(BucketedDDP, ZeroOptimizer or FullyShard), over pp for what several stages hold (`Pipeline.finish`), over tp for what
is `Partial`. So an axis that splits tokens joins `replicas`, one that splits the model joins the placements. A pipeline
adds up all of its microbatches' gradients in full before the sum over dp, whatever the ZeRO stage, as torch's does:
stage 2 and 3 then save no gradient memory during the schedule. One placement for each parameter says what this rank
holds of it; norms, checkpoints and gathered gradients follow from the placements.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minillm.adapters.attach import adapted_shapes
from minillm.adapters.dropout import numbered
from minillm.adapters.parallel import part_of_adapted
from minillm.adapters.start import Start
from minillm.comm import Group
from minillm.model import ModelConfig, Transformer
from minillm.model.distillation import Goals
from minillm.model.loss import weights_of_sequences
from minillm.model.moe import RouterLosses
from minillm.parallel.context_parallel import context_attention, context_parallel
from minillm.parallel.data_parallel.ddp import BucketedDDP
from minillm.parallel.expert_parallel.split import expert_parallel, expert_part_of, is_expert
from minillm.parallel.fsdp.fully_shard import FullyShard
from minillm.parallel.pipeline_parallel.held_parts import HeldParts
from minillm.parallel.pipeline_parallel.runtime import Pipeline
from minillm.parallel.pipeline_parallel.stages import build_parts
from minillm.parallel.sharding.optimizer import MakeOptimizer, SlicedOptimizer
from minillm.parallel.sharding.placement import Placement, Replicate, global_norm, sum_partial
from minillm.parallel.tensor_parallel.parallelize import tensor_parallel
from minillm.parallel.zero.optimizer import ZeroOptimizer
from minillm.train.optimizer import Updater
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.groups import LayoutGroups
from minillm.train.strategies.single_device import FROM_SEED, Around, Microbatch, SingleDevice, quietly, unscaled


class Hybrid(SingleDevice):
    """The strategy of a layout; one of dp alone lies over any group, others over all ranks of the world.

    offload: where ZeRO's shards live, see `Offload`. wrap_with: the form of DDP for replicas without ZeRO.
    group: all ranks; rank, world_size, stride: of those along dp; groups: all others, see `LayoutGroups`.
    """

    def __init__(
        self,
        group: Group,
        layout: ParallelConfig,
        *,
        offload: str | Path | None = None,
        wrap_with: Callable[..., nn.Module] = BucketedDDP,
    ) -> None:
        self.group, self.layout, self.offload, self.wrap_with = group, layout, offload, wrap_with
        self.groups = groups = LayoutGroups(group, layout)
        self.rank, self.world_size, self.stride = groups.rank, layout.dp, groups.stride
        self.context = context_attention(layout.context, *groups.context) if groups.context else None
        self.sends_inside_blocks = bool(groups.tp or groups.experts or groups.context)
        self._documents = self._router_losses = self._goals = self._keys = ()  # of a pipeline's microbatches

    def close(self) -> None:
        self.groups.close()

    @property
    def averaged_over(self) -> int:
        return self.groups.replicas.world_size

    @property
    def is_root(self) -> bool:
        return self.group.rank == 0

    def build(
        self, config: ModelConfig, *, seed: int, start: Start = FROM_SEED, device: Any = None, **how: Any
    ) -> nn.Module:
        """With stage 3 the model is built on "meta": no rank ever holds all of its part."""
        if self.groups.is_split:
            self.layout.check(config)
        self.config, self.lora, how = config, start.lora, {**how, "seed": None, "device": "meta"}
        order = self.layout.order
        parts = build_parts(config, order, self.groups.pp.rank, **how) if order else [Transformer(config, **how)]
        for part in parts:
            start.read_base(part)
            if self.groups.tp:
                tensor_parallel(part, config, self.groups.tp, sequence=self.layout.sequence)
            if self.groups.experts:
                expert_parallel(part, config, self.groups.experts, **self.groups.expert_levels)
            if self.context:
                context_parallel(part, self.context)
            start.add_adapters(part, self.groups.tp)
            start.fill(part, seed, device or self.group.device, self.layout.zero == 3, self.groups.tp)
        self.initialize = functools.partial(parts[0].draw, config, seed=seed)
        return HeldParts(parts) if order else parts[0]

    def wrap(self, model: nn.Module, master: bool = False) -> nn.Module:
        self.model, self.module = model, model
        names = [name for name, _ in itertools.chain(model.named_parameters(), model.named_buffers())]
        stages = self.groups.pp.gather_objects(names) if self.groups.pp else [names]
        stage = self.groups.pp.rank if self.groups.pp else 0
        self._earlier = {name: sum(name in theirs for theirs in stages[:stage]) for name in names}
        self._shared = {name for name in names if sum(name in theirs for theirs in stages) > 1}
        self.placements = self._place(name for name, _ in model.named_parameters())
        if self.layout.zero == 3:
            self.module = FullyShard(
                model,
                self.groups.shard,
                offload=self.offload,
                master=master,
                initialize=self.initialize,
                replicate_group=self.groups.replicate,
                placements=self.placements,
                norm_group=self.group,
                gradient_groups=self._gradient_groups,
                pipelined=bool(self.layout.order),
            )
        elif self.layout.zero == 0 and self.averaged_over > 1:  # buckets are whole gradients that one rank has anyway
            wrap, groups = self.wrap_with, self._gradient_groups
            wrap = functools.partial(wrap, gradient_groups=groups) if groups else wrap  # which some forms do not have
            self.module = wrap(model, self.groups.replicas)
        if self.layout.order:
            sharded = self.module if self.layout.zero == 3 else None
            with sharded.unsharded(sharded.groups) if sharded else contextlib.nullcontext():
                around = functools.partial(self._around, sharded)
                model.pipeline = Pipeline(model.parts, self.layout.order, self.groups.pp, around=around)
        return model if self.layout.order else self.module

    def _place(self, names: Iterable[str]) -> dict[str, Placement]:
        """Of this rank's parameters, before ZeRO shards them. Of ranks with the same numbers, copy 0 counts them."""
        tp, experts, shapes = self.groups.tp, self.groups.experts, adapted_shapes(self.config, self.lora)
        replica = Replicate(copy=self.groups.replicate.rank if self.groups.replicate else 0)
        found = {}
        for name in names:
            how = (self.config, name, tp.rank, tp.world_size, self.layout.sequence) if tp else ()
            part = part_of_adapted(*how) if tp else Replicate()
            stage = Replicate(copy=self._earlier[name])
            expert = (expert_part_of(name, experts.rank, experts.world_size),) if experts else ()
            found[name] = Placement(shapes[name], (*expert, part, stage, replica))
        return found

    @property
    def _gradient_groups(self) -> dict[str, Group]:
        """Parameters in buckets of their own, by the ranks that average them: experts, which fewer ranks hold than all
        that average gradients; and parameters that several stages hold. The order of a ring's sums depends on an
        element's offset in its bucket: with buckets of their own, all these stages compute the same bits."""
        names = [name for name, _ in self.model.named_parameters()]
        found = {name: self.groups.shard for name in names if name in self._shared}
        return found | {name: self.groups.expert_replicas for name in names if self.groups.experts and is_expert(name)}

    @contextlib.contextmanager
    def _around(self, sharded: FullyShard | None, action: Any) -> Iterator[None]:
        """Around an action of the pipeline: its part's weights, but for weight gradients, which do not read them, and
        the documents, the teacher's goals, keys and router losses of its microbatch."""
        part = self.model.parts[action.chunk]
        groups = sharded.groups_of(part) if sharded and action.kind != "W" else []
        attention, documents = part.attention, self._documents[action.microbatch] if self._documents else None
        if documents is not None:
            part.attention = functools.partial(attention, segments=documents)
        part.goals = self._goals[action.microbatch] if self._goals else None
        part.router_losses = self._router_losses[action.microbatch] if self._router_losses else None
        keep = not self.layout.reshard and torch.is_grad_enabled()  # in training; a step changes them afterwards
        gathered = sharded.unsharded(groups, keep) if sharded else contextlib.nullcontext()
        try:
            with gathered, numbered(part, self._keys[action.microbatch] if self._keys else None):
                yield
        finally:
            part.attention = attention

    def updater(self, module: nn.Module, make: MakeOptimizer, master: bool = False) -> Updater | SlicedOptimizer:
        if self.layout.zero == 0:
            return super().updater(module, make, master)
        if self.layout.zero == 3:
            self.stepped = self.module.optimizer(make)
        else:
            self.stepped = ZeroOptimizer(
                self.model,
                self.groups.shard,
                self.layout.zero,
                make=make,
                offload=self.offload,
                master=master,
                replicate_group=self.groups.replicate,
                placements=self.placements,
                norm_group=self.group,
                gradient_groups=self._gradient_groups,
            )
        return self.stepped

    def positions(self, seq_len: int) -> Tensor | None:
        return self.context.positions(self.layout.padded(seq_len)) if self.context else None

    def forward_backward(
        self,
        module: nn.Module,
        microbatches: Sequence[Microbatch | tuple],
        loss_divisor: Tensor,
        around: Around = quietly,
        scale: Callable[[Tensor], Tensor] = unscaled,
    ) -> Tensor:
        if not self.layout.order:
            return super().forward_backward(module, microbatches, loss_divisor, around, scale)
        tokens, targets, weights, documents, goals, keys = zip(*(Microbatch(*m) for m in microbatches), strict=True)
        self._documents = torch.cat(documents).tensor_split(self.layout.accumulate) if None not in documents else ()
        self._goals = Goals.cut([each() for each in goals], self.layout.accumulate) if None not in goals else ()
        self._keys = torch.cat(keys).tensor_split(self.layout.accumulate) if None not in keys else ()
        whole = torch.cat(tokens), torch.cat(targets), None if weights[0] is None else torch.cat(weights)
        self._router_losses = self._losses_of(whole[1], whole[2], lambda nll: scale(nll / loss_divisor))
        step = functools.partial(self.model.pipeline.step, scale=scale)
        with self._holding_back(), around("pipeline"):
            total = self.model.run(step, whole, lambda nll: nll / loss_divisor)
        self._documents = self._router_losses = self._goals = self._keys = ()
        self.finish_backward()
        return total * loss_divisor

    def _losses_of(self, targets: Tensor, weights: Tensor | None, loss: Callable) -> Sequence[RouterLosses]:
        """Of every microbatch, for the stages: their factor is what the last stage gives Σ weight · nll."""
        if not self.config.moe:
            return ()
        dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)  # of the loss
        one = torch.ones((), dtype=dtype, device=targets.device, requires_grad=True)
        (factor,) = torch.autograd.grad(loss(one), one)
        sums = weights_of_sequences(targets, weights, dtype)
        found = [self.model.parts[0].router_losses_of(each) for each in sums.tensor_split(self.layout.accumulate)]
        for losses in found:
            losses.factor = factor
        return found

    @contextlib.contextmanager
    def within(self, documents: Tensor | None) -> Iterator[None]:
        if not self.layout.order or documents is None:
            with super().within(documents):
                yield
            return
        self._documents = documents.tensor_split(self.layout.accumulate)
        try:
            yield
        finally:
            self._documents = ()

    def _holding_back(self) -> contextlib.AbstractContextManager[None]:
        """While a pipeline runs, gradients add up on this rank and nothing is reduced over replicas."""
        reducer = getattr(self.stepped if self.layout.zero in (1, 2) else self.module, "reducer", None)
        return reducer.syncing(False) if reducer else contextlib.nullcontext()

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager:
        if last or (self.layout.zero == 0 and self.module is self.model):
            return contextlib.nullcontext()
        return self.stepped.no_sync() if self.layout.zero in (1, 2) else self.module.no_sync()

    def finish_backward(self) -> None:
        if is_pipeline := self.layout.order is not None:
            self.model.pipeline.finish()
        if self.layout.zero == 3 and is_pipeline:  # stages 1 and 2 reduce when gradients are prepared
            self.module.reduce_gradients()
        elif self.layout.zero == 0 and self.module is not self.model:
            if is_pipeline:
                self.module.reducer.expect()
            self.module.finish()

    def prepare_gradients(self) -> None:
        self.stepped.prepare_gradients()
        if self.groups.tp:
            sum_partial(self.stepped.gradients_by_name(), self.stepped.placements, self.groups.tp)

    def grad_norm(self, parameters: Iterable[Tensor]) -> Tensor:
        if self.layout.zero == 0 and not self.groups.is_split:
            return super().grad_norm(parameters)  # every rank has all of it
        return global_norm(self.stepped.gradients_by_name(), self.stepped.placements, self.group)

    def sum(self, value: Tensor) -> Tensor:
        return self.groups.replicas.all_reduce(value.detach().clone())

    # What is saved and compared: see `SingleDevice`.

    @property
    def names(self) -> list[str]:
        return list(self.learnt(adapted_shapes(self.config, self.lora)))

    def parts(self) -> dict[str, nn.Parameter]:
        return self.learnt(dict(self.module.named_parameters())) if self.layout.zero == 3 else super().parts()

    @property
    def weight_placements(self) -> Mapping[str, Placement]:
        """Of the module's parameters: slices with stage 3, otherwise the same on all replicas."""
        if self.layout.zero == 3:
            return self.learnt(self.module.placements)
        own = self.learnt(self.placements)
        experts, others = self.groups.expert_replicas, self.groups.replicas  # that hold the same, but for ZeRO
        copies = {name: Replicate(copy=(experts if is_expert(name) else others).rank) for name in own}
        return {name: placement.within(copies[name]) for name, placement in own.items()}

    @property
    def buffer_placements(self) -> Mapping[str, Placement]:
        others = self.groups.replicas.rank + (self.groups.tp.rank if self.groups.tp else 0)
        return {
            name: Placement(buffer.shape, (Replicate(self._earlier[name] + others),))
            for name, buffer in self.buffers().items()
        }


def make_strategy(group: Group, layout: ParallelConfig, offload: str | None = None) -> Hybrid:
    """The strategy of a layout. offload: where ZeRO's shards live, "cpu" or a folder."""
    if offload and (layout.is_hybrid or layout.dp_replicate > 1):
        raise ValueError(f"offload {offload} is for ZeRO alone: leave it out with tp, pp, cp, ep and dp_replicate.")
    return Hybrid(group, layout, offload=offload if offload in (None, "cpu") else Path(offload))
