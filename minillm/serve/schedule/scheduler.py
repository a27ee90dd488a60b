"""Which tokens of which sequences the next forward pass computes.

There is no prefill phase and no decode phase: a sequence has `num_computed` tokens that catch up with its
`num_tokens`, and a step hands out a budget of tokens. A decoding sequence lacks 1 token, a new one its prompt, a hit in
the prefix cache or a return from the host starts with a larger num_computed: one line of arithmetic for all of them.

    1. sequences that lack one token get it, so that no prompt stalls them   (blocks short: preempt a later one)
    2. those within their prompt share what is left of the budget in pieces of at most `chunk`
    3. waiting sequences are admitted, strictly in order, while max_num_seqs and blocks allow
    4. what is left of budget and blocks goes to draft tokens (`drafts.py`)

Order is a number given at arrival, `arrival + patience · priority`: at most patience · Δpriority later ones overtake
anyone. Only later-ranked sequences are preempted for earlier ones, and every request fits the pool alone: the first in
order always goes on, ends, and makes the next one first. No livelock, no starvation, whatever the policy.
"""

from bisect import insort
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import count

from minillm.serve.checks import check_fits, check_scheduler
from minillm.serve.schedule.blocks import BlockPool, Prefix
from minillm.serve.schedule.drafts import add_drafts
from minillm.serve.schedule.held import Holdings
from minillm.serve.schedule.policies import POLICIES
from minillm.serve.schedule.sequence import Plan, Sequence, State

RUNNING = State.RUNNING  # looked up once: an enumeration's member costs as much as all else of a decoding sequence


