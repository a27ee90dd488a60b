"""Tenants get equal service, whatever each asks for: the virtual token counter.

Sheng et al. 2024, "Fairness in Serving Large Language Models" (https://arxiv.org/abs/2401.00588), Algorithm 2. Each
tenant has a counter of the service it had: `PROMPT` for a prompt token that is computed, `ANSWER` for a token of an
answer, divided by the tenant's weight.

    a place in the batch is free ──▶ the tenant with the smallest counter among those that wait ──▶ its first request
    a tenant comes back          ──▶ its counter is lifted to the smallest of those that wait: idleness is not saved up

It is work-conserving: a tenant alone gets everything. Of two tenants that both always wait, the service differs by at
most 2 · max(PROMPT · longest prompt, ANSWER · tokens that fit the pool), however long it lasts (Section 4). The order
within a tenant, preemption and everything else are the `Scheduler`'s. Prompt tokens found in the cache cost nothing;
one that is computed again after a preemption was paid before.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop

from minillm.serve.schedule.blocks import BlockPool
from minillm.serve.schedule.scheduler import Scheduler
from minillm.serve.schedule.sequence import Plan, Sequence, State

PROMPT, ANSWER = 1, 2  # service of a token: an answer's needs a pass of its own (the paper's weights)


@dataclass
class Share:
    """What a tenant may have and has had. weight: of its service; 2 gets twice as much. most_running: of its sequences
    in the batch, None = as many as there are places. counter: weighted service. answered, block_seconds: its tokens,
    and blocks times the seconds it held them (a shared block counts for each of its holders)."""

    weight: float = 1.0
    most_running: int | None = None
    counter: float = 0.0
    running: int = 0
    answered: int = 0
    block_seconds: float = 0.0
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

    def may_run(self, sequence: Sequence) -> bool:
        return self.most_running is None or self.running + sequence.num_seqs <= self.most_running


def salt_of(sequence: Sequence) -> str:
    """A tenant's requests are those of its salt, which keeps its prefixes to itself, too."""
    return sequence.request.salt or ""


class FairScheduler(Scheduler):
    """A `Scheduler` that admits by the virtual token counter. shares: by tenant; an unknown one gets weight 1. clock:
    for block-seconds, 0 at all times without. tenant_of: whose a sequence is.

        LLM(model, scheduler=partial(FairScheduler, shares={"ada": Share(weight=2)}))
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        shares: Mapping[str, Share] | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        tenant_of: Callable[[Sequence], str] = salt_of,
        **options,
    ):
        self.shares = dict(shares or {})
        self._clock, self._tenant_of = clock, tenant_of
        super().__init__(pool, **options)

    def reset(self) -> None:
        super().reset()
        self._paid: dict[Sequence, int] = {}  # tokens of a sequence that are counted, once it was admitted
        self._last_left: Share | None = None  # whose queue was the last to become empty
        self._counted_until = self._clock()
        for share in self.shares.values():
            share.queue, share.running = [], 0

    def share_of(self, sequence: Sequence) -> Share:
        tenant = self._tenant_of(sequence)
        if (share := self.shares.get(tenant)) is None:
            share = self.shares[tenant] = Share()
        return share

    def check(self, sequence: Sequence) -> None:
        super().check(sequence)
        share = self.shares.get(self._tenant_of(sequence))  # in any thread: adds none
        most = None if share is None else share.most_running
        if most is not None and sequence.num_seqs > most:
            raise ValueError(f"n {sequence.num_seqs} is more than the {most} sequences this tenant may run: lower it.")

    def schedule(self) -> Plan:
        self._count_running()
        return super().schedule()

    def fork(self, sequence: Sequence, others) -> None:
        others = list(others)
        super().fork(sequence, others)
        self._paid.update(dict.fromkeys(others, self._paid[sequence]))

    def finish(self, sequence: Sequence, *, wrong: bool = False) -> None:
        if sequence.state is State.RUNNING:
            self._count(sequence, self._clock() - self._counted_until)
        super().finish(sequence, wrong=wrong)
        self._paid.pop(sequence, None)

    def _count_running(self) -> None:
        """Tokens that running sequences got, and blocks they held, since the last call."""
        now = self._clock()
        seconds, self._counted_until = now - self._counted_until, now
        for sequence in self.running:
            self._count(sequence, seconds)

    def _count(self, sequence: Sequence, seconds: float) -> None:
        share, length = self.share_of(sequence), len(sequence.tokens)
        if tokens := length - self._paid[sequence]:  # fewer than none if a placeholder was taken back
            self._paid[sequence] = length
            share.answered += tokens
            share.counter += ANSWER * tokens / share.weight
        share.block_seconds += (len(sequence.blocks) - sequence.first_block) * seconds

    def _wait(self, sequence: Sequence) -> None:
        share = self.share_of(sequence)
        if share.head is None and sequence not in self._paid:
            self._lift(share)
        self._heap = share.queue
        super()._wait(sequence)

    def _lift(self, share: Share) -> None:
        """Of a tenant that has nothing waiting: it joins the others where they are."""
        waiting = [each.counter for each in self.shares.values() if each.head is not None]
        if waiting:
            share.counter = max(share.counter, min(waiting))
        elif self._last_left is not None:
            share.counter = max(share.counter, self._last_left.counter)

    def _first_waiting(self) -> Sequence | None:
        """`_heap`, from which the scheduler takes what it admits, is the queue of the tenant whose turn it is."""
        shares = [share for share in self.shares.values() if share.head is not None and share.may_run(share.head)]
        if not shares:
            return None
        first = min(shares, key=lambda share: share.turn)
        self._heap = first.queue
        return first.head

    def _admit(self, sequence: Sequence) -> bool:
        share = self.share_of(sequence)
        if not super()._admit(sequence):
            return False
        share.running += sequence.num_seqs
        if sequence not in self._paid:
            share.counter += PROMPT * sequence.num_uncomputed / share.weight
            self._paid[sequence] = sequence.num_tokens
        if share.head is None:
            self._last_left = share
        return True

    def _stop_running(self, sequence: Sequence) -> None:
        super()._stop_running(sequence)
        self.share_of(sequence).running -= sequence.num_seqs
