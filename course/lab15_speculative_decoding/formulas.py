"""Lab 15's closed forms: acceptance of two given distributions, and speculation in a large batch."""

from collections.abc import Sequence

from minillm.predict.speculation import tokens_per_pass


def acceptance(p: Sequence[float], q: Sequence[float]) -> float:
    """Σ min(p, q): how often a token drawn from q is accepted. p, q: probabilities over one vocabulary."""
    if len(p) != len(q):
        raise ValueError(f"p has {len(p)} tokens and q {len(q)}: both must be over one vocabulary.")
    return sum(min(a, b) for a, b in zip(p, q, strict=True))


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
