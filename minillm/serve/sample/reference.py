"""From logits to the next token, for each sequence as it asked, whatever else is in the batch.

logits ─ repetition penalty ─ / temperature ─ top-k ─ top-p ─ min-p ─ softmax ─ draw      (temperature 0: the largest)

Every sequence has its own `Draw`, seeded by its request, so its tokens are the same alone and in a crowd. This is the
reference, one sequence at a time; `batch.py` does the same for a batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.model.draw import COLDEST, Draw
from minillm.serve.requests.params import SamplingParams, Token

RULED_OUT = float("-inf")  # as a logit: exp of it is 0
Random = Draw | torch.Generator


def sample(logits: Tensor, params: SamplingParams, seen: Sequence[int], draw: Random) -> Token:
    """logits: [vocab_size], float32, on the CPU. seen: prompt and answer so far (for the penalty only)."""
    scores = filtered(logits, params, seen)
    token = int(scores.argmax()) if params.temperature == 0 else choose(torch.softmax(scores, dim=-1), draw)
    return described(token, logits, params.logprobs)


def choose(probabilities: Tensor, draw: Random) -> int:
    """A token drawn from probabilities: [vocab_size]. draw: a `Draw`, what has its methods, or a generator of torch."""
    if isinstance(draw, torch.Generator):
        return int(torch.multinomial(probabilities, 1, generator=draw))
    return draw.choose(probabilities)


def described(token: int, logits: Tensor, count: int | None) -> Token:
    """The token with its log-probability and those of `count` likeliest tokens; None = without any.

    logits: [vocab_size], the model's own.
    """
    if count is None:
        return Token(token)
    logprobs = torch.log_softmax(logits, dim=-1)
    top = logprobs.topk(min(count, len(logprobs)))
    return Token(token, float(logprobs[token]), tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)))


def filtered(logits: Tensor, params: SamplingParams, seen: Sequence[int]) -> Tensor:
    """The logits to draw from: [vocab_size], ruled-out tokens at -inf; softmax of them is the distribution."""
    logits = penalised(logits, params, seen)
    if params.temperature == 0:
        return logits
    logits = (logits - logits.max()) / max(params.temperature, COLDEST)
    if params.top_k is not None and params.top_k < len(logits):
        least = logits.topk(params.top_k).values[-1]
        more = params.top_k - int((logits > least).sum())  # so many of those equal to the k-th
        equal = logits == least
        logits = logits.masked_fill((logits < least) | (equal & (equal.cumsum(0) > more)), RULED_OUT)
    if params.top_p < 1:
        ordered, order = logits.sort(descending=True, stable=True)
        shares = ordered.softmax(-1)
        before = shares.cumsum(-1) - shares  # what the likelier tokens sum to; 0 for the first, so it always stays
        logits = logits.index_fill(0, order[before >= params.top_p], RULED_OUT)
    if params.min_p > 0:
        shares = logits.softmax(-1)
        logits = logits.masked_fill(shares < params.min_p * shares.max(), RULED_OUT)
    return logits


def penalised(logits: Tensor, params: SamplingParams, seen: Sequence[int]) -> Tensor:
    """logits: [vocab_size] after the repetition penalty on the tokens seen."""
    if params.repetition_penalty == 1:
        return logits
    ids = torch.tensor(sorted(set(seen)), device=logits.device)
    values = logits[ids]
    changed = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    return logits.index_copy(0, ids, changed)
