"""The training loop's parallel form for models that are split: tensor and pipeline parallel, times data parallel.

    Mesh(dp, pp, tp)      a rank holds      parts of the layers   (pp, `stages.py`)
                                            of each layer a slice (tp, `tensor.py`)
                          and shares with   dp ranks the reduction of its gradients, or ZeRO stage 1

Gradients are complete after three sums over different groups. All are sums, so their order does not matter: over dp
(BucketedDDP during backward, or ZeRO afterwards), over pp for what several stages hold (`Pipeline.finish`), over tp for
what is `partial` (`splits.sum_partial`). The norm counts every number of the whole model once.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minillm.comm import Group, Mesh
from minillm.model import ModelConfig, Transformer
from minillm.parallel.data_parallel.ddp import BucketedDDP
from minillm.parallel.optimizer_state import MakeOptimizer
from minillm.parallel.pipeline_parallel.runtime import Pipeline
from minillm.parallel.pipeline_parallel.stages import build_parts
from minillm.parallel.placement import global_norm
from minillm.parallel.tensor_parallel.layers import tensor_parallel
from minillm.parallel.tensor_parallel.plan import split_of, sum_partial
from minillm.parallel.zero.optimizer import ZeroOptimizer
from minillm.train.optimizer import Updater
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies import hybrid_state
from minillm.train.strategies.single_device import Around, Microbatch, SingleDevice, quietly, unscaled

CHUNK = re.compile(r"^parts\.\d+\.")


class Stages(nn.Module):
    """This rank's parts of the model, one for each chunk. Called like the whole model, with targets: every rank of the
    pipeline calls it with the same microbatch and gets (Σ weight · nll, Σ weight)."""

    pipeline: Pipeline

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    @property
    def blocks(self) -> list[nn.Module]:
        """All layers on this rank."""
        return [block for part in self.parts for block in part.blocks.values()]

    def forward(self, tokens: Tensor, targets: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Without gradients: for validation."""
        counted: list[Tensor] = []
        total = self.run(self.pipeline.evaluate, (tokens, targets, weights), lambda nll: nll, counted)
        group = self.pipeline.group
        return total, group.all_reduce(torch.stack(counted).sum() if counted else torch.zeros_like(total))

    def run(
        self,
        step: Callable[..., Tensor],
        microbatch: Microbatch,
        loss: Callable[[Tensor], Tensor],
        counted: list[Tensor] | None = None,
    ) -> Tensor:
        """Cuts the rows into the schedule's microbatches and moves them; returns Σ loss(Σ weight · nll).

        counted: gets the Σ weight of each, where the last part is.
        """
        tokens, targets, weights = microbatch
        count = self.pipeline.schedule.microbatches
        pieces = [tokens.tensor_split(count), targets.tensor_split(count)]
        pieces.append([None] * count if weights is None else weights.tensor_split(count))
        part = self.parts[0]
        seq, dtype = tokens.shape[1] // part.sequence_shards, next(part.parameters()).dtype

        def shape(m: int) -> tuple[torch.Size, torch.dtype]:
            return torch.Size((len(pieces[0][m]), seq, part.config.hidden_size)), dtype

        def loss_of(last: nn.Module, y: Tensor, m: int) -> Tensor:
            nll, weight = last.loss(y, pieces[1][m], pieces[2][m])
            if counted is not None:
                counted.append(weight.double())
            return loss(nll)

        return step(pieces[0], shape, loss_of)


