"""The layer that stands where a dense block has its MLP."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from minillm.model.config import ModelConfig
from minillm.model.moe.balance import RouterLosses, sequence_losses
from minillm.model.moe.experts import Experts
from minillm.model.moe.permute import count_by_expert, sort_by_expert
from minillm.model.moe.router import Router

Dispatch = Callable[[Experts, Tensor, Tensor, Tensor, bool], Callable[[], Tensor]]


def here(
    experts: Experts, x: Tensor, chosen: Tensor, weights: Tensor, dropless: bool, *, num_experts: int
) -> Callable[[], Tensor]:
    """The dispatch of a process that has all experts: no row travels."""
    routes = sort_by_expert(chosen, num_experts, dropless)
    rows = routes.to_experts(x)

    def answer() -> Tensor:
        done = experts(rows, routes.counts)
        return routes.from_experts(done, weights.to(done.dtype))

    return answer


class MoE(nn.Module):
    """x: [batch, seq, hidden] -> the weighted sum of its experts' answers, and those of the shared experts.

    dispatch: the seam for expert parallelism. dispatch(experts, x, chosen, weights, dropless) takes x: [tokens, hidden]
    and chosen, weights: [tokens, choices], numbers of experts, -1 where dropped (nowhere, if dropless). It returns a
    function that returns Σ over a token's choices of weight · expert(x), [tokens, hidden]. What it starts at once (an
    all-to-all) overlaps with the shared experts, which are computed between the two calls.
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
        self.dispatch: Dispatch = partial(here, num_experts=config.moe.num_experts)
        self.load: Tensor | None = None

    def forward(self, x: Tensor, losses: RouterLosses | None = None) -> Tensor:
        """losses: of a pass that trains. Without them nothing is dropped, so that in serving a sequence's answer does
        not depend on others, nor on how many of its tokens are computed at once."""
        config = self.config
        decision = self.router(x)
        chosen = decision.experts
        dropless = config.choice == "token" and (config.capacity_factor is None or losses is None)
        if config.choice == "token" and not dropless:
            chosen = self.router.drop(chosen)
        tokens = (each.flatten(0, 1) for each in (x, chosen, decision.weights))
        answer = self.dispatch(self.experts, *tokens, dropless)
        y = None if self.shared is None else self.shared(x)
        routed = answer().view_as(x)
        y = routed if y is None else routed + y
        if losses is None:
            return y
        counts = count_by_expert(chosen, config.num_experts)
        if self.layer not in losses.counts:  # else the layer is computed again for backward
            self.load = counts if self.load is None else self.load + counts
        return losses.attach(y, sequence_losses(config, decision, losses), counts, self.layer)


def forget_load(model: nn.Module) -> None:
    """Call before a step: forgets counts of an earlier step that was not applied (an overflow, a rollback)."""
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
