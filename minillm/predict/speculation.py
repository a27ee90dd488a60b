"""Speculative decoding: how many tokens a pass of the target gives, and what that is worth.

    accepted    α = Σ_x min(p(x), q(x)) = 1 - TV(p, q)                   of one guess
    per pass    1 + α + α² + … + α^K = (1 - α^{K+1}) / (1 - α)           the guesses kept, and one token more
    speedup     (1 - α^{K+1}) / ((1 - α) (cK + 1))                       has a best K, however good the draft

p: the target's distribution, q: the draft's, K: guesses per pass, c: seconds of one draft token / seconds of one pass
of the target. Leviathan et al. 2023, §3: Corollary 3.6, equation 1, Theorem 3.8.

That is the speed while all sequences of a batch are going. Guessing lets them end at different passes, and a batch is
over when its last sequence is:

    seconds     s₀ · E[max X] + s₁ · (E[X₁] + … + E[X_b])                X: passes until a sequence has its tokens

s₀: of a pass whoever is in it, s₁: more for each sequence in it. Without guesses every X is the number of tokens.
"""

from collections.abc import Sequence


def acceptance(p: Sequence[float], q: Sequence[float]) -> float:
    """Σ min(p, q): how often a token drawn from q is accepted. p, q: probabilities over one vocabulary."""
    if len(p) != len(q):
        raise ValueError(f"p has {len(p)} tokens and q {len(q)}: both must be over one vocabulary.")
    return sum(min(a, b) for a, b in zip(p, q, strict=True))


def tokens_per_pass(alpha: float | Sequence[float], k: int | None = None) -> float:
    """Tokens that one pass of the target yields: 1 + α₁ + α₁α₂ + … + α₁⋯α_K.

    alpha: of every guess, with k; or of each place 1 .. K, given that those before it were accepted.
    """
    places = _places(alpha, k)
    total, reached = 1.0, 1.0
    for each in places:
        reached *= each
        total += reached
    return total


def speedup(alpha: float | Sequence[float], c: float, k: int | None = None, *, verify: float = 1.0) -> float:
    """Plain seconds per token / speculative ones. verify: seconds of a pass over K + 1 tokens / over one token; 1 while
    reading the weights is what takes the time."""
    places = _places(alpha, k)
    if c < 0 or verify <= 0:
        raise ValueError(f"c {c} must be at least 0 and verify {verify} above 0: they are ratios of seconds.")
    return tokens_per_pass(places) / (c * len(places) + verify)


def going(alpha: float, k: int, tokens: int) -> list[float]:
    """[passes]: the chance that a sequence needs pass 1, 2, ... to write `tokens` tokens; their sum is E[X].

    As the engine does it, no more is guessed than there are tokens left after the one that a pass gives anyway.
    """
    _places(alpha, k)
    if tokens < 1:
        raise ValueError(f"tokens {tokens} must be at least 1.")
    left, chances = {tokens: 1.0}, []
    while left:
        chances.append(sum(left.values()))
        after: dict[int, float] = {}
        for missing, chance in left.items():
            guesses = min(k, missing - 1)
            for right in range(guesses + 1):
                given = alpha**right * (1 - alpha if right < guesses else 1)
                if missing > right + 1 and given:
                    after[missing - right - 1] = after.get(missing - right - 1, 0.0) + chance * given
        left = after
    return chances


def batch_passes(alphas: Sequence[float], k: int, tokens: int) -> tuple[float, float]:
    """(E[max X], ΣE[X]) of sequences that write `tokens` tokens each. alphas: of each, all places of a draft alike."""
    each = [going(alpha, k, tokens) for alpha in alphas]
    longest = 0.0
    for place in range(max(map(len, each))):
        none = 1.0
        for chances in each:
            none *= 1 - (chances[place] if place < len(chances) else 0.0)
        longest += 1 - none
    return longest, sum(map(sum, each))


def batch_seconds(alphas: Sequence[float], k: int, tokens: int, fixed: float, each: float) -> float:
    """Seconds of all passes after the prompts. fixed, each: s₀ and s₁, guesses included; k 0: without guesses."""
    longest, total = batch_passes(alphas, k, tokens)
    return fixed * longest + each * total


def best_k(alpha: float, c: float, most: int = 64) -> int:
    """The K of 0 .. most with the largest speedup; the smallest of equals. 0: guessing costs more than it brings."""
    if most < 0:
        raise ValueError(f"most {most} must be at least 0.")
    return max(range(most + 1), key=lambda k: (speedup(alpha, c, k), -k))


def large_batch_speedup(
    alpha: float, c: float, k: int, batch: int, critical: float, *, draft_critical: float | None = None
) -> float:
    """The speedup with `batch` sequences in a pass: below 1 once the passes are bound by arithmetic.

    A pass over m tokens takes max(1, m / critical) of the time of a pass over one: critical is the number of tokens at
    which arithmetic takes as long as reading the weights (the ridge of the roofline). The verifying pass has
    batch · (k + 1) tokens, the plain one batch. draft_critical: of the draft; None = the same.
    """
    if batch < 1 or critical <= 0:
        raise ValueError(f"batch {batch} must be at least 1 and critical {critical} above 0.")
    plain, verifying = (max(1.0, batch * each / critical) for each in (1, k + 1))
    drafting = max(1.0, batch / (draft_critical or critical))
    return tokens_per_pass(alpha, k) * plain / (c * k * drafting + verifying)


def _places(alpha: float | Sequence[float], k: int | None) -> list[float]:
    if isinstance(alpha, int | float):
        if k is None:
            raise ValueError(f"alpha {alpha} is one number: say k, how many guesses, too.")
        places = [float(alpha)] * k
    else:
        places = [float(each) for each in alpha]
        if k not in (None, len(places)):
            raise ValueError(f"k {k} does not fit the {len(places)} places of alpha: leave k out.")
    if any(not 0 <= each <= 1 for each in places) or (k is not None and k < 0):
        raise ValueError(f"alpha {alpha} must lie in 0 .. 1 and k {k} be at least 0.")
    return places
