"""Keeping the experts' load even, so that all of them learn and none of them is waited for.

    balance loss   E · Σ_e f_e · P_e    f: share of the (token, choice) pairs that went to e, P: mean probability of e
                   Of one sequence; 1 if even, E / k at worst. f has no gradient, P has (Fedus et al. 2021, §2.2).
    z-loss         mean of (log Σ_e exp logit_e)²: keeps logits small (Zoph et al. 2022, §3.1)
    bias           no loss: after a step e's bias rises if e had fewer tokens than the mean, else falls; the bias moves
                   the choice, never the weights (DeepSeek-V3, §2.1.2)

How losses get from a layer to the trainer: they are worth what a token's loss is worth, so
Σ over sequences of (Σ weights of its tokens) · (its losses) is added to Σ weight · nll. Sums of that kind do not depend
on how sequences are split over microbatches and ranks. The factor that the trainer gives the sum (1 / tokens, a loss
scale) reaches the layers through `RouterLosses` during backward: the loss is where backward begins, so the factor is
known before any layer asks for it. No value changes: the loss that is reported stays the cross-entropy.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.model.config import MoEConfig
from minillm.model.moe.router import Decision, alone


class RouterLosses:
    """Collects the losses of the routers of one forward pass, from layer to layer.

    weights: [batch], the sum of the weights of each sequence's tokens. parts: how many equal parts sequences are cut
    into, of which this process has one; sum_over_parts adds a tensor up over them. Losses are then this part's share.
    factor: gradient of Σ weight · nll, set when backward begins; a pipeline stage without the loss sets it itself.
    counts, losses: by layer, [num_experts] (token, choice) pairs and [batch] losses, without a gradient.
    """

    def __init__(self, weights: Tensor, sum_over_parts: Callable[[Tensor], Tensor] = alone, parts: int = 1):
        self.weights, self.sum_over_parts, self.parts = sum_over_parts(weights), sum_over_parts, parts
        self.factor: Tensor | None = None
        self.counts: dict[int, Tensor] = {}
        self.losses: dict[int, Tensor] = {}

    def begin_at(self, total: Tensor) -> Tensor:
        """total: Σ weight · nll -> the same; its gradient is the factor of all router losses."""
        return _Begin.apply(total, self)

    def attach(self, x: Tensor, losses: Tensor, counts: Tensor, layer: int) -> Tensor:
        """x -> the same. losses: [batch], a layer's, from which backward goes on as from x."""
        self.counts[layer], self.losses[layer] = counts.detach(), losses.detach()
        return _Attach.apply(x, losses, self)

    @property
    def mean(self) -> Tensor:
        """The sum over layers of the mean over tokens, which is added to a mean loss."""
        total = sum((self.weights.to(each) * each).sum() for each in self.losses.values())
        return total / torch.where(self.weights.sum() == 0, 1, self.weights.sum())


def sequence_losses(config: MoEConfig, decision: Decision, of: RouterLosses) -> Tensor:
    """[batch]: the balance loss and the z-loss of every sequence, each times its factor in the configuration; of a
    part, its share of them."""
    losses = decision.logits.new_zeros(len(decision.logits))
    if config.balance_loss:
        losses = losses + config.balance_loss * balance_loss(decision.probabilities, decision.experts, of)
    if config.z_loss:
        losses = losses + config.z_loss * z_loss(decision.logits) / of.parts
    return losses


def balance_loss(probabilities: Tensor, experts: Tensor, of: RouterLosses | None = None) -> Tensor:
    """probabilities: [batch, seq, num_experts]; experts: [batch, seq, k], as chosen, before any drops -> [batch].

    of: where sequences are cut. Then shares are those of whole sequences, and P is this part's term of the mean."""
    num_experts, chosen = probabilities.shape[-1], experts.flatten(1)
    share = torch.zeros_like(probabilities[:, 0]).scatter_add_(
        1, chosen, torch.ones_like(chosen, dtype=probabilities.dtype)
    )
    parts, share = (of.parts, of.sum_over_parts(share)) if of else (1, share)
    return num_experts * (share / (chosen.shape[1] * parts) * probabilities.mean(1) / parts).sum(-1)


def z_loss(logits: Tensor) -> Tensor:
    """logits: [batch, seq, num_experts] -> [batch]."""
    return logits.logsumexp(-1).square().mean(-1)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, total, losses):
        ctx.losses = losses
        return total.view_as(total)

    @staticmethod
    def backward(ctx, gradient):
        ctx.losses.factor = gradient
        return gradient, None


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, own, losses):
        ctx.losses, ctx.dtype = losses, own.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        factor = ctx.losses.factor
        if factor is None:
            raise RuntimeError("backward reached a router before the loss: call RouterLosses.begin_at on the loss.")
        return gradient, factor.to(ctx.dtype) * ctx.losses.weights.to(ctx.dtype), None
