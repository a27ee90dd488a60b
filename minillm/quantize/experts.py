"""Experts one by one: a mixture keeps them stacked in one parameter, and what replaces layers wants layers.

mlp.experts.gate_up_proj [experts, 2, intermediate, hidden]   ->   mlp.experts.3.gate_proj, mlp.experts.3.up_proj
mlp.experts.down_proj    [experts, hidden, intermediate]      ->   mlp.experts.3.down_proj
"""

import torch
from torch import Tensor, nn

from minillm.model.moe import MoE
from minillm.model.moe.experts import Experts
from minillm.model.transformer import FUNCTIONS, Transformer

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class SeparateExperts(nn.ModuleList):
    """Computes what `Experts` does; each expert is a gate_proj, an up_proj and a down_proj, views of its memory."""

    def __init__(self, experts: Experts):
        stacked = zip(experts.gate_up_proj.detach(), experts.down_proj.detach(), strict=True)
        super().__init__(
            nn.ModuleDict(dict(zip(PROJECTIONS, (_linear(gate), _linear(up), _linear(down)), strict=True)))
            for (gate, up), down in stacked
        )
        self.activation = FUNCTIONS[experts.activation]

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows: [rows, hidden], sorted by expert; counts: [num_experts], rows of each -> [rows, hidden]."""
        parts = rows.split(counts.tolist())
        return torch.cat([self._answer(expert, part) for expert, part in zip(self, parts, strict=True)])

    def _answer(self, expert: nn.ModuleDict, rows: Tensor) -> Tensor:
        if not len(rows):
            return rows
        return expert["down_proj"](self.activation(expert["gate_proj"](rows)) * expert["up_proj"](rows))


def separate_experts(model: Transformer) -> None:
    """In place, for all layers that have experts."""
    for block in model.blocks:
        if isinstance(block.mlp, MoE) and isinstance(block.mlp.experts, Experts):
            block.mlp.experts = SeparateExperts(block.mlp.experts)


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
