"""Cross-entropy in two numbers, so that a sum over any split of the tokens gives the loss of the whole batch.

A rank, a microbatch or a sequence shard that returned its own mean would weigh a short shard's tokens more than a long
one's (mean of means). Sums of nll and sums of weights simply add; the division comes last, once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100


def cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None = None, ignore_index: int = IGNORE) -> Tensor:
    """Σ weight · nll / Σ weight, a scalar; 0 if no token counts. Arguments as in `cross_entropy_sums`."""
    total, weight = cross_entropy_sums(logits, targets, weights, ignore_index)
    return total / torch.where(weight == 0, 1, weight)


def cross_entropy_sums(
    logits: Tensor, targets: Tensor, weights: Tensor | None = None, ignore_index: int = IGNORE
) -> tuple[Tensor, Tensor]:
    """(Σ weight · nll, Σ weight) in nats, over the tokens whose target is not `ignore_index`.

    logits: [batch, seq, vocab]; targets: [batch, seq] of ids; weights: [batch, seq], None = 1 for each token.
    Half-precision logits are raised to float32 first.
    """
    if logits.shape[:-1] != targets.shape or (weights is not None and weights.shape != targets.shape):
        given = "none" if weights is None else list(weights.shape)
        raise ValueError(
            f"logits {list(logits.shape)}, targets {list(targets.shape)} and weights {given} do not match: "
            "targets and weights take the logits' shape without the vocabulary."
        )
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    nll = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=ignore_index, reduction="none")
    counted = targets.flatten() != ignore_index
    weights = counted.to(nll.dtype) if weights is None else weights.flatten().to(nll.dtype) * counted
    return (nll * weights).sum(), weights.sum()
