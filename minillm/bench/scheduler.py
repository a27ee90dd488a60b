"""What scheduling costs: microseconds per scheduled sequence, the same with a long queue or a full cache.

Both sides are minillm's scheduler and block pool, without a model, with so many sequences running: `theirs` with
nothing else, `ours` with thousands of requests waiting, of cached blocks in the pool, or both. So the ratio says what
these cost: 1 = nothing. Prompts and answers have 64 tokens and end one after the other; whoever ends is replaced at
once, so that admission, lookup of prefixes, allocation, eviction and release are part of the steps that are timed.
Time is that of the thread on the processor: whoever else uses the machine is not the scheduler's cost.
"""

import time
from collections.abc import Sequence as List
from itertools import count

from minillm.bench.harness import BenchRow, bench_row, check_repeats, side_by_side
from minillm.serve import BlockPool, Prefix, Scheduler, Sequence
from minillm.serve.schedule.blocks import cache_namespace
from minillm.serve.schedule.drafts import commit_accepted

PROMPT, ANSWER, BLOCK_SIZE = 64, 64, 16
RUNNING = (16, 128, 1024)
MANY = 10_000
SCHEDULED = 4096  # sequences per sample, about: a sample takes some 20 ms


def rows(repeats: int = 15, running: List[int] = RUNNING, many: int = MANY) -> list[BenchRow]:
    """For each number of running sequences: `many` waiting, `many` cached blocks, both; µs per scheduled sequence."""
    check_repeats(repeats)
    found = []
    for number in running:
        theirs = Steady(number)
        for waiting, cached in ((many, 0), (0, many), (many, many)):
            ours = Steady(number, waiting, cached)
            compared = side_by_side(lambda a=ours, b=theirs: same_plans(a, b), ours.sample, theirs.sample, repeats)
            what = " and ".join(f"{n:,} {name}" for n, name in ((waiting, "waiting"), (cached, "cached")) if n)
            name = f"scheduler, {number:,} running, {what}"
            found.append(bench_row(name, "the same, none waiting or cached", compared, "µs per sequence", scale=1e6))
    return found


class Steady:
    """A scheduler with so many sequences running, always: each step some end and as many come."""

    def __init__(self, running: int, waiting: int = 0, cached: int = 0):
        blocks = running * -(-(PROMPT + ANSWER) // BLOCK_SIZE)
        self.pool = BlockPool(blocks + running + cached, BLOCK_SIZE)
        self.scheduler = Scheduler(self.pool, token_budget=running * (PROMPT + 1), max_num_seqs=running)
        self.running, self._number = running, count()
        self._fill(cached)
        for place in range(running):  # the first ones are cut short, so that they do not all end together
            self._add(1 + place * ANSWER // running)
        for _ in range(waiting):
            self._add(ANSWER)
        for _ in range(ANSWER):
            self.step()

    def sample(self) -> float:
        """Seconds per scheduled sequence."""
        scheduled, start = 0, time.thread_time()
        while scheduled < SCHEDULED:
            scheduled += self.step()
        return (time.thread_time() - start) / scheduled

    def step(self) -> int:
        """What the engine does with the scheduler in a step; returns how many sequences the step computed."""
        scheduler = self.scheduler
        plan = scheduler.schedule()
        for sequence in scheduler.advance(plan):
            sequence.tokens.append(7)
            commit_accepted(sequence, scheduler.held)
            if sequence.num_tokens == sequence.limit:
                scheduler.finish(sequence)
                self._add(ANSWER)
        return len(plan.batch)

    def _add(self, answer: int) -> None:
        number = next(self._number)
        prompt = [number, *range(1, PROMPT)]  # no two begin alike: every lookup misses
        self.scheduler.add(Sequence(prompt, PROMPT + answer))

    def _fill(self, cached: int) -> None:
        """So many blocks that nobody holds any more and a hit could revive."""
        blocks = self.pool.allocate(cached)
        for number, block in enumerate(blocks):
            self.pool.cache_block(block, Prefix(cache_namespace(salt="old"), (number,) * BLOCK_SIZE))
        self.pool.release(blocks)


def same_plans(ours: Steady, theirs: Steady) -> bool:
    """Whether both sides compute the same number of sequences in each step, all that run, and lose no block."""
    counts = [(ours.step(), theirs.step()) for _ in range(ANSWER // 2)]
    sound = all(
        side.pool.free + side.pool.cached + side.pool.used == side.pool.total
        and side.pool.used == sum(len(sequence.blocks) for sequence in side.scheduler.running)
        for side in (ours, theirs)
    )
    return sound and all(mine == other == ours.running for mine, other in counts)
