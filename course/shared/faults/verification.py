"""Wrong ways to verify draft tokens, each `verify` with one difference: (target, draft, draw) -> tokens.

target: [K + 1, vocab], probabilities after each draft token; draft: what was drafted, and q.
"""

from typing import Any

from torch import Tensor

from minillm.serve.speculate import Draft, verify
from minillm.serve.speculate.verify import acceptance, choose, residual, uniform


def first_unverified(target: Tensor, draft: Draft, draw: Any) -> list[int]:
    """Verification begins with the second draft token (lattice#243)."""
    return [draft.tokens[0], *verify(target[1:], Draft(draft.tokens[1:], draft.probabilities[1:]), draw)]


def reseeded(target: Tensor, draft: Draft, draw: Any) -> list[int]:
    """The accept loop seeds its generator anew for each draft token, so all get the same number
    (LLMSpeculativeSampling)."""
    for place, token in enumerate(draft.tokens):
        p, q = target[place], draft.probabilities[place]
        draw.manual_seed(0)
        if not uniform(draw) < acceptance(p, q, token):
            return [*draft.tokens[:place], choose(residual(p, q, token), draw)]
    return [*draft.tokens, choose(target[-1], draw)]
