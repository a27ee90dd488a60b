"""From logits to the next token, for each sequence as it asked, whatever else is in the batch.

logits ─ repetition penalty ─ / temperature ─ top-k ─ top-p ─ min-p ─ softmax ─ draw      (temperature 0: the largest)

Every sequence draws from its own generator, seeded by its request, so its tokens are the same alone and in a crowd.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RULED_OUT = float("-inf")  # as a logit: exp of it is 0
MOST_SEEDS = 2**63
COLDEST = 1e-6  # below it float32 overflows; the likeliest token is drawn with certainty long before


@dataclass(frozen=True)
class SamplingParams:
    """What a request wants. The defaults are greedy; every wrong value is refused with one sentence (ValueError).

    temperature: 0 = always the likeliest token; else draws from softmax(logits / temperature).
    top_k: only the k likeliest. top_p: the fewest likeliest tokens that sum to top_p (Holtzman et al. 2020).
    min_p: only tokens at least min_p times as likely as the likeliest (Nguyen et al. 2024).
    repetition_penalty: logits of tokens seen in prompt or answer, / penalty if positive, else · (Keskar et al. 2019).
    seed: of the draws; sample i of n draws with seed + i.
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
    seed: int = 0
    n: int = 1
    stop: str | Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self):
        for name, least in (("max_tokens", 1), ("n", 1), ("top_k", 1), ("logprobs", 0), ("seed", 0)):
            value = getattr(self, name)
            if value is None and name in ("top_k", "logprobs"):
                continue
            if not _whole(value) or value < least:
                raise ValueError(f"{name} {value!r} must be a whole number of at least {least}.")
        if self.seed >= MOST_SEEDS:
            raise ValueError(f"seed {self.seed} must be below 2**63, what a generator of torch takes.")
        for name, fits, rule in (
            ("temperature", lambda x: 0 <= x < float("inf"), "at least 0 (0 takes the likeliest token)"),
            ("top_p", lambda x: 0 < x <= 1, "above 0 and at most 1 (1 keeps every token)"),
            ("min_p", lambda x: 0 <= x <= 1, "from 0 (keeps every token) to 1"),
            ("repetition_penalty", lambda x: 0 < x < float("inf"), "above 0 (1 changes nothing)"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
                raise ValueError(f"{name} {value!r} must be {rule}.")
        object.__setattr__(self, "stop", _tuple_of("stop", self.stop, str, "a text or a list of texts"))
        if "" in self.stop:
            raise ValueError("stop contains the empty text, which ends every answer at once: leave it out.")
        object.__setattr__(self, "stop_tokens", _tuple_of("stop_tokens", self.stop_tokens, int, "a list of token ids"))


@dataclass(frozen=True)
class Token:
    """A sampled token. logprob and top (the likeliest tokens, best first) only if logprobs were asked for."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sample(logits: Tensor, params: SamplingParams, seen: Sequence[int], draw: torch.Generator) -> Token:
    """logits: [vocab_size], float32, on the CPU. seen: prompt and answer so far (for the penalty only)."""
    scores = filtered(logits, params, seen)
    if params.temperature == 0:
        token = int(scores.argmax())
    else:
        token = int(torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=draw))
    return described(token, logits, params)


def described(token: int, logits: Tensor, params: SamplingParams) -> Token:
    """The token with the log-probabilities that the request asked for. logits: [vocab_size], the model's own."""
    if params.logprobs is None:
        return Token(token)
    logprobs = torch.log_softmax(logits, dim=-1)
    top = logprobs.topk(min(params.logprobs, len(logprobs)))
    return Token(token, float(logprobs[token]), tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)))


def filtered(logits: Tensor, params: SamplingParams, seen: Sequence[int]) -> Tensor:
    """The logits to draw from: [vocab_size], ruled-out tokens at -inf; softmax of them is the distribution."""
    if params.repetition_penalty != 1:
        ids = torch.tensor(sorted(set(seen)))
        values = logits[ids]
        penalised = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        logits = logits.index_copy(0, ids, penalised)
    if params.temperature == 0:
        return logits
    logits = (logits - logits.max()) / max(params.temperature, COLDEST)
    if params.top_k is not None and params.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[-1], RULED_OUT)
    if params.top_p < 1:
        ordered, order = logits.sort(descending=True, stable=True)
        shares = ordered.softmax(-1)
        before = shares.cumsum(-1) - shares  # what the likelier tokens sum to; 0 for the first, so it always stays
        logits = logits.index_fill(0, order[before >= params.top_p], RULED_OUT)
    if params.min_p > 0:
        shares = logits.softmax(-1)
        logits = logits.masked_fill(shares < params.min_p * shares.max(), RULED_OUT)
    return logits


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tuple_of(name: str, value: object, kind: type, words: str) -> tuple:
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, list | tuple | set | frozenset) or not all(
        isinstance(item, kind) and not isinstance(item, bool) for item in items
    ):
        raise ValueError(f"{name} {value!r} must be {words}.")
    return tuple(items)
