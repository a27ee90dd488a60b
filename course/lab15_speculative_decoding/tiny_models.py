"""Language models so small that everything they can write can be enumerated: what checks of speculation stand on.

    tiny = Tiny(generator, vocab=3)     logits that depend on the last two tokens
    written(tiny, [0, 1], 3)            {(2, 0, 1): 0.07, ...}: the true distribution of the next three tokens
    enumerated(program)                 the same of a program that draws with `uniform(draw)` and `choose(p, draw)`

Distances are total variations, Σ |a - b| / 2: 0 = the same distribution. Nothing is sampled.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from course.kit.exercises import CheckFailed
from course.shared.enumeration import Script, outcomes

Distribution = dict[tuple[int, ...], float]
NOTHING = 1e-9  # a distance that is only rounding


class Tiny:
    """logits: [vocab, vocab, vocab], of the next token by the last two. passes: how often `rows` was called."""

    def __init__(self, generator: torch.Generator, vocab: int = 3, scale: float = 1.5):
        self.vocab, self.passes = vocab, 0
        self.logits = scale * torch.randn(vocab, vocab, vocab, generator=generator, dtype=torch.float64)

    def rule_out(self, *tokens: int) -> None:
        """These are never written, as after top-k."""
        self.logits[..., list(tokens)] = float("-inf")

    def scores(self, tokens: Sequence[int]) -> Tensor:
        """[vocab], the logits after tokens; the caller's own, to change in place too."""
        return self.logits[tokens[-2], tokens[-1]].clone()

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """[vocab], the probabilities after tokens."""
        return torch.softmax(self.scores(tokens), dim=-1)

    def rows(self, tokens: Sequence[int], drafted: Sequence[int] = ()) -> Tensor:
        """[len(drafted) + 1, vocab], the probabilities after tokens and after each draft token: one pass."""
        self.passes += 1
        known = [*tokens, *drafted]
        return torch.stack([self(known[: len(tokens) + i]) for i in range(len(drafted) + 1)])


def seeded() -> torch.Generator:
    """A generator seeded from torch's own, so that a check can be run again on the same inputs."""
    return torch.Generator().manual_seed(int(torch.randint(2**31, ())))


def random_row(generator: torch.Generator, vocab: int = 5, scale: float = 1.5) -> Tensor:
    """[vocab], a distribution, float64."""
    return torch.softmax(scale * torch.randn(vocab, generator=generator, dtype=torch.float64), dim=-1)


def written(model: Callable[[Sequence[int]], Tensor], prompt: Sequence[int], length: int) -> Distribution:
    """{tokens: probability} of the next `length` tokens."""
    found: Distribution = {(): 1.0}
    for _ in range(length):
        found = {
            (*tokens, token): chance * share
            for tokens, chance in found.items()
            for token, share in enumerate(model([*prompt, *tokens]).tolist())
            if share > 0
        }
    return found


def enumerated(program: Callable[[Script], Any]) -> dict[Any, float]:
    """{result: probability}. CheckFailed where it draws in a way that cannot be followed, or does not end."""
    left = 20_000

    def counted(draw: Script) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise CheckFailed("it makes more random choices than the task has: is there a loop too many?")
        return program(draw)

    try:
        return outcomes(counted)
    except (TypeError, RuntimeError) as error:
        if re.search(r"\bNumber\b", str(error)):
            raise CheckFailed(
                "in this check uniform(draw) is no float: only compare it, as in `uniform(draw) < ratio`, so that both "
                "outcomes can be followed"
            ) from error
        if "Script" in str(error):
            raise CheckFailed(
                "draw with uniform(draw) and choose(probabilities, draw): then every outcome can be enumerated"
            ) from error
        raise


def distance(found: dict, expected: dict) -> float:
    """Total variation of two distributions."""
    return sum(abs(found.get(each, 0.0) - expected.get(each, 0.0)) for each in {**found, **expected}) / 2


def first(found: Distribution, length: int) -> Distribution:
    """The distribution of the first `length` tokens."""
    shorter: Distribution = defaultdict(float)
    for tokens, chance in found.items():
        shorter[tokens[:length]] += chance
    return dict(shorter)


def accepted(target: Callable, draft: Callable, prompt: Sequence[int], k: int) -> float:
    """Draft tokens accepted in a pass, expected: Σ_i Σ over the first i draft tokens of Π min(p, q). At most k; no
    verifier accepts more and stays exact."""
    total = 0.0
    for length in range(1, k + 1):
        for tokens in product(range(len(target(prompt))), repeat=length):
            chance = 1.0
            for i, token in enumerate(tokens):
                known = [*prompt, *tokens[:i]]
                chance *= min(float(target(known)[token]), float(draft(known)[token]))
            total += chance
    return total


def drawn_draft(
    draft: Callable, choose: Callable, prompt: Sequence[int], k: int, draw: Any
) -> tuple[list[int], Tensor]:
    """(draft tokens, [k, vocab] what each was sampled from)."""
    drafted, rows = [], []
    for _ in range(k):
        rows.append(draft([*prompt, *drafted]))
        drafted.append(choose(rows[-1], draw))
    return drafted, torch.stack(rows)


def is_tokens(found: Any, vocab: int) -> bool:
    return isinstance(found, list | tuple) and all(
        isinstance(token, Integral) and not isinstance(token, bool) and 0 <= token < vocab for token in found
    )
