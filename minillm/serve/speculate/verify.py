"""Rejection sampling: tokens guessed from q become tokens drawn from p, exactly.

    accept the guess x with probability min(1, p(x) / q(x))
    rejected: draw from max(p - q, 0), normalised, and drop the guesses after it
    all accepted: the last row of the target's pass gives one more token for nothing, the bonus

p is the target's distribution, q the draft's: the names of Leviathan et al. 2023 (§2.3, Algorithm 1); Chen et al. 2023
(Algorithm 2) call them q and p. Why it is exact: a token y comes out accepted with min(p(y), q(y)) and from the
residual with max(p(y) - q(y), 0); the sum is p(y).

A guess that was not drawn has q = 1 at its token and 0 elsewhere: accept with probability p(x), else draw from p
without x. That is the same as drawing from p and asking whether it is x, which is what happens here: the tokens are
then those that the request draws without any speculation, one random number for each.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.serve.requests.params import SamplingParams
from minillm.serve.sample.reference import Random, choose, filtered
from minillm.serve.speculate.proposal import Draft


def verify(target: Tensor, draft: Draft, draw: Random) -> list[int]:
    """The accepted guesses and one token more.

    target: [k + 1, vocab_size], probabilities after the last verified token and after each of the draft's k tokens.
    Fewer rows check only the first guesses; if all those are accepted nothing is added, and the rest of the draft can
    be checked later with the same result.
    """
    accepted: list[int] = []
    for place, (p, token) in enumerate(zip(target, draft.tokens, strict=False)):
        if draft.probabilities is None:
            accepted.append(choose(p, draw))
            if accepted[-1] != token:
                return accepted
            continue
        q = draft.probabilities[place]
        if not uniform(draw) < acceptance(p, q, token):
            return [*accepted, choose(residual(p, q, token), draw)]
        accepted.append(token)
    if len(target) > len(draft.tokens):
        accepted.append(choose(target[len(draft.tokens)], draw))
    return accepted


def verify_greedy(likeliest: Sequence[int], draft: Draft) -> list[int]:
    """`verify` where every row of the target has all its probability at one token: likeliest, [k + 1] or fewer."""
    for place, (right, token) in enumerate(zip(likeliest, draft.tokens, strict=False)):
        if right != token:
            return list(likeliest[: place + 1])
    return list(likeliest[: len(draft.tokens) + 1])


def acceptance(p: Tensor, q: Tensor | None, token: int) -> float:
    """min(1, p(token) / q(token)). p, q: [vocab_size]; q None: the token was not drawn."""
    right, guessed = float(p[token]), 1.0 if q is None else float(q[token])
    return 1.0 if right >= guessed else right / guessed


def residual(p: Tensor, q: Tensor | None, token: int) -> Tensor:
    """[vocab_size], what to draw from after `token` was rejected: max(p - q, 0), normalised."""
    if q is None:
        left = p.clone()
        left[token] = 0
    else:
        left = (p - q).clamp(min=0)
    total = left.sum()
    return left / total if total > 0 else p  # 0 only by rounding, where p = q and nothing should have been rejected


def distribution(logits: Tensor, params: SamplingParams, seen: Sequence[int]) -> Tensor:
    """[vocab_size], what a request draws its next token from; temperature 0: 1 at the likeliest. For p and for q."""
    scores = filtered(logits, params, seen)
    if params.temperature == 0:
        return torch.zeros_like(scores).index_fill_(0, scores.argmax(), 1.0)
    return torch.softmax(scores, dim=-1)


def uniform(draw: Random) -> float:
    """A number from [0, 1). draw: a generator, or whatever says itself what it draws (`exact.Script`)."""
    if isinstance(draw, torch.Generator):
        return float(torch.rand((), dtype=torch.float64, generator=draw))
    return draw.uniform()
