"""What the heads learn: to give the distribution that the target gives, with the target frozen.

Text runs through the target once; its own next-token distributions are the goal of every loss (distillation: Hinton et
al. 2015), in nats at positions picked at random, because the output head is most of the work. Each kind's loss is a
function (head, target, tokens, states, goals) -> loss, where states are the `hidden_states` of tokens [batch, seq].
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minillm.model import Transformer
from minillm.model.distillation import soft_cross_entropy
from minillm.serve.speculate.proposers.eagle import EagleHead
from minillm.serve.speculate.proposers.early_exit import ExitAdapter
from minillm.serve.speculate.proposers.medusa import MedusaHeads

DECAY = 0.8  # each further head or step counts so much less (Medusa, §2.2.1)


@dataclass
class Goals:
    """The target's distributions at some positions of one batch. features: [batch, seq, hidden] after the last block.

    Rows nearer than `ahead` to the end are not picked, so that a goal some places later exists.
    """

    target: Transformer
    features: Tensor
    rows: tuple[Tensor, Tensor]

    @classmethod
    def pick(cls, target: Transformer, features: Tensor, count: int, ahead: int, draw: torch.Generator) -> "Goals":
        batch, seq, _ = features.shape
        first = ahead  # and not the first ones either: a chain of `ahead` steps must have begun
        spots = torch.randint(batch * (seq - first - ahead), (count,), generator=draw).to(features.device)
        return cls(target, features, (spots // (seq - first - ahead), spots % (seq - first - ahead) + first))

    def logits(self, ahead: int = 0) -> Tensor:
        """[rows, vocab_size], of the token after the one `ahead` places on."""
        batch, at = self.rows
        with torch.no_grad():
            return self.target.head_logits(self.target.norm(self.features[batch, at + ahead]), self.target._head)


def divergence(goal: Tensor, guessed: Tensor) -> Tensor:
    """Mean cross entropy of guessed against goal, both logits [rows, vocab_size]."""
    return soft_cross_entropy(goal.float().softmax(-1), guessed.float()).mean()


def medusa_loss(head: MedusaHeads, target: Transformer, tokens: Tensor, states: list[Tensor], goals: Goals) -> Tensor:
    """Head i at position t against the target's distribution at t + i."""
    guessed = head.logits(states[-1][goals.rows], target)
    return sum(DECAY**i * divergence(goals.logits(i + 1), guessed[:, i]) for i in range(guessed.shape[1]))


def exit_loss(head: ExitAdapter, target: Transformer, tokens: Tensor, states: list[Tensor], goals: Goals) -> Tensor:
    """The exit at position t against the target's distribution there."""
    return divergence(goals.logits(), target.head_logits(head(states[head.layers][goals.rows]), target._head))


def eagle_loss(
    head: EagleHead, target: Transformer, tokens: Tensor, states: list[Tensor], goals: Goals, *, steps: int = 3
) -> Tensor:
    """Step 0 pairs every token with the target's feature before it, step j with the head's own feature of step j - 1.

    So the head meets its own errors in training as it will in drafting (EAGLE-3, Li et al. 2025, §3.2).
    """
    attention, loss = Unrolled(), 0.0
    positions = torch.arange(1, tokens.shape[1], device=tokens.device)
    batch, at = goals.rows
    goal, before = goals.logits(), states[-1][:, :-1]
    for step in range(steps):
        features = head(tokens[:, 1:], before, positions, target, attention)  # row s is of position s + 1
        guessed = target.head_logits(target.norm(features[batch, at - 1]), target._head)
        loss = loss + DECAY**step * divergence(goal, guessed)
        before = torch.cat((states[-1][:, :1], features[:, :-1]), dim=1)
    return loss


class Unrolled:
    """An `AttentionFunction` of step j of `eagle_loss`: all places draft at once, each from j places before itself.

    A query at place s in step j sees step 0's keys up to place s - j, then step 1's at s - j + 1, ..., step j's at s:
    just what it finds when it drafts. Places below j began before the text; what they get is meaningless.
    """

    def __init__(self):
        self.steps: list[tuple[Tensor, Tensor]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, positions: Tensor, window: int | None) -> Tensor:
        group, step = q.shape[1] // k.shape[1], len(self.steps)
        self.steps.append((k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)))
        keys, values = self.steps[0]
        distance = positions[:, None] - positions
        seen = distance >= step if window is None else (distance >= step) & (distance < window)
        scores = [(q @ keys.mT).masked_fill(~seen, float("-inf"))]
        later = [(then, step - then) for then in range(1, step + 1)]
        scores += [(q * self.steps[then][0].roll(ago, dims=2)).sum(-1, keepdim=True) for then, ago in later]
        shares = torch.softmax(torch.cat(scores, dim=-1) * q.shape[-1] ** -0.5, dim=-1)
        y = shares[..., : len(positions)] @ values
        for place, (then, ago) in enumerate(later, start=len(positions)):
            y = y + shares[..., place : place + 1] * self.steps[then][1].roll(ago, dims=2)
        return y


LOSSES: dict[str, Callable[..., Tensor]] = {"medusa": medusa_loss, "eagle": eagle_loss, "early_exit": exit_loss}
MAKERS: dict[str, Callable[..., nn.Module]] = {"medusa": MedusaHeads, "eagle": EagleHead, "early_exit": ExitAdapter}
