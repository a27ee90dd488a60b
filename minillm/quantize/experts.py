"""Experts one by one: a mixture keeps them stacked in one parameter, and what replaces layers wants layers.

mlp.experts.gate_up_proj [experts, 2, intermediate, hidden]   ->   mlp.experts.3.gate_proj, mlp.experts.3.up_proj
mlp.experts.down_proj    [experts, hidden, intermediate]      ->   mlp.experts.3.down_proj
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from minillm.model.config import ModelConfig
from minillm.model.moe import MoE
from minillm.model.moe.experts import Experts
from minillm.model.transformer import MLP, Transformer

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class SeparateExperts(nn.ModuleList):
    """Computes what `Experts` does; each expert is an `MLP`, its weights views of their memory."""

    def __init__(self, experts: Experts, config: ModelConfig):
        super().__init__()
        config = replace(config, intermediate_size=experts.down_proj.shape[2], mlp_bias=False)
        for parts in weights_of_each(experts):
            with torch.device("meta"):
                expert = MLP(config)
            for name, weight in parts.items():
                getattr(expert, name).weight = nn.Parameter(weight, requires_grad=False)
            self.append(expert)

    def forward(self, rows: Tensor, counts: Tensor, known: Sequence[int] | None = None) -> Tensor:
        """See `Experts.forward`."""
        parts = zip(self, rows.split(counts.tolist() if known is None else known), strict=True)
        return torch.cat([expert(part) if len(part) else part for expert, part in parts])


def weights_of_each(experts: Experts) -> Iterator[dict[str, Tensor]]:
    """Of each expert the weights of its layers, views of the stacked ones."""
    for (gate, up), down in zip(experts.gate_up_proj.detach(), experts.down_proj.detach(), strict=True):
        yield dict(zip(PROJECTIONS, (gate, up, down), strict=True))


def separate_experts(model: Transformer) -> None:
    """In place, for all layers that have experts."""
    for block in model.blocks:
        if isinstance(block.mlp, MoE) and isinstance(block.mlp.experts, Experts):
            block.mlp.experts = SeparateExperts(block.mlp.experts, model.config)