class Scheduler:
    """`add` sequences, then: `plan = schedule()`, compute it, `advance(plan)`, append tokens, `finish` what is done.

    token_budget: tokens of a step, at least max_num_seqs. chunk: of one sequence in a step; None = the budget.
    preemption: "recompute" drops the blocks of a victim, "swap" copies them to the host while there is room.
    reserve: free blocks to keep per running sequence at admission; more means fewer preemptions. adapters_fit: whether
    these adapters can run at once. stages: steps that share the sequences, see `run/pipelined.py`.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        token_budget: int = 512,
        max_num_seqs: int = 64,
        chunk: int | None = None,
        policy: str = "latest",
        preemption: str = "recompute",
        patience: int = 64,
        reserve: int = 1,
        max_waiting: int | None = None,
        adapters_fit: Callable[[set[int]], bool] | None = None,
    ):
        numbers = {"token_budget": token_budget, "max_num_seqs": max_num_seqs, "patience": patience, "reserve": reserve}
        check_scheduler(policy, preemption, **numbers, chunk=chunk, max_waiting=max_waiting)
        self.pool, self.token_budget, self.max_num_seqs = pool, token_budget, max_num_seqs
        self.held = Holdings(pool)
        self.chunk, self.patience = chunk or token_budget, patience
        self.piece = min(self.chunk, token_budget) if self.held.slides else None  # see `Sequence.wanted`
        self.reserve, self.max_waiting, self.adapters_fit = reserve, max_waiting, adapters_fit
        self.swaps, self._victim_key = preemption == "swap", POLICIES[policy]
        self.step, self.stages = 0, 1
        self.handovers = None  # the `DecodeSide` of an engine with a prefill pool (`transfer/decode.py`)
        self._arrivals, self._forks = count(), count(1)
        self.reset()

    def reset(self) -> None:
        """Nothing waits, nothing runs and the pool is empty, whatever was before."""
        self.pool.reset()
        self.running: list[Sequence] = []  # in order of rank
        self.num_waiting = self.num_seqs = 0
        self._heap: list[tuple[tuple, Sequence]] = []  # cancelled ones stay until they come up

    def add(self, sequence: Sequence) -> None:
        """Queues it. ValueError if it could never run, RuntimeError if the queue is full."""
        self.check(sequence)
        self.check_queue()
        self.enqueue(sequence)

    def enqueue(self, sequence: Sequence) -> None:
        """Queues what was checked before."""
        arrival = next(self._arrivals)
        sequence.rank = (arrival + self.patience * sequence.priority, arrival, 0)
        self._wait(sequence)

    def check_queue(self, arriving: int = 0) -> None:
        """RuntimeError if the queue has no room for one more. arriving: sequences that are about to be queued."""
        waiting = self.num_waiting + arriving
        if self.max_waiting is not None and waiting >= self.max_waiting:
            raise RuntimeError(f"the queue is full ({waiting} wait, max_waiting {self.max_waiting}): try later.")

    def check(self, sequence: Sequence) -> None:
        """ValueError if a new sequence could never run."""
        check_fits(sequence, self.pool, self.piece, self.max_num_seqs)

    @property
    def adapters_in_use(self) -> set[int]:
        return {sequence.adapter for sequence in self.running} - {None}

    def schedule(self) -> Plan:
        """The next step. Empty only when nothing waits or runs, or all that does is under way or waits for keys."""
        self.step += 1
        plan, prompts, drafts = Plan(), [], 0
        batch, size, references = plan.batch, self.pool.block_size, self.pool.references
        share = -(-self.num_seqs // self.stages)  # of the sequences that end in a token to sample
        for sequence in self.running.copy():
            computed = sequence.num_computed
            drafts += sequence.num_draft_tokens
            if len(sequence.tokens) - computed != 1:
                short = sequence.state is RUNNING and sequence.wanted(self.piece) > len(sequence.blocks) * size
                if not sequence.ticket and (not short or self._grow(sequence, plan)):  # with one it waits for keys
                    prompts.append(sequence)
            elif sequence.state is not RUNNING or len(batch) >= share:  # preempted just now, for an earlier one
                continue
            elif (computed % size and references[sequence.blocks[-1]] == 1) or self._grow(sequence, plan):
                batch.append((sequence, 1))  # nearly always within a block of its own: nothing to grow
                sequence.last_step = self.step
                if (computed + 1) % size == 0:
                    self.held.cache(sequence, computed, computed + 1)
        budget = self.token_budget - len(batch)
        for sequence in self._prompts_in_turn(prompts):
            if sequence.state is RUNNING and (len(batch) < share or sequence.num_uncomputed > min(budget, self.chunk)):
                budget -= self._give(sequence, budget, plan)
        share = -(-min(self.num_seqs + self.num_waiting, self.max_num_seqs) // self.stages)
        while budget and not plan.preempted and (sequence := self._first_waiting()):
            is_full = len(batch) >= share and sequence.num_uncomputed <= min(budget, self.chunk)
            if is_full or not self._admit(sequence):
                break
            plan.admitted.append(sequence)
            drafts += sequence.num_draft_tokens
            if self.handovers is None or not self.handovers.begin(sequence):
                budget -= self._give(sequence, budget, plan)
        if drafts:
            add_drafts(plan, budget, self.held)
        return plan

    def advance(self, plan: Plan) -> list[Sequence]:
        """The plan is computed. Returns those whose last token was: their next one can be sampled."""
        complete = []
        for sequence, tokens in plan.batch:
            computed, known = sequence.num_computed + tokens, len(sequence.tokens)
            if computed >= known:  # more, if draft tokens were computed
                computed = known
                complete.append(sequence)
            sequence.num_computed = computed
        for sequence, _ in plan.batch if self.held.slides else ():
            self.held.trim(sequence, len(sequence.blocks))
        return complete

    def take_back(self, sequence: Sequence, start: int) -> None:
        """A pass spoilt what it wrote from `start` on: nobody may hit it, and it is computed again."""
        self.held.invalidate(sequence, start // self.pool.block_size)
        sequence.num_computed = start
        self.held.trim(sequence, self.pool.blocks_for(sequence.num_tokens - 1))
        if self.held.slides and start < sequence.num_tokens - 1:  # what those tokens see may be gone
            sequence.num_computed = 0
            self._preempt(sequence)

    def publish(self, sequence: Sequence, start: int) -> None:
        """Its tokens from place `start` on are known now, not only computed: the blocks they filled are shared."""
        if sequence.state is RUNNING:
            self.held.cache(sequence, start, sequence.num_computed)

    def fork(self, sequence: Sequence, others: Iterable[Sequence]) -> None:
        """Ends the prompt of a sequence of num_seqs n: n - 1 others, new ones of the same tokens, run on from it.

        They share its blocks; the first to write into one gets a copy.
        """
        sequence.num_seqs = 1
        for other in others:
            self.held.share(sequence, other)
            other.num_computed, other.last_step = sequence.num_computed, sequence.last_step
            other.block_hashes = list(sequence.block_hashes)
            other.rank, other.state = (*sequence.rank[:2], next(self._forks)), RUNNING
            insort(self.running, other, key=lambda s: s.rank)

    def finish(self, sequence: Sequence, *, wrong: bool = False) -> None:
        """Done, failed or cancelled, wherever it is: all it holds goes back. wrong: nobody may hit its blocks."""
        if sequence.state is RUNNING:
            self._stop_running(sequence)
            if wrong:
                self.held.invalidate(sequence)
        elif sequence.state is State.WAITING:
            self.num_waiting -= 1
        sequence.state = State.FINISHED
        self.held.release_all(sequence)

    def _give(self, sequence: Sequence, budget: int, plan: Plan) -> int:
        """Plans the next tokens of a sequence that has blocks for all; returns how many."""
        size, computed = self.pool.block_size, sequence.num_computed
        if budget and sequence.num_uncomputed > 1 and computed % size == 0:  # others may have computed it meanwhile
            chain = self._prefixes(sequence)[computed // size : len(sequence.blocks) - 1]
            found = [pool.lookup(chain) for pool in self.pool.kinds]
            hit = min(map(len, found))
            own = slice(computed // size, computed // size + hit)
            for (pool, mine), blocks in zip(self.held.tables(sequence), found, strict=True):
                pool.release(mine.blocks[own])
                mine.blocks[own] = pool.share(blocks[:hit])
            sequence.skip(size * hit)
        room = len(sequence.blocks) * size - sequence.num_computed
        tokens = min(sequence.num_uncomputed, budget, self.chunk, room)
        over = (sequence.num_computed + tokens) % size
        if self.pool.prefix_cache and over < tokens < sequence.num_uncomputed:
            tokens -= over  # pieces end where blocks end, so that others can take over whole blocks
        if tokens:
            plan.batch.append((sequence, tokens))
            sequence.last_step = self.step
            self.held.cache(sequence, computed, sequence.num_computed + tokens)
        return tokens

    def _grow(self, sequence: Sequence, plan: Plan) -> bool:
        """Blocks for the sequence's tokens, and the one it writes into its own. False: earlier ones hold the rest."""
        index = sequence.num_computed // self.pool.block_size
        while True:
            missing = self.pool.blocks_for(sequence.wanted(self.piece)) - len(sequence.blocks)
            shared = not missing and self.pool.references[sequence.blocks[index]] > 1
            if not missing and not shared:  # nearly always: the last block has room
                return True
            if missing + shared <= self.held.available:
                break
            later = [each for each in self.running[self.running.index(sequence) + 1 :] if each.num_uncomputed]
            if not later:
                return False  # it keeps its place and its blocks, and waits for a step
            victim = max(later, key=lambda s: (self._victim_key(s), s.rank))
            self._preempt(victim)
            plan.preempted.append(victim)
        self.held.allocate(sequence, missing)
        for pool, mine in self.held.tables(sequence) if shared else ():
            pool.copy_on_write(mine.blocks, index)
        return True

    def _admit(self, sequence: Sequence) -> bool:
        """Blocks for the tokens it wants, cached ones first; counted before anything is taken."""
        if self.num_seqs + sequence.num_seqs > self.max_num_seqs:
            return False
        if sequence.adapter is not None and not self.adapters_fit(self.adapters_in_use | {sequence.adapter}):
            return False
        found = self.held.hits(self._prefixes(sequence))
        hit = len(found[0])
        skipped = max(0, hit * self.pool.block_size - sequence.num_computed)
        wanted = self.pool.blocks_for(sequence.wanted(self.piece, skipped))
        firsts = [pool.first_needed(sequence.num_certain + skipped) for pool in self.pool.kinds]
        for pool, blocks, first in zip(self.pool.kinds, found, firsts, strict=True):
            fresh = wanted - max(first, hit)
            if fresh + pool.idle(blocks[first:]) > pool.available - self.reserve * len(self.running):
                return False
        for (pool, mine), blocks, first in zip(self.held.tables(sequence), found, firsts, strict=True):
            there, swapped = max(first, hit), mine.first_block
            mine.blocks = [0] * first + pool.share(blocks[first:]) + pool.allocate(wanted - there)
            pool.swap_in(mine.host_blocks, mine.blocks[swapped:], skip=max(0, there - swapped))
            mine.host_blocks, mine.first_block = [], first
        sequence.skip(skipped)
        self.held.cache(sequence, hit * self.pool.block_size, sequence.num_computed)
        heappop(self._heap)
        self.num_waiting, self.num_seqs = self.num_waiting - 1, self.num_seqs + sequence.num_seqs
        sequence.state = RUNNING
        insort(self.running, sequence, key=lambda s: s.rank)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to its place in the queue; its tokens stay, its blocks go, to the host if they are worth it."""
        self._stop_running(sequence)
        sequence.preemptions += 1
        if not (self.swaps and self.held.swap_out(sequence)):
            self.held.release_all(sequence)
            sequence.num_computed = 0
        self._wait(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        if sequence.ticket:
            self.handovers.give_up(sequence)
        self.running.remove(sequence)
        self.num_seqs -= sequence.num_seqs

    def _wait(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        self.num_waiting += 1
        heappush(self._heap, (sequence.rank, sequence))

    def _prompts_in_turn(self, prompts: list[Sequence]) -> list[Sequence]:
        return prompts

    def _first_waiting(self) -> Sequence | None:
        while self._heap and self._heap[0][1].state is State.FINISHED:
            heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def _prefixes(self, sequence: Sequence) -> list[Prefix]:
        """Of the full blocks that a hit may cover: at least the last token is computed, for its logits."""
        full = (sequence.num_tokens - 1) // self.pool.block_size if self.pool.prefix_cache else 0
        return sequence.prefixes(full, self.pool.block_size)
