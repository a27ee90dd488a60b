"""A tenant, as the `FairScheduler` knows it."""

from dataclasses import dataclass, field
from heapq import heappop

from minillm.serve.schedule.even_steps import Mix
from minillm.serve.schedule.sequence import Sequence, State


@dataclass
class Share:
    """What a tenant may have and has had.

    weight: of its service; 2 gets twice as much. most_running: of its sequences in the batch, None = as many as there
    are places. counter: weighted service. running: places that it holds. answered, block_seconds: its tokens, and
    blocks times the seconds it held them (a shared block counts for each of its holders). gave_way: sequences that made
    room for another tenant's. mix: what its requests are like. last_step: the last in which it had one. crowds: whether
    it wants more than its part of the places.
    """

    weight: float = 1.0
    most_running: int | None = None
    counter: float = 0.0
    running: int = 0
    gave_way: int = 0
    answered: int = 0
    block_seconds: float = 0.0
    mix: Mix = field(default_factory=Mix, repr=False)
    last_step: int = 0
    crowds: bool = False
    queue: list[tuple[tuple, Sequence]] = field(default_factory=list, repr=False)

    @property
    def head(self) -> Sequence | None:
        """The first that waits."""
        while self.queue and self.queue[0][1].state is State.FINISHED:
            heappop(self.queue)
        return self.queue[0][1] if self.queue else None

    @property
    def turn(self) -> tuple:
        """Smaller is sooner; among equal counters the first to arrive."""
        return self.counter, self.head.rank

    @property
    def is_active(self) -> bool:
        return self.running > 0 or self.head is not None

    def may_run(self, sequence: Sequence) -> bool:
        return self.most_running is None or self.running + sequence.num_seqs <= self.most_running


def salt_of(sequence: Sequence) -> str:
    """A tenant's requests are those of its salt, which keeps its prefixes to itself, too."""
    return sequence.request.salt or ""
