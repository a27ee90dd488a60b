"""Lab 15's closed form: acceptance of two given distributions."""

from collections.abc import Sequence


def acceptance(p: Sequence[float], q: Sequence[float]) -> float:
    """Σ min(p, q): how often a token drawn from q is accepted. p, q: probabilities over one vocabulary."""
    if len(p) != len(q):
        raise ValueError(f"p has {len(p)} tokens and q {len(q)}: both must be over one vocabulary.")
    return sum(min(a, b) for a, b in zip(p, q, strict=True))
