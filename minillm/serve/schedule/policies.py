"""Which of the later-ranked sequences is preempted: the one with the largest number. Ties: the latest."""

from collections.abc import Callable

from minillm.serve.schedule.sequence import Sequence

POLICIES: dict[str, Callable[[Sequence], float]] = {
    "latest": lambda sequence: sequence.rank[1],
    "longest": lambda sequence: sequence.num_tokens,
    "lowest priority": lambda sequence: sequence.priority,
    "least recently used": lambda sequence: -sequence.last_step,
}
