"""What a scheduler asks others: whom to preempt, and which prompts are computed elsewhere."""

from collections.abc import Callable
from typing import Protocol

from minillm.serve.schedule.sequence import Sequence

# of the later-ranked sequences the one with the largest number; ties: the latest
POLICIES: dict[str, Callable[[Sequence], float]] = {
    "latest": lambda sequence: sequence.rank[1],
    "longest": lambda sequence: sequence.num_tokens,
    "lowest priority": lambda sequence: sequence.priority,
    "least recently used": lambda sequence: -sequence.last_step,
}


class HandOvers(Protocol):
    """What computes prompts elsewhere (`transfer/decode.py`)."""

    def begin(self, sequence: Sequence) -> bool:
        """Whether an admitted sequence, which has its blocks, waits for its keys from now on."""

    def give_up(self, sequence: Sequence) -> None:
        """It waits no more, and its blocks are about to be released."""
