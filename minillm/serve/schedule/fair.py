"""Tenants get equal service, whatever each asks for: the virtual token counter, and places that are taken back.

Sheng et al. 2024, "Fairness in Serving Large Language Models" (https://arxiv.org/abs/2401.00588), Algorithm 2. Each
tenant has a counter of the service it had: `PROMPT` for a prompt token that is computed, `ANSWER` for a token of an
answer, divided by the tenant's weight.

    a place in the batch is free ──▶ the tenant with the smallest counter among those that wait ──▶ its first request
    a tenant comes back          ──▶ its counter is lifted to the smallest of those that wait: idleness is not saved up
    no place is free             ──▶ a tenant that holds fewer than another takes the other's youngest sequence's place
    a tenant crowds              ──▶ its prompts take no more of a step than keeps the places full (`even_steps.py`)

It is work-conserving: a tenant alone gets everything. Of two tenants that both always wait, the service differs by at
most 2 · max(PROMPT · longest prompt, ANSWER · tokens that fit the pool), however long it lasts (Section 4). The order
within a tenant, preemption for want of blocks and everything else are the `Scheduler`'s. Prompt tokens found in the
cache cost nothing; one that is computed again after a preemption was paid before.

The third and the fourth line are not the paper's. The third: a counter decides who is next, and whoever is next may
still wait until an answer of the tenant that filled the batch ends. What a tenant holds is its part of the places or of
the blocks, whichever is larger, divided by its weight (dominant resource: Ghodsi et al. 2011,
https://www.usenix.org/conference/nsdi11/dominant-resource-fairness-fair-allocation-multiple-resource-types). A place is
taken only if the other still holds no less afterwards, so that it cannot take it back, and only from a tenant whose
counter is at most `ahead` behind: so much sooner may the requests of a burst run, and the bound above grows by it. A
sequence that gave way keeps its tokens, and its blocks while they are cached.

The fourth: who comes then has a place, and waits for the step that runs and for that of its own prompt. Prompts of a
tenant that crowds would make both of them long.
"""

import math
from collections.abc import Callable, Mapping

from minillm.serve.schedule.blocks import BlockPool
from minillm.serve.schedule.even_steps import prompt_tokens_needed
from minillm.serve.schedule.scheduler import Scheduler
from minillm.serve.schedule.sequence import Plan, Sequence, State
from minillm.serve.schedule.share import Share, salt_of

PROMPT, ANSWER = 1, 2  # service of a token: an answer's needs a pass of its own (the paper's weights)
AHEAD_STEPS = 4  # see `ahead`
MAY_COME = 4096  # steps after its last request, in which a tenant is expected back
MOST_REMEMBERED = 1024  # tenants that were not named at the start, if fewer are active


