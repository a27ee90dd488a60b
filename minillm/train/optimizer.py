"""The update: AdamW in two groups, a learning rate that follows from the step number, clipping by the global norm."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minillm.parallel.sharding.optimizer import MakeOptimizer, Named
from minillm.parallel.sharding.placement import Placement
from minillm.train.config import TrainConfig
from minillm.train.precision import MasterWeights


def decay_groups(named: Named, weight_decay: float) -> list[dict]:
    """Parameter groups for an optimizer: matrices decay; norms, biases and embeddings do not.

    A norm's weight is meant to be near 1, not 0, and an embedding's rows move only when their token occurs. A flat
    slice of a parameter goes where the parameter would: by its `whole_shape`.
    """
    decayed, kept = [], []
    for name, parameter in named:
        is_matrix = len(getattr(parameter, "whole_shape", parameter.shape)) > 1
        (decayed if is_matrix and not name.endswith("embedding.weight") else kept).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def adamw(named: Named, config: TrainConfig) -> torch.optim.AdamW:
    """torch's AdamW, one fused kernel per dtype, over `decay_groups`."""
    groups = decay_groups(named, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of step 0 .. steps - 1: linear warm-up, then half a cosine down to min_lr_share · lr
    (Loshchilov & Hutter 2017).

    A function of the step alone: nothing to save, and nothing that accumulation could advance too often.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - 1 - config.warmup_steps)
    cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
    return config.lr * (config.min_lr_share + (1 - config.min_lr_share) * cosine)


class Updater:
    """Moves the weights of one process: an optimizer over them, or over float32 masters of them.

        prepare_gradients()   `parameters` have theirs, masters in float32: to be unscaled, measured and clipped
        step()                `parameters` move, and the weights with them
        zero_grad()

    make: from (name, parameter) pairs to a torch optimizer, kept as `inner`. A parallel form's updater has the same
    methods over the shards that its rank owns (`ZeroOptimizer`). placements: of the weights; default: all are whole.
    """

    def __init__(
        self,
        named: Named,
        make: MakeOptimizer,
        master: bool = False,
        placements: Mapping[str, Placement] | None = None,
    ) -> None:
        weights = dict(named)
        self.placements = placements or {name: Placement(weight.shape) for name, weight in weights.items()}
        self.names = list(weights)
        self.master_weights = MasterWeights(weights.values()) if master else None
        stepped = self.master_weights.masters if self.master_weights else weights.values()
        self.parameters: list[nn.Parameter] = list(stepped)
        self.inner = make(zip(weights, self.parameters, strict=True))

    def named(self) -> dict[str, nn.Parameter]:
        """What the optimizer steps, by name: parameters, or their masters."""
        return dict(zip(self.names, self.parameters, strict=True))

    def masters(self) -> dict[str, Tensor]:
        return {name: part.detach() for name, part in self.named().items()} if self.master_weights else {}

    def gradients_by_name(self) -> dict[str, Tensor]:
        """The gradients of `parameters` by name, after `prepare_gradients`."""
        return {name: part.grad for name, part in self.named().items() if part.grad is not None}

    def prepare_gradients(self) -> None:
        if self.master_weights:
            self.master_weights.cast_gradients()

    def step(self) -> None:
        self.inner.step()
        if self.master_weights:
            self.master_weights.write_weights()

    def zero_grad(self) -> None:
        self.inner.zero_grad(set_to_none=True)

    @torch.no_grad()
    def load_local(self, state: dict[str, Any]) -> None:
        """See `sharding.state.Stepped`."""
        self.inner.load_state_dict({key: state[key] for key in ("state", "param_groups")})
        if self.master_weights:
            for name, master, weight in zip(self.names, self.parameters, self.master_weights.weights, strict=True):
                master.copy_(state["masters"].get(name, weight))
