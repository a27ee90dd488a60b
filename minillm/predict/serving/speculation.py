"""Speculative decoding: how many tokens a pass of the target gives, and what that is worth.

    accepted    α = Σ_x min(p(x), q(x)) = 1 - TV(p, q)                   of one draft token
    per pass    1 + α + α² + … + α^K = (1 - α^{K+1}) / (1 - α)           those accepted, and one token more
    speedup     (1 - α^{K+1}) / ((1 - α) (cK + 1))                       has a best K, however good the draft

p: the target's distribution, q: the draft's, K: draft tokens per pass, c: seconds of one draft token / seconds of one
pass of the target. Leviathan et al. 2023, §3: Corollary 3.6, equation 1, Theorem 3.8. The speedup holds while no
sequence of the batch has ended.
"""

from collections.abc import Sequence


def tokens_per_pass(alpha: float | Sequence[float], k: int | None = None) -> float:
    """Tokens that one pass of the target yields: 1 + α₁ + α₁α₂ + … + α₁⋯α_K.

    alpha: the acceptance of every draft token, with k; or of each place 1 .. K, given that those before it were
    accepted.
    """
    places = _places(alpha, k)
    total, reached = 1.0, 1.0
    for each in places:
        reached *= each
        total += reached
    return total


def speedup(alpha: float | Sequence[float], c: float, k: int | None = None, *, verify: float = 1.0) -> float:
    """Seconds per token without speculation / with it. verify: seconds of a pass over K + 1 tokens / over one token; 1
    while reading the weights is what takes the time."""
    places = _places(alpha, k)
    if c < 0 or verify <= 0:
        raise ValueError(f"c {c} must be at least 0 and verify {verify} above 0: they are ratios of seconds.")
    return tokens_per_pass(places) / (c * len(places) + verify)


def best_k(alpha: float, c: float, most: int = 64) -> int:
    """The K of 0 .. most with the largest speedup; the smallest of equals. 0: draft tokens cost more than they save."""
    if most < 0:
        raise ValueError(f"most {most} must be at least 0.")
    return max(range(most + 1), key=lambda k: (speedup(alpha, c, k), -k))


def _places(alpha: float | Sequence[float], k: int | None) -> list[float]:
    if isinstance(alpha, int | float):
        if k is None:
            raise ValueError(f"alpha {alpha} is one number: give k, the number of draft tokens, as well.")
        places = [float(alpha)] * k
    else:
        places = [float(each) for each in alpha]
        if k not in (None, len(places)):
            raise ValueError(f"k {k} does not fit the {len(places)} places of alpha: leave k out.")
    if any(not 0 <= each <= 1 for each in places) or (k is not None and k < 0):
        raise ValueError(f"alpha {alpha} must lie in 0 .. 1 and k {k} be at least 0.")
    return places
