"""All parts of the model that one rank of a pipeline holds, as one module with the names of the whole model."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from minillm.parallel.pipeline_parallel.runtime import Pipeline
from minillm.parallel.pipeline_parallel.stages import ModelPart


class HeldParts(nn.Module):
    """This rank's parts, one for each chunk. Called like the whole model, with targets: every rank of the pipeline
    calls it with the same microbatch and gets (Σ weight · nll, Σ weight).

    Layers go by their numbers in the whole model, so parameters are called what they are called there, and come in its
    order, whatever the chunks' (with DualPipe, two ranks hold the same parts in turned order). Where a rank holds both
    ends of a model with tied embeddings, they are one parameter. `pipeline`: set when the model is wrapped.
    """

    def __init__(self, parts: Sequence[ModelPart]) -> None:
        super().__init__()
        self.pipeline: Pipeline | None = None
        self.parts = tuple(parts)  # no submodules: these are registered below, once
        for part in parts:
            part.rope = parts[0].rope
        self.rope = parts[0].rope
        self.embedding = self._shared("embedding")
        in_order = sorted(parts, key=lambda part: part.layers.start)
        self.blocks = nn.ModuleDict({name: block for part in in_order for name, block in part.blocks.items()})
        self.norm, self.head = self._shared("norm"), self._shared("head")

    def _shared(self, name: str) -> nn.Module | None:
        held = [part for part in self.parts if getattr(part, name) is not None]
        for part in held:
            setattr(part, name, getattr(held[0], name))
        return getattr(held[0], name) if held else None

    def forward(self, tokens: Tensor, targets: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Without gradients: for validation."""
        counted: list[Tensor] = []
        total = self.run(self.pipeline.evaluate, (tokens, targets, weights), lambda nll: nll, counted)
        group = self.pipeline.group
        return total, group.all_reduce(torch.stack(counted).sum() if counted else torch.zeros_like(total))

    def run(
        self,
        step: Callable[..., Tensor],
        batch: tuple[Tensor, Tensor, Tensor | None],
        loss: Callable[[Tensor], Tensor],
        counted: list[Tensor] | None = None,
    ) -> Tensor:
        """Cuts the rows into the schedule's microbatches and moves them; returns Σ loss(Σ weight · nll).

        batch: tokens, targets, weights, [rows, seq] each. counted: gets the Σ weights where the last part is.
        """
        tokens, targets, weights = batch
        count = self.pipeline.schedule.microbatches
        some_tokens, some_targets = tokens.tensor_split(count), targets.tensor_split(count)
        some_weights = [None] * count if weights is None else weights.tensor_split(count)
        part = self.parts[0]
        seq, dtype = tokens.shape[1] // part.sequence_shards, next(part.parameters()).dtype

        def shape(m: int) -> tuple[torch.Size, torch.dtype]:
            return torch.Size((len(some_tokens[m]), seq, part.config.hidden_size)), dtype

        def loss_of(last: nn.Module, y: Tensor, m: int) -> Tensor:
            nll, weight = last.loss(y, some_targets[m], some_weights[m])
            if counted is not None:
                counted.append(weight.detach().double())
            return loss(nll)

        return step(some_tokens, shape, loss_of)
