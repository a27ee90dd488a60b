"""The layer that stands where a dense block has its MLP."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from minillm.model.config import ModelConfig
from minillm.model.moe.balance import RouterLosses, sequence_losses
from minillm.model.moe.experts import Experts
from minillm.model.moe.permute import sort_by_expert
from minillm.model.moe.router import Router, drop_beyond

Dispatch = Callable[[Experts, Tensor, Tensor], Callable[[], Tensor]]


def here(experts: Experts, rows: Tensor, counts: Tensor) -> Callable[[], Tensor]:
    """The dispatch of a process that has all experts: nothing travels."""
    return partial(experts, rows, counts)


class MoE(nn.Module):
    """x: [batch, seq, hidden] -> the weighted sum of its experts' answers, and those of the shared experts.

    dispatch: the seam for expert parallelism. dispatch(experts, rows, counts) takes rows [rows, hidden] sorted by
    expert and counts [num_experts], and returns a function that returns the experts' outputs in the same order. What
    it starts at once (an all-to-all) overlaps with the shared experts, which are computed between the two calls.
    load: [num_experts], (token, choice) pairs since `forget_load` or `update_balance_biases`; None = none counted.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        shared: nn.Module | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.config, self.layer = config.moe, layer
        self.router = Router(config.moe, config.hidden_size, dtype)
        sizes = config.moe.num_experts, config.hidden_size, config.moe.intermediate_size
        self.experts = Experts(*sizes, config.activation, dtype)
        self.shared = shared
        self.dispatch: Dispatch = here
        self.load: Tensor | None = None

    def forward(self, x: Tensor, losses: RouterLosses | None = None) -> Tensor:
        """losses: of a pass that trains. Without them nothing is dropped, so that in serving a sequence's answer does
        not depend on others, nor on how many of its tokens are computed at once."""
        config = self.config
        decision = self.router(x)
        experts, weights = decision.experts, decision.weights
        dropless = config.choice == "token" and (config.capacity_factor is None or losses is None)
        if config.choice == "token" and not dropless:
            experts = drop_beyond(experts, config.num_experts, config.capacity(x.shape[1]))
        routes = sort_by_expert(experts.flatten(0, 1), config.num_experts, dropless)
        flat = x.flatten(0, 1)
        answer = self.dispatch(self.experts, routes.to_experts(flat), routes.counts)
        y = None if self.shared is None else self.shared(x)
        rows = answer()
        routed = routes.from_experts(rows, weights.flatten(0, 1).to(rows.dtype)).view_as(x)
        y = routed if y is None else routed + y
        if losses is None:
            return y
        if self.layer not in losses.counts:  # else the layer is computed again for backward
            self.load = routes.counts if self.load is None else self.load + routes.counts
        return losses.attach(y, sequence_losses(config, decision, losses), routes.counts, self.layer)


def forget_load(model: nn.Module) -> None:
    """Before a step: what an earlier one has counted that was not applied (an overflow, a rollback) is not of it."""
    for layer in model.modules():
        if isinstance(layer, MoE):
            layer.load = None


@torch.no_grad()
def update_balance_biases(model: nn.Module, sum_over_ranks: Callable[[Tensor], Tensor] = lambda load: load) -> None:
    """After an optimizer step: moves every balance bias by its rate, against the load since the last call.

    sum_over_ranks: adds a layer's [num_experts] counts up over all ranks that saw other tokens.
    """
    for layer in model.modules():
        if isinstance(layer, MoE) and layer.config.bias_update_rate is not None and layer.load is not None:
            load = sum_over_ranks(layer.load).double()
            step = layer.config.bias_update_rate * torch.sign(load.mean() - load)
            layer.router.balance_bias += step.to(layer.router.balance_bias)
            layer.load = None
