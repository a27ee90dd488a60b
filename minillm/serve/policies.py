"""Whom to preempt, and which settings of a scheduler make sense."""

from collections.abc import Callable

from minillm.serve.sequence import Sequence

# Whom to preempt among the later-ranked: the largest. Ties: the latest.
POLICIES: dict[str, Callable[[Sequence], float]] = {
    "latest": lambda sequence: sequence.rank[1],
    "longest": lambda sequence: sequence.num_tokens,
    "lowest priority": lambda sequence: sequence.priority,
    "least recently used": lambda sequence: -sequence.last_step,
}


def check_options(
    token_budget: int,
    max_num_seqs: int,
    chunk: int | None,
    policy: str,
    preemption: str,
    patience: int,
    reserve: int,
    max_waiting: int | None,
) -> None:
    """ValueError, with the value and the fix, for what `Scheduler` cannot work with."""
    if policy not in POLICIES:
        raise ValueError(f"policy {policy!r} is unknown: use one of {', '.join(map(repr, POLICIES))}.")
    if preemption not in ("recompute", "swap"):
        raise ValueError(f"preemption {preemption!r} is unknown: use 'recompute' or 'swap'.")
    if not 1 <= max_num_seqs <= token_budget:
        raise ValueError(
            f"token_budget {token_budget} must be at least max_num_seqs {max_num_seqs}, and that at least 1: "
            "every running sequence may want a token."
        )
    for name, value, least in (("chunk", chunk, 1), ("max_waiting", max_waiting, 1)):
        if value is not None and value < least:
            raise ValueError(f"{name} {value} must be at least {least}, or None.")
    if patience < 0 or reserve < 0:
        raise ValueError(f"patience {patience} and reserve {reserve} must be at least 0.")
