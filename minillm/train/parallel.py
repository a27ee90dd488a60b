"""The seam between the training loop and its parallel forms: everything that changes when there is more than one rank.

    loader(rank, world_size) ─ wrap(model) ─┬ forward, backward under accumulating(last) ┬ finish_backward ─ norm ─ step
                                            └────────── for each microbatch ─────────────┘

`Alone` is one process, where each of these is trivial. Data parallelism and ZeRO are classes with the same methods.
"""

import contextlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from minillm.train.config import TrainConfig
from minillm.train.optimizer import adamw, squared_norm


class Alone:
    """One process. Every method says what a parallel form has to do in its place."""

    rank = 0
    world_size = 1

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module that forward is called on: the model, or a wrapper that reduces or gathers."""
        return model

    def optimizer(self, named: Iterable[tuple[str, nn.Parameter]], config: TrainConfig) -> torch.optim.Optimizer:
        """What steps the named parameters, or the shard of them that this rank owns."""
        return adamw(named, config)

    def denominator(self, weight: Tensor) -> Tensor:
        """By what this rank divides its sum of losses; `weight`: its tokens of the whole step, all microbatches.
        A form that averages gradients answers Σ weight / world_size, so that the average is over tokens, not ranks."""
        return weight

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager:
        """Around one microbatch: communicate only in the last one (`no_sync` in the others)."""
        return contextlib.nullcontext()

    def finish_backward(self) -> None:
        """Waits until every gradient that the optimizer will read is reduced."""

    def grad_norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """Norm of the whole model's gradient; shards add up their squares first."""
        return squared_norm(parameters).sqrt()

    def sum(self, value: Tensor) -> Tensor:
        """Sum over ranks, for losses and token counts that are reported."""
        return value

    def agree(self, yes: bool) -> bool:
        """True if it is true on all ranks: whether gradients were finite, whether to go on."""
        return yes
