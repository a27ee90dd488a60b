"""Whom to preempt: a policy is a number for each sequence."""

from collections.abc import Callable

from minillm.serve.sequence import Sequence

# Whom to preempt among the later-ranked: the largest. Ties: the latest.
POLICIES: dict[str, Callable[[Sequence], float]] = {
    "latest": lambda sequence: sequence.rank[1],
    "longest": lambda sequence: sequence.num_tokens,
    "lowest priority": lambda sequence: sequence.priority,
    "least recently used": lambda sequence: -sequence.last_step,
}
