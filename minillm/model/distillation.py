"""A small model learns what a larger one would say, not only what the text says next (Hinton et al. 2015, §2).

    loss = (1 - α) · nll  +  α · T² · KL(p ‖ q)       p = softmax(teacher's logits / T), q = softmax(student's / T)

T > 1 flattens both distributions, so that what is unlikely teaches as well; T² keeps the gradient's size, which falls
with 1 / T². Sums over tokens, as in loss.py, so that a step may be cut over microbatches and ranks.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.model.loss import IGNORE, check_targets, sum_of_weights


class Goals(NamedTuple):
    """What a teacher says of some tokens. logits: [batch, seq, vocab]; share: α, of the loss; temperature: T."""

    logits: Tensor
    share: float
    temperature: float

    @classmethod
    def cut(cls, goals: "list[Goals]", parts: int) -> "list[Goals]":
        """Those of several batches, cut anew along their rows."""
        whole = torch.cat([each.logits for each in goals])
        return [goals[0]._replace(logits=logits) for logits in whole.tensor_split(parts)]


class Words(NamedTuple):
    """Which words' logits a rank has, where they are divided over ranks. begin: the first; add, most: the sum and the
    maximum over the ranks of a tensor [...], the first with a gradient."""

    begin: int = 0
    add: Callable[[Tensor], Tensor] = lambda value: value
    most: Callable[[Tensor], Tensor] = lambda value: value


ALL = Words()


def distillation_sums(
    logits: Tensor, targets: Tensor, weights: Tensor | None, goals: Goals, words: Words = ALL
) -> tuple[Tensor, Tensor]:
    """(Σ weight · loss, Σ weight). logits: [batch, seq, vocab], or the `words` of this rank, and -inf where there is
    none; targets, weights: [batch, seq] as in `cross_entropy_sums`."""
    check_targets(logits.shape[:-1], targets, weights)
    exact = torch.promote_types(logits.dtype, torch.float32)
    vocab, temperature = goals.logits.shape[-1], goals.temperature
    logits, end = logits.to(exact), words.begin + logits.shape[-1]

    wanted = targets.clamp(min=0) - words.begin
    is_here = (wanted >= 0) & (wanted < logits.shape[-1])
    found = logits.gather(-1, wanted.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0]
    nll = log_sum_exp(logits, words) - words.add(torch.where(is_here, found, 0.0))

    log_p = torch.log_softmax(goals.logits.to(exact) / temperature, dim=-1)
    p = log_p.exp()
    entropy = torch.special.entr(p).sum(-1)  # 0 for p = 0
    p = F.pad(p, (0, max(0, end - vocab)))[..., words.begin : end]
    divergence = soft_cross_entropy(p, logits / temperature, words) - entropy

    loss = (1 - goals.share) * nll + goals.share * temperature**2 * divergence
    counted = (targets != IGNORE).to(exact) * (1 if weights is None else weights)
    return (loss * counted).sum(), sum_of_weights(targets, weights, exact)


def soft_cross_entropy(p: Tensor, logits: Tensor, words: Words = ALL) -> Tensor:
    """[...]: -Σ p · log softmax(logits), of [..., vocab] each, or of the words of this rank."""
    wanted = torch.where(p > 0, logits, 0.0)  # the logits of padding are -inf
    return log_sum_exp(logits, words) - words.add((p * wanted).sum(-1))


def log_sum_exp(logits: Tensor, words: Words = ALL) -> Tensor:
    """[..., vocab] -> [...], over all words."""
    top = words.most(logits.detach().amax(-1))
    return top + words.add((logits - top[..., None]).exp().sum(-1)).log()
