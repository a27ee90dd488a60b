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


def linear_cross_entropy_sums(
    x: Tensor, head: Tensor, targets: Tensor, chunk: int = 512, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`cross_entropy_sums(x @ headᵀ, targets, weights)` without holding the logits, a small model's largest tensor.

    x: [batch, seq, hidden] after the last norm; head: [vocab, hidden]. What follows a sum of losses changes its
    gradient by a scalar factor only, so the gradient is computed in forward, `chunk` tokens at a time, while their
    logits are at hand: the same FLOPs, with the gradients of x and head kept in place of logits and probabilities (Hsu
    et al. 2024, Liger Kernel, §3.2).
    """
    check_targets(x.shape[:-1], targets, weights)
    total = _LinearCrossEntropy.apply(x, head, targets, chunk, weights)
    return total, sum_of_weights(targets, weights, total.dtype)


def check_targets(shape: torch.Size, targets: Tensor, weights: Tensor | None) -> None:
    """ValueError unless there are a target and a weight for every position. shape: [batch, seq]."""
    for name, given in (("targets", targets), ("weights", weights)):
        if given is not None and given.shape != shape:
            raise ValueError(
                f"{name} {list(given.shape)} and positions {list(shape)} do not match: one of the {name} per position."
            )


def sum_of_weights(targets: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Σ weight over the targets that count: their number without weights."""
    counted = targets != IGNORE
    return counted.sum().to(dtype) if weights is None else (weights.to(dtype) * counted).sum()


def weights_of_sequences(targets: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[batch]: Σ weight over the targets of each sequence that count, float32 or wider."""
    counted = (targets != IGNORE).to(torch.promote_types(dtype, torch.float32))
    return (counted if weights is None else counted * weights).sum(1)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, head, targets, chunk, weights):
        wanted, device = any(ctx.needs_input_grad[:2]), x.device.type
        if torch.is_autocast_enabled(device):  # once, and not in every chunk
            x, head = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (x, head))
        rows, ids = x.flatten(0, -2), targets.flatten()
        exact = torch.promote_types(x.dtype, torch.float32)
        total = torch.zeros((), dtype=exact, device=x.device)
        if wanted:
            x_gradient = torch.empty_like(rows)
            head_gradient = torch.zeros_like(head, dtype=exact) if ctx.needs_input_grad[1] else None  # None: frozen
        for start in range(0, len(ids), chunk):
            part, wrong = rows[start : start + chunk], ids[start : start + chunk, None]
            counted = (wrong != IGNORE).to(exact)
            if weights is not None:
                counted *= weights.flatten()[start : start + chunk, None]
            wrong = wrong.clamp(min=0)
            log_p = torch.log_softmax((part @ head.T).to(exact), dim=-1)
            total -= (log_p.gather(1, wrong) * counted).sum()
            if wanted:  # d nll / d logits = p - 1 at the target
                gradient = log_p.exp_().scatter_add_(1, wrong, -torch.ones_like(counted)).mul_(counted).to(x.dtype)
                x_gradient[start : start + chunk] = gradient @ head
                if head_gradient is not None:
                    head_gradient += gradient.T @ part
                del gradient
            del log_p  # or the next chunk's logits would stand beside it
        if wanted:
            ctx.save_for_backward(x_gradient.view_as(x), head_gradient)
        return total

    @staticmethod
    def backward(ctx, factor):
        x_gradient, head_gradient = ctx.saved_tensors
        of_head = None if head_gradient is None else head_gradient * factor
        return x_gradient * factor, of_head, None, None, None
