"""What a proposer is: it drafts the next tokens of sequences; the target checks all draft tokens in one pass.

    tokens so far ──▶ proposer ──▶ d1 d2 d3 ──▶ target: one pass over last, d1, d2, d3 ──▶ `verify` ──▶ 1 to 4 tokens

Whatever a proposer says, the answer's distribution stays the target's: a bad draft costs time, never quality.
One that raises costs its sequence that draft; the step's record says so in `error`.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from minillm.serve.requests.params import SamplingParams
from minillm.serve.sample.reference import Random


@dataclass(frozen=True)
class DraftRequest:
    """Asks for a draft, and says what a proposer may know of the sequence.

    key: the sequence's identity, the same at every step. tokens: all verified ones, prompt and answer so far (not to be
    changed). k: draft at most so many. draw: the request's own random numbers, for drafts that are drawn.
    """

    key: Hashable
    tokens: list[int]
    params: SamplingParams
    k: int
    draw: Random


@dataclass(frozen=True)
class Draft:
    """0 to k draft tokens. probabilities: [len(tokens), vocab_size], the distribution that each was drawn from, after
    the request's own warping (temperature, top-k, top-p, min-p, penalty: `verify.distribution`); None = not drawn."""

    tokens: list[int]
    probabilities: Tensor | None = None


@dataclass(eq=False)
class DraftState:
    """Of one sample, in `Sample.drafting`. draft: its draft tokens that are not verified yet; place: how many tokens of
    this draft were verified before. checked, accepted: how many of this draft so far, if several passes check it.
    tried, kept, drafts: what `AdaptiveK` counts. observed: positions whose hidden states the proposer has.
    """

    tried: float
    kept: float
    draft: Draft | None = None
    place: int = 0
    drafts: int = 0
    checked: int = 0
    accepted: int = 0
    observed: int = 0


class Proposer(Protocol):
    """wants_hidden: whether `observe` is called.

    A proposer may also have `on_verified(key, tokens, drafted, likeliest)`: it is called after each pass with the
    target's likeliest token after the last one and after each draft token that was checked (`Lookahead` iterates on
    them).
    """

    wants_hidden: bool

    def propose(self, asked: list[DraftRequest]) -> list[Draft]:
        """One draft for each that asks, in order."""

    def observe(self, key: Hashable, start: int, hidden: Tensor) -> None:
        """hidden: [m, hidden_size], the target's state after its last block, before the final norm, at the verified
        positions start .. start + m - 1. Hits in the prefix cache leave gaps; no position comes twice."""

    def forget(self, key: Hashable) -> None:
        """The sequence ended: what is kept of it can go."""
