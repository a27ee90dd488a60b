"""Direct preference optimization (Rafailov et al. 2023): of two answers, make the chosen one more likely than before.

    loss of a pair   -log σ(β · m)     m = (log π(chosen) - log π(rejected)) - (log π0(chosen) - log π0(rejected))

π0, the reference, is the model with its adapters switched off: no second model is held. With w = β · σ(-β · m) taken as
a constant, the loss has the gradient of  w · nll(chosen) - w · nll(rejected):

    dL/dθ = -σ(-β · m) · β · (d log π(chosen) - d log π(rejected)),     log π = -nll

So a step first asks both models for the likelihood of each answer, without gradients, and then trains on the very sum
of weighted losses that every layout of ranks computes already (`Microbatch.weights`).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.adapters.attach import switched_off
from minillm.train.strategies.single_device import Microbatch


class Preference:
    """beta: how dearly the model pays for leaving the reference. module: what forward is called on; model: with the
    adapters."""

    def __init__(self, beta: float, module: nn.Module, model: nn.Module) -> None:
        self.beta, self.module, self.model = beta, module, model

    @torch.no_grad()
    def weighted(self, batches: Sequence[Microbatch]) -> tuple[list[Microbatch], Tensor, Tensor]:
        """The microbatches with their weights, Σ loss of their pairs, and the number of pairs; of this rank's rows,
        which are chosen and rejected answers in turn."""
        weighted, losses, pairs = [], [], 0
        for batch in batches:
            margins = self._log_ratios(batch)
            with switched_off(self.model):
                margins = margins - self._log_ratios(batch)
            losses.append(-F.logsigmoid(self.beta * margins).sum())
            weight = self.beta * torch.sigmoid(-self.beta * margins)
            rows = torch.stack([weight, -weight], dim=1).flatten()
            weighted.append(batch._replace(weights=rows[:, None].expand(batch.targets.shape).contiguous()))
            pairs += len(margins)
        total = torch.stack(losses).sum()
        return weighted, total, torch.full_like(total, pairs)

    def _log_ratios(self, batch: Microbatch) -> Tensor:
        """[pairs]: log π(chosen) - log π(rejected). A row at a time, since the model adds its rows up."""
        rows = zip(batch.tokens.split(1), batch.targets.split(1), strict=True)
        nll = torch.stack([self.module(tokens, targets=targets)[0] for tokens, targets in rows])
        return nll[1::2] - nll[::2]
