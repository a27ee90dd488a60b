"""From logits to the next token, for each sequence as it asked, whatever else is in the batch.

logits ─ repetition penalty ─ / temperature ─ top-k ─ top-p ─ min-p ─ softmax ─ draw      (temperature 0: the largest)

Every sequence has its own `Draw`, seeded by its request, so its tokens are the same alone and in a crowd. This is the
reference, one sequence at a time; `sampler.py` does the same for a batch.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real

import torch
from torch import Tensor

from minillm.model.draw import Draw

RULED_OUT = float("-inf")  # as a logit: exp of it is 0
MOST_SEEDS = 2**63
Random = Draw | torch.Generator
COLDEST = 1e-6  # below it float32 overflows; the likeliest token is drawn with certainty long before


@dataclass(frozen=True)
class SamplingParams:
    """What a request wants. The defaults are greedy; every wrong value is refused with one sentence (ValueError).

    temperature: 0 = always the likeliest token; else draws from softmax(logits / temperature).
    top_k: only the k likeliest, of equals the lowest ids.
    top_p: the fewest likeliest tokens that sum to top_p (Holtzman et al. 2020).
    min_p: only tokens at least min_p times as likely as the likeliest (Nguyen et al. 2024).
    repetition_penalty: logits of tokens seen in prompt or answer, / penalty if positive, else · (Keskar et al. 2019).
    seed: of the draws; sample i of n draws with `sample_seed(seed, i)`. None = a fresh one, told in `Output.seed`.
    first_tokens: ids that the first token is taken from (token healing); none = all.
    stop: text that ends the answer, cut off from it. stop_tokens: ids that end it, not part of it.
    logprobs: with each token its log-probability under the model's own distribution (before any of the above) and
    those of so many likeliest tokens; None = none.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    n: int = 1
    stop: str | Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    first_tokens: Sequence[int] = ()
    plain: bool = field(init=False, repr=False, compare=False, default=True)  # the likeliest token, and nothing more?

    def __post_init__(self):
        for name, least in (("max_tokens", 1), ("n", 1), ("top_k", 1), ("logprobs", 0), ("seed", 0)):
            value = getattr(self, name)
            if value is None and name in ("top_k", "logprobs", "seed"):
                continue
            if (number := whole(value)) is None or number < least:
                raise ValueError(f"{name} {value!r} must be a whole number of at least {least}.")
            object.__setattr__(self, name, number)
        if self.seed is not None and self.seed >= MOST_SEEDS:
            raise ValueError(f"seed {self.seed} must be below 2**63.")
        for name, fits, rule in (
            ("temperature", lambda x: 0 <= x < float("inf"), "at least 0 (0 takes the likeliest token)"),
            ("top_p", lambda x: 0 < x <= 1, "above 0 and at most 1 (1 keeps every token)"),
            ("min_p", lambda x: 0 <= x <= 1, "from 0 (keeps every token) to 1"),
            ("repetition_penalty", lambda x: 0 < x < float("inf"), "above 0 (1 changes nothing)"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not fits(value):
                raise ValueError(f"{name} {value!r} must be {rule}.")
            object.__setattr__(self, name, float(value))
        object.__setattr__(self, "stop", _texts(self.stop))
        if "" in self.stop:
            raise ValueError("stop contains the empty text, which ends every answer at once: leave it out.")
        for name in ("stop_tokens", "first_tokens"):
            if (ids := whole_numbers(getattr(self, name))) is None:
                raise ValueError(f"{name} {getattr(self, name)!r} must be a list of token ids.")
            object.__setattr__(self, name, tuple(ids))
        plain = self.temperature == 0 and self.repetition_penalty == 1 and self.logprobs is None
        object.__setattr__(self, "plain", plain)


@dataclass(frozen=True)
class Token:
    """A sampled token. logprob and top (the likeliest tokens, best first) only if logprobs were asked for."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sample(logits: Tensor, params: SamplingParams, seen: Sequence[int], draw: Random) -> Token:
    """logits: [vocab_size], float32, on the CPU. seen: prompt and answer so far (for the penalty only)."""
    scores = filtered(logits, params, seen)
    token = int(scores.argmax()) if params.temperature == 0 else choose(torch.softmax(scores, dim=-1), draw)
    return described(token, logits, params)


def choose(probabilities: Tensor, draw: Random) -> int:
    """A token drawn from probabilities: [vocab_size]. draw: a `Draw`, what has its methods, or a generator of torch."""
    if isinstance(draw, torch.Generator):
        return int(torch.multinomial(probabilities, 1, generator=draw))
    return draw.choose(probabilities)


def described(token: int, logits: Tensor, params: SamplingParams) -> Token:
    """The token with the log-probabilities that the request asked for. logits: [vocab_size], the model's own."""
    if params.logprobs is None:
        return Token(token)
    logprobs = torch.log_softmax(logits, dim=-1)
    top = logprobs.topk(min(params.logprobs, len(logprobs)))
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


def whole(value: object) -> int | None:
    """A whole number of Python's or numpy's as an int; None if it is none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def whole_numbers(values: object) -> list[int] | None:
    """A list, an array or a tensor of whole numbers as ints; None if it is none."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple | set | frozenset):
        return None
    if all(type(value) is int for value in values):
        return list(values)
    numbers = [whole(value) for value in values]
    return None if None in numbers else numbers


def _texts(value: object) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, list | tuple | set | frozenset) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"stop {value!r} must be a text or a list of texts.")
    return tuple(items)