class FairScheduler(Scheduler):
    """A `Scheduler` that admits by the virtual token counter.

    shares: by tenant; an unknown one gets weight 1, and is forgotten some time after it has left (`MOST_REMEMBERED`).
    take_back: False leaves every sequence where it is, and even_steps: False lets prompts fill a step, as in the paper.
    ahead: of the service, by which a tenant that takes a place may be ahead; None = the tokens of four steps. clock:
    for block-seconds, 0 at all times without. tenant_of: whose a sequence is.

        LLM(model, scheduler=partial(FairScheduler, shares={"ada": Share(weight=2)}))
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        shares: Mapping[str, Share] | None = None,
        take_back: bool = True,
        even_steps: bool = True,
        ahead: int | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        tenant_of: Callable[[Sequence], str] = salt_of,
        **options,
    ):
        self.shares, self._given = dict(shares or {}), frozenset(shares or {})
        self.take_back, self.even_steps = take_back, even_steps
        self._clock, self._tenant_of = clock, tenant_of
        super().__init__(pool, **options)
        self.ahead = AHEAD_STEPS * self.token_budget if ahead is None else ahead

    def reset(self) -> None:
        super().reset()
        self._paid: dict[Sequence, int] = {}  # tokens of a sequence that are counted, once it was admitted
        self._last_left: Share | None = None  # whose queue was the last to become empty
        self._counted_until = self._clock()
        self._left = 0.0  # prompt tokens that this step still takes of tenants that crowd
        for share in self.shares.values():
            share.queue, share.running, share.crowds = [], 0, False

    def share_of(self, sequence: Sequence) -> Share:
        tenant = self._tenant_of(sequence)
        if (share := self.shares.get(tenant)) is None:
            self._forget()
            share = self.shares[tenant] = Share()
        return share

    def _forget(self) -> None:
        """Makes room for one more. The smallest counters go first: on their return they are lifted as they would be."""
        if len(self.shares) - len(self._given) < MOST_REMEMBERED:
            return
        others = [(share.counter, tenant) for tenant, share in self.shares.items() if tenant not in self._given]
        idle = [each for each in sorted(others) if not self.shares[each[1]].is_active]
        for _, tenant in idle[: MOST_REMEMBERED // 2]:
            del self.shares[tenant]

    def check(self, sequence: Sequence) -> None:
        super().check(sequence)
        share = self.shares.get(self._tenant_of(sequence))  # in any thread: adds none
        most = None if share is None else share.most_running
        if most is not None and sequence.num_seqs > most:
            raise ValueError(f"n {sequence.num_seqs} is more than the {most} sequences this tenant may run: lower it.")

    def schedule(self) -> Plan:
        self._count_running()
        self._left = self._prompt_tokens_left() if self.even_steps else float("inf")
        admitted, preempted = self._take_back() if self.take_back else ([], [])
        plan = super().schedule()
        plan.admitted[:0], plan.preempted[:0] = admitted, preempted
        return plan

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
            share.mix.add(answers=tokens)
            share.counter += ANSWER * tokens / share.weight
        share.block_seconds += _num_held(sequence) * seconds

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

    def _may_be_next(self) -> list[Share]:
        return [share for share in self.shares.values() if share.head is not None and share.may_run(share.head)]

    def _first_waiting(self) -> Sequence | None:
        shares = [share for share in self._may_be_next() if self._left > 0 or not share.crowds]
        return min(shares, key=lambda share: share.turn).head if shares else None

    def _admit(self, sequence: Sequence) -> bool:
        share = self.share_of(sequence)
        self._heap = share.queue  # from which the scheduler takes what it admits
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

    def _prompts_in_turn(self, prompts: list[Sequence]) -> list[Sequence]:
        """First those of tenants that do not crowd, and of these of the one with fewer places."""

        def turn(sequence: Sequence) -> tuple:
            share = self.share_of(sequence)
            return share.crowds, share.running / share.weight

        return sorted(prompts, key=turn)

    def _prompt_tokens_left(self) -> float:
        """Of a step, for tenants that crowd: those that want more than their part of the places, and are not behind
        others in service, while others may come (`even_steps.py`)."""
        about: list[Share] = []
        for tenant, share in self.shares.items():
            share.crowds = False
            if share.is_active:
                share.last_step = self.step + 1
            if tenant and share.last_step and self.step - share.last_step < MAY_COME:
                about.append(share)
        if len(about) < 2:
            return math.inf
        weights, places = sum(share.weight for share in about), self.max_num_seqs
        most = max((share.counter for share in about if share.is_active), default=0.0)
        for share in about:
            is_behind = share.counter + self.ahead / share.weight < most
            wanted = share.running + len(share.queue)
            share.crowds = not is_behind and wanted * weights > self.max_num_seqs * share.weight
            places -= 0 if share.crowds else share.running
        needed = prompt_tokens_needed([share.mix for share in about if share.crowds], places)
        return max(self.pool.block_size, needed)

    def _give(self, sequence: Sequence, budget: int, plan: Plan) -> int:
        if sequence.num_uncomputed == 1:
            return super()._give(sequence, budget, plan)
        share = self.share_of(sequence)
        if share.crowds and self._left < budget:
            budget = max(0, math.ceil(self._left))
        given = super()._give(sequence, budget, plan)
        self._left -= given
        share.mix.add(prompts=given)
        return given

    def _take_back(self) -> tuple[list[Sequence], list[Sequence]]:
        """Before a step is planned: sequences that are admitted because another tenant holds more, and those that made
        room for them."""
        admitted, preempted = [], []
        budget = self.token_budget - len(self.running)
        while budget > 0 and (claim := self._first_claim()):
            sequence, victims = claim
            for victim in victims:
                self.share_of(victim).gave_way += 1
                self._preempt(victim)
            preempted += victims
            if not self._admit(sequence):  # a victim's block was counted that it hits itself
                break
            admitted.append(sequence)
            budget -= sequence.num_uncomputed
        return admitted, preempted

    def _first_claim(self) -> tuple[Sequence, list[Sequence]] | None:
        """The first waiting sequence, in turn, whose tenant may take places from another, and whom to preempt for it:
        nobody, if it fits before others that are admitted by their counters."""
        waiting = self._may_be_next()
        if len(waiting) == 1 and waiting[0].running == self.num_seqs:
            return None  # a tenant alone, as in most steps
        running = self._running_by_tenant()
        for share in sorted(waiting, key=lambda share: share.turn):
            if (victims := self._victims(share, running)) is not None:
                return share.head, victims
        return None

    def _victims(self, mine: Share, running: dict[str, list[Sequence]]) -> list[Sequence] | None:
        """Whom to preempt so that a tenant's first waiting sequence fits. None if nobody else would still hold as much
        as this tenant then, or if those who would cannot make enough room. running: of each tenant, the youngest last.
        """
        sequence = mine.head
        tenant, seats, blocks = self._tenant_of(sequence), *self._missing(sequence)
        own, wanted = running.get(tenant, []), self.pool.blocks_for(sequence.wanted(self.piece))
        holds = self._part(own, sequence.num_seqs, wanted) / mine.weight
        least = mine.counter - self.ahead / mine.weight
        left = {
            name: [each for each in theirs if each.num_uncomputed]  # none whose token is under way
            for name, theirs in running.items()
            if name != tenant and self.shares[name].counter >= least
        }

        def after(name: str) -> float:
            return self._part(left[name][:-1]) / self.shares[name].weight

        victims: list[Sequence] = []
        if not left or max(map(after, left)) < holds:
            return None
        while seats > 0 or blocks > 0:
            name = max(left, key=after)
            if after(name) < holds:
                return None
            victims.append(victim := left[name].pop())
            seats -= victim.num_seqs
            blocks -= self.reserve + sum(self.pool.references[block] == 1 for block in victim.held_blocks)
        return victims

    def _running_by_tenant(self) -> dict[str, list[Sequence]]:
        """Each tenant's running sequences, the youngest last."""
        found: dict[str, list[Sequence]] = {}
        for sequence in self.running:
            found.setdefault(self._tenant_of(sequence), []).append(sequence)
        return found

    def _part(self, sequences: list[Sequence], seats: int = 0, blocks: int = 0) -> float:
        """The part of the places or of the blocks that these hold, whichever is larger, with so many more."""
        seats += sum(each.num_seqs for each in sequences)
        blocks += sum(map(_num_held, sequences))
        return max(seats / self.max_num_seqs, blocks / self.pool.total)

    def _missing(self, sequence: Sequence) -> tuple[int, int]:
        """Places and blocks that it lacks to be admitted; none, or fewer, if it has them."""
        if sequence.adapter is not None and not self.adapters_fit(self.adapters_in_use | {sequence.adapter}):
            return self.max_num_seqs + 1, 0  # more than anybody can give
        hits = [] if self.piece is not None else self.pool.lookup(self._prefixes(sequence))
        fresh = self.pool.blocks_for(sequence.wanted(self.piece)) - len(hits) + self.pool.idle(hits)
        seats = self.num_seqs + sequence.num_seqs - self.max_num_seqs
        return seats, fresh + self.reserve * len(self.running) - self.pool.available


def _num_held(sequence: Sequence) -> int:
    return len(sequence.blocks) - sequence.first_block
