"""Self-speculation (Zhang et al. 2023; LayerSkip, Elhoushi et al. 2024): the target's first layers are the draft model.

    tokens ─ embedding ─ block 0 ─ block 1 ─┬─ block 2 ─ ... ─ block 5 ─ norm ─ head     the target
                                            └─ adapter ─ norm ─ head                     the draft, same weights

LayerSkip trains the target so that its early layers can speak. This target was not trained so; a small adapter, a gated
MLP and a norm of its own, learns to say what the later blocks would have (Kangaroo, Liu et al. 2024, has an adapter
too). The draft keeps its keys and values in blocks of its own: simpler than sharing the target's first layers' (as
LayerSkip does), at the price of computing and keeping those layers twice.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from minillm.model import ModelConfig, Transformer
from minillm.model.transformer import MLP, RMSNorm
from minillm.serve.speculate.heads import load
from minillm.serve.speculate.proposers.draft_model import DraftModel


class ExitAdapter(nn.Module):
    """norm(x + mlp(norm(x))). x: [..., hidden] after `layers` blocks -> what the target's head reads."""

    def __init__(self, config: ModelConfig, *, layers: int = 2, width: int = 256):
        super().__init__()
        if not 1 <= layers < config.num_layers:
            raise ValueError(f"an exit after {layers} of {config.num_layers} layers: use 1 to {config.num_layers - 1}.")
        self.layers = layers
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(replace(config, intermediate_size=width))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    @torch.no_grad()
    def initialize(self, target: Transformer, seed: int = 0) -> "ExitAdapter":
        """To train from: the plain exit (nothing added, the target's norm)."""
        draw = torch.Generator().manual_seed(seed)
        self.mlp_norm.weight.fill_(1)
        self.norm.weight.copy_(target.norm.weight)
        for projection in (self.mlp.gate_proj, self.mlp.up_proj):
            projection.weight.copy_(torch.randn(projection.weight.shape, generator=draw) * target.config.init_std)
        self.mlp.down_proj.weight.zero_()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.mlp(self.mlp_norm(x)))


class EarlyExit(DraftModel):
    """The proposer: a `DraftModel` whose model is the target's own beginning. adapter: as for `exiting`; cost and
    options: as for `DraftModel`."""

    def __init__(
        self, target: Transformer, adapter: ExitAdapter | str | Path | None = None, *, cost: float = 0.4, **options
    ):
        super().__init__(exiting(target, adapter), cost=cost, **options)


def exiting(target: Transformer, adapter: ExitAdapter | str | Path | None = None) -> Transformer:
    """A model of the target's first layers, with its weights. adapter: None = the committed one, or a folder."""
    if not isinstance(adapter, ExitAdapter):
        adapter = load("early_exit", ExitAdapter, target, adapter)
    config = replace(target.config, num_layers=adapter.layers)
    draft = Transformer(config, seed=None, device="meta", attention=target.attention)
    draft.embedding, draft.rope, draft.head, draft.norm = target.embedding, target.rope, target.head, adapter
    draft.blocks = target.blocks[: adapter.layers]
    return draft