class Hybrid(SingleDevice):
    """The form of a layout with tp or pp above 1. group: all ranks; rank and world_size are those along dp."""

    def __init__(self, group: Group, layout: ParallelConfig) -> None:
        if group.world_size != layout.world_size:
            raise ValueError(f"{layout} is {layout.world_size} ranks, but group {group.name!r} has {group.world_size}.")
        self.group, self.layout, self.mesh = group, layout, _mesh(group, layout.dp, layout.pp, layout.tp)
        self.rank, self.world_size = self.mesh.dp.rank, layout.dp
        self.is_reduced_by_zero = layout.zero == 1

    @property
    def is_root(self) -> bool:
        return self.group.rank == 0

    def build(self, config: ModelConfig, *, seed: int, device: Any = None, **how: Any) -> nn.Module:
        self.layout.check(config)
        self.config, how = config, {**how, "seed": None, "device": "meta"}
        order = self.layout.order
        parts = build_parts(config, order, self.mesh.pp.rank, **how) if order else [Transformer(config, **how)]
        for part in parts:
            if self.layout.tp > 1:
                tensor_parallel(part, config, self.mesh.tp, sequence=self.layout.sequence)
            part.to_empty(device=device or self.group.device)
            part.initialize(seed)
        return Stages(parts) if order else parts[0]

    def whole_name(self, name: str) -> str:
        return CHUNK.sub("", name)

    def wrap(self, model: nn.Module, master: bool = False) -> nn.Module:
        self.model = model
        reduce = self.layout.dp > 1 and not self.is_reduced_by_zero
        wrap = functools.partial(BucketedDDP, group=self.mesh.dp) if reduce else lambda part: part
        if self.layout.order:
            model.pipeline = Pipeline([wrap(part) for part in model.parts], self.layout.order, self.mesh.pp)
        self.module = model if self.layout.order else wrap(model)
        self._describe()
        return self.module

    def _describe(self) -> None:
        """What this rank's parameters are in the whole model."""
        named = dict(self.model.named_parameters())
        tp, place = self.layout.tp, self.mesh.tp.rank
        self.names = {name: self.whole_name(name) for name in named}  # here -> in the whole model
        self.splits = {n: split_of(self.config, w, place, tp, self.layout.sequence) for n, w in self.names.items()}
        order = self.layout.order
        first_here = {id(p) for _, p in self.model.pipeline.owned()} if order else {id(p) for p in named.values()}
        self.counted = {  # of several ranks with the same numbers, the first one counts them
            name
            for name, parameter in named.items()
            if id(parameter) in first_here and (place == 0 or self._part(name, place) != self._part(name, place - 1))
        }

    def _part(self, name: str, tp_rank: int) -> int:
        return split_of(self.config, self.names[name], tp_rank, self.layout.tp, self.layout.sequence).part

    def updater(self, module: nn.Module, make: MakeOptimizer, master: bool = False) -> "hybrid_state.SplitUpdater":
        if self.is_reduced_by_zero:
            inner = ZeroOptimizer(self.model, self.mesh.dp, 1, make=make, master=master)
        else:
            inner = Updater(self.model.named_parameters(), make, master)
        self.stepped = hybrid_state.SplitUpdater(self, inner)
        return self.stepped

    def loss_divisor(self, weight: Tensor) -> Tensor:
        return self.sum(weight) / self.world_size

    def forward_backward(
        self,
        module: nn.Module,
        microbatches: Sequence[Microbatch],
        loss_divisor: Tensor,
        around: Around = quietly,
        scale: Callable[[Tensor], Tensor] = unscaled,
    ) -> Tensor:
        if not self.layout.order:
            return super().forward_backward(module, microbatches, loss_divisor, around, scale)
        tokens, targets, weights = zip(*microbatches, strict=True)
        whole = torch.cat(tokens), torch.cat(targets), None if weights[0] is None else torch.cat(weights)
        with self.accumulating(last=True), around("pipeline"):
            total = self.model.run(self.model.pipeline.step, whole, lambda nll: scale(nll / loss_divisor))
        self.finish_backward()
        return total / scale(torch.ones_like(total) / loss_divisor)

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager:
        """With ZeRO nothing is reduced over dp before it is complete on this rank: see `finish_backward`."""
        if self.is_reduced_by_zero:
            return self.stepped.inner_updater.no_sync()
        alone = self.layout.order or self.module is self.model
        return contextlib.nullcontext() if last or alone else self.module.no_sync()

    def finish_backward(self) -> None:
        if self.layout.order:
            self.model.pipeline.finish()
        elif self.module is not self.model:
            self.module.finish()
        sum_partial(self.model.named_parameters(), self.splits, self.mesh.tp)

    def grad_norm(self, parameters: Iterable[Tensor]) -> Tensor:
        named = {name: p.grad for name, p in self.stepped.named() if name in self.counted and p.grad is not None}
        square = global_norm(named).to(self.group.device).square()  # a rank that trains nothing takes part too
        for axis, shares in (("tp", True), ("pp", True), ("dp", self.is_reduced_by_zero)):
            if shares and self.mesh.axes[axis] > 1:
                square = self.mesh[axis].all_reduce(square.clone())
        return square.sqrt()

    def sum(self, value: Tensor) -> Tensor:
        return self.mesh.dp.all_reduce(value.detach().clone())

    def all_ranks_true(self, yes: bool) -> bool:
        return bool(self.group.all_reduce(torch.tensor(float(yes), device=self.group.device), "min"))

    def gradients(self) -> dict[str, Tensor]:
        return self._whole(self.stepped.gradients())

    def weights(self) -> dict[str, Tensor]:
        return self._whole(dict(self.model.named_parameters()))

    def _whole(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        return hybrid_state.whole_tensors(self, {self.names[name]: tensor for name, tensor in named.items()})

    def full_state_dict(self) -> dict[str, Any]:
        return self.weights()

    def sharded_state_dict(self) -> dict[str, Any]:
        return {"parts": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "parts" in state:
            self.model.load_state_dict(state["parts"])
            return
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.splits[name].cut(state[self.names[name]]))


@functools.lru_cache(16)
def _mesh(group: Group, dp: int, pp: int, tp: int) -> Mesh:
    """One mesh per group and shape: each makes new groups, which live as long as the world."""
    return Mesh(group, dp=dp, pp=pp, tp=tp)
