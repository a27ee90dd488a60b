"""Which experts compute a token, and how much each of them counts.

    logits [batch, seq, experts] ─ softmax or sigmoid ─ scores ─ + balance bias ─ top k ─ weights of the chosen scores

The choice itself has no gradient: the router learns through the weights of the experts that were chosen.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.model.config import MoEConfig

TINY = 1e-20  # added to a sum of scores, as DeepSeek-V3 does: sigmoids may all be 0


class Decision(NamedTuple):
    """What a router says about x: [batch, seq, hidden].

    logits, probabilities: [batch, seq, num_experts], float32 or wider; probabilities sum to 1 for every token.
    experts: [batch, seq, choices], -1 where an expert has dropped the token. weights: likewise, 0 where dropped.
    choices is top_k, or num_experts where experts choose: then expert e's answer to each token stands in column e.
    """

    logits: Tensor
    probabilities: Tensor
    experts: Tensor
    weights: Tensor


def alone(x: Tensor) -> Tensor:
    """The identity: all-gather, sum and slice of a sequence that has one part."""
    return x


class Router(nn.Module):
    """weight: [num_experts, hidden]. balance_bias: [num_experts], float32, moves the choice but not the weights.

    whole, own: where sequences are cut into parts, [batch, part, ...] -> [batch, seq, ...] and back to this part.
    Drops, and experts that choose, need to see all tokens of a sequence, by numbers that have no gradient.
    """

    def __init__(self, config: MoEConfig, hidden_size: int, dtype: torch.dtype | None = None):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size, dtype=dtype))
        bias = None if config.bias_update_rate is None else torch.zeros(config.num_experts, dtype=torch.float32)
        self.register_buffer("balance_bias", bias)
        self.whole: Callable[[Tensor], Tensor] = alone
        self.own: Callable[[Tensor], Tensor] = alone

    def forward(self, x: Tensor) -> Decision:
        """x: [batch, seq, hidden]. ValueError if a logit is not finite (values are read on the CPU only)."""
        logits = F.linear(x, self.weight)
        check_finite(logits)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits.softmax(-1) if self.config.scores == "softmax" else logits.sigmoid()
        sums_to_1 = self.config.scores == "softmax"
        probabilities = scores if sums_to_1 else scores / (scores.sum(-1, keepdim=True) + TINY)
        return Decision(logits, probabilities, *self.choose(scores))

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores: [batch, seq, num_experts] -> (experts, weights) as in `Decision`, before any drops."""
        config = self.config
        if config.choice == "expert":
            whole = self.whole(scores.detach())
            taken = self.own(take_tokens(whole, config.capacity(whole.shape[1])))
            experts = torch.arange(config.num_experts, device=scores.device).expand_as(scores)
            return torch.where(taken, experts, -1), torch.where(taken, scores * config.weight_scale, 0)
        ranked = scores if self.balance_bias is None else scores + self.balance_bias
        experts = ranked.topk(config.top_k, dim=-1).indices
        weights = scores.gather(-1, experts)
        if config.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        return experts, weights if config.weight_scale == 1 else weights * config.weight_scale

    def drop(self, experts: Tensor) -> Tensor:
        """experts: [batch, seq, k], as chosen -> the same with -1 beyond the capacity."""
        whole = self.whole(experts)
        return self.own(drop_beyond(whole, self.config.num_experts, self.config.capacity(whole.shape[1])))

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self.balance_bias is not None:  # in bfloat16 the small steps of its updates would round to nothing
            self.balance_bias = self.balance_bias.float()
        return self


def take_tokens(scores: Tensor, capacity: int) -> Tensor:
    """Each expert takes the `capacity` tokens of every sequence that it scores highest (Zhou et al. 2022, §3.2).

    scores: [batch, seq, num_experts] -> likewise, whether the expert takes the token.
    """
    taken = torch.zeros_like(scores, dtype=torch.bool)
    return taken.scatter_(1, scores.topk(capacity, dim=1).indices, True)


def drop_beyond(experts: Tensor, num_experts: int, capacity: int) -> Tensor:
    """`experts` [batch, seq, k] with -1 where an expert has already `capacity` tokens of the sequence.

    Places are given away in the order of the tokens, so a token is never dropped for a later one's sake, and a batch
    that is split by sequences drops what it drops as a whole.
    """
    flat = experts.flatten(1)
    chosen = F.one_hot(flat, num_experts)
    place = (chosen.cumsum(1).gather(2, flat[..., None]) - 1).squeeze(-1)  # pairs of the same expert before this one
    return torch.where(place < capacity, flat, -1).view_as(experts)


def check_finite(logits: Tensor) -> None:
    """ValueError for NaN or infinite router logits. Only on the CPU: reading a GPU's would make every layer wait."""
    if torch.compiler.is_compiling() or logits.device.type != "cpu" or not logits.numel():
        return
    low, high = logits.detach().aminmax()  # NaN, if one of them is
    if math.isfinite(low) and math.isfinite(high):
        return
    bad = int((~torch.isfinite(logits.detach())).any(-1).sum())
    raise ValueError(
        f"router logits of {bad} of {logits.shape[:-1].numel()} tokens are not finite: the weights or activations have "
        "diverged; lower the learning rate or go back to an earlier checkpoint."
    )
