"""The update: AdamW in two groups, a learning rate that follows from the step number, clipping by the global norm."""

import math
from typing import Any

import torch
from torch import nn

from minillm.parallel.sharding.optimizer_state import MakeOptimizer, Named
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
    """Of step 0 .. steps - 1: linear warm-up, half a cosine down to min_lr_share · lr (Loshchilov & Hutter 2017).

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
    methods over the shards that its rank owns (`ZeroOptimizer`).
    """

    def __init__(self, named: Named, make: MakeOptimizer, master: bool = False):
        weights = dict(named)
        self.placements: dict[str, Placement] = {}  # whole parameters lie where the weights do
        self.names = list(weights)
        self.masters = MasterWeights(weights.values()) if master else None
        self.parameters: list[nn.Parameter] = self.masters.masters if self.masters else list(weights.values())
        self.inner = make(zip(weights, self.parameters, strict=True))

    def named(self) -> dict[str, nn.Parameter]:
        """What is stepped, by name: parameters, or their masters."""
        return dict(zip(self.names, self.parameters, strict=True))

    def prepare_gradients(self) -> None:
        if self.masters:
            self.masters.cast_gradients()

    def step(self) -> None:
        self.inner.step()
        if self.masters:
            self.masters.write_weights()

    def zero_grad(self) -> None:
        self.inner.zero_grad(set_to_none=True)

    def full_state_dict(self) -> dict[str, Any]:
        """torch's layout, and the masters by name."""
        masters = dict(zip(self.names, self.masters.state_dict(), strict=True)) if self.masters else {}
        return {**self.inner.state_dict(), "masters": masters}

    def sharded_state_dict(self) -> dict[str, Any]:
        """The same: nothing is sharded here."""
        return self.full_state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After the weights' own: masters that `state` does not hold are copied from them."""
        self.inner.load_state_dict({key: state[key] for key in ("state", "param_groups")})
        if self.masters:
            saved = dict(zip(self.names, self.masters.weights, strict=True)) | state["masters"]
            self.masters.load_state_dict([saved[name] for name in self.names])
