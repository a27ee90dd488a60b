"""What a request may ask for, every value checked where it is given, and the token that it gets."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Real

from minillm.serve.numbers import check_whole, whole_numbers

MOST_SEEDS = 2**63


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
    greedy_only: bool = field(init=False, repr=False, compare=False, default=True)  # only the likeliest token's id

    def __post_init__(self):
        for name, least in (("max_tokens", 1), ("n", 1), ("top_k", 1), ("logprobs", 0), ("seed", 0)):
            optional = name in ("top_k", "logprobs", "seed")
            object.__setattr__(self, name, check_whole(name, getattr(self, name), least, optional=optional))
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
        greedy_only = self.temperature == 0 and self.repetition_penalty == 1 and self.logprobs is None
        object.__setattr__(self, "greedy_only", greedy_only)


@dataclass(frozen=True)
class Token:
    """A sampled token. logprob and top (the likeliest tokens, best first) only if logprobs were asked for."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@lru_cache(maxsize=1 << 16)
def plain_token(token: int) -> Token:
    """One object for all the times that a token is sampled: it never changes."""
    return Token(token)


def _texts(value: object) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, list | tuple | set | frozenset) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"stop {value!r} must be a text or a list of texts.")
    return tuple(items)
