"""Spoilers of lab 14's preemption: wrong victims, blocks lost or used twice, queues that starve a request."""

import heapq
from collections import deque
from itertools import count

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake

ANSWERS = answers_of("14_continuous_batching")


# Which sequence to preempt


def _number(sequence, policy):
    return {
        "latest": sequence.rank[1],
        "longest": sequence.num_tokens,
        "lowest priority": sequence.priority,
        "least recently used": -sequence.last_step,
    }[policy]


def _pick(candidates, policy, number=_number):
    return max(candidates, key=lambda s: (number(s, policy), s.rank), default=None)


@mistake(
    "preemption-victim",
    "anybody-but-me",
    says="Blocks may be taken from later sequences only: an earlier one would take them back in its next "
    "step, and so on without end.",
)
def anybody(running, needy, policy):
    return _pick([s for s in running if s is not needy], policy)


@mistake(
    "preemption-victim",
    "also-me",
    says="The sequence that needs the block can be its own victim here. If no later one runs, it waits: None.",
)
def also_me(running, needy, policy):
    return _pick(running, policy)


@mistake("preemption-victim", "most-recently-used", says="The least recently used sequence has the smallest last_step.")
def most_recently(running, needy, policy):
    flipped = lambda s, p: s.last_step if p == "least recently used" else _number(s, p)  # noqa: E731
    return _pick([s for s in running if s.rank > needy.rank], policy, flipped)


@mistake(
    "preemption-victim", "highest-priority", says="The lowest priority is the largest number: lower numbers are sooner."
)
def highest_priority(running, needy, policy):
    flipped = lambda s, p: -s.priority if p == "lowest priority" else _number(s, p)  # noqa: E731
    return _pick([s for s in running if s.rank > needy.rank], policy, flipped)


@mistake("preemption-victim", "earliest-of-equals", says="Among equals the one of the largest rank gives way.")
def earliest_of_equals(running, needy, policy):
    return max((s for s in running if s.rank > needy.rank), key=lambda s: _number(s, policy), default=None)


@mistake("preemption-victim", "always-the-last", says="The policy has no effect: you take the largest rank of all.")
def always_last(running, needy, policy):
    return max((s for s in running if s.rank > needy.rank), key=lambda s: s.rank, default=None)


@mistake(
    "preemption-victim",
    "by-arrival-instead-of-rank",
    says="Whether a sequence is behind the needy one is a question of rank, not of arrival alone.",
)
def by_arrival(running, needy, policy):
    return _pick([s for s in running if s.rank[1] > needy.rank[1]], policy)


@mistake(
    "preemption-victim",
    "latest-by-rank",
    says='"latest" goes by arrival, rank[1], and not by the whole rank, which includes the priority.',
)
def latest_by_rank(running, needy, policy):
    return _pick(
        [s for s in running if s.rank > needy.rank], policy, lambda s, p: s.rank if p == "latest" else _number(s, p)
    )


@mistake(
    "preemption-victim",
    "longest-by-computed-tokens",
    says="The longest sequence has the most tokens, num_tokens, whether they are computed or not.",
)
def longest_computed(running, needy, policy):
    flipped = lambda s, p: s.num_computed if p == "longest" else _number(s, p)  # noqa: E731
    return _pick([s for s in running if s.rank > needy.rank], policy, flipped)


@alternative("preemption-victim", "sort-and-take-the-last")
def sorted_victim(running, needy, policy):
    behind = sorted((s for s in running if s.rank > needy.rank), key=lambda s: s.rank)
    return sorted(behind, key=lambda s: _number(s, policy))[-1] if behind else None  # sorts are stable


# Preempt and return


@mistake("preempt-and-return", "keeps-num-computed", expect="the keys and values of 0 tokens are kept")
class KeepsCount(ANSWERS.Preemption):
    def preempt(self, sequence, pool, swap):
        computed = sequence.num_computed
        super().preempt(sequence, pool, swap)
        sequence.num_computed = computed


@mistake("preempt-and-return", "starts-the-answer-again", expect="what was sampled has been sent to its reader")
class ForgetsAnswer(ANSWERS.Preemption):
    def preempt(self, sequence, pool, swap):
        super().preempt(sequence, pool, swap)
        del sequence.tokens[-1:]


@mistake("preempt-and-return", "blocks-not-released", expect="Each block is released once")
class Leaks(ANSWERS.Preemption):
    def preempt(self, sequence, pool, swap):
        sequence.blocks, sequence.num_computed = [], 0


@mistake("preempt-and-return", "still-names-its-blocks", expect="the sequence still names blocks")
class KeepsTable(ANSWERS.Preemption):
    def preempt(self, sequence, pool, swap):
        pool.release(sequence.blocks)
        sequence.num_computed = 0


@mistake("preempt-and-return", "swaps-empty-blocks", expect="those with something in them")
class SwapsAll(ANSWERS.Preemption):
    def preempt(self, sequence, pool, swap):
        if swap and len(sequence.blocks) <= pool.free_host:
            sequence.host_blocks = pool.swap_out(sequence.blocks)
        else:
            sequence.num_computed = 0
            pool.release(sequence.blocks)
        sequence.blocks = []


@mistake("preempt-and-return", "host-may-be-full", expect="do not fit the host")
class AlwaysSwaps(ANSWERS.Preemption):
    def preempt(self, sequence, pool, swap):
        if not swap:
            return super().preempt(sequence, pool, swap)
        held = pool.blocks_for(sequence.num_computed)
        sequence.host_blocks = pool.swap_out(sequence.blocks[:held])
        pool.release(sequence.blocks[held:])
        sequence.blocks = []


@mistake("preempt-and-return", "hits-added-to-what-is-computed", expect=r"after resume num_computed is")
class CountsTwice(ANSWERS.Preemption):
    def resume(self, sequence, pool, hits):
        computed = sequence.num_computed
        if done := super().resume(sequence, pool, hits):
            sequence.num_computed = computed + len(hits) * pool.block_size
        return done


@mistake("preempt-and-return", "copies-over-the-hits", expect="a hit is there already, and others are reading it")
class OverwritesHits(ANSWERS.Preemption):
    def resume(self, sequence, pool, hits):
        fresh = pool.blocks_for(sequence.num_tokens) - len(hits)
        if fresh + pool.idle(hits) > pool.available:
            return False
        sequence.blocks = pool.share(hits) + pool.allocate(fresh)
        pool.swap_in(sequence.host_blocks, sequence.blocks)
        sequence.host_blocks = []
        sequence.num_computed = max(sequence.num_computed, len(hits) * pool.block_size)
        return True


@mistake("preempt-and-return", "slots-stay-taken", expect="they leak")
class LeaksSlots(ANSWERS.Preemption):
    def resume(self, sequence, pool, hits):
        sequence.host_blocks = []
        return super().resume(sequence, pool, hits)


@mistake("preempt-and-return", "hits-counted-as-free", expect="count before you take")
class CountsIdleTwice(ANSWERS.Preemption):
    def resume(self, sequence, pool, hits):
        fresh = pool.blocks_for(sequence.num_tokens) - len(hits)
        if fresh > pool.available:
            return False
        sequence.blocks = pool.share(hits) + pool.allocate(fresh)
        pool.swap_in(sequence.host_blocks, sequence.blocks, skip=len(hits))
        sequence.host_blocks = []
        sequence.num_computed = max(sequence.num_computed, len(hits) * pool.block_size)
        return True


@mistake("preempt-and-return", "asks-room-for-empty-blocks", expect="preempt moves 0 blocks")
class RoomForEmpty(ANSWERS.Preemption):
    def preempt(self, sequence, pool, swap):
        super().preempt(sequence, pool, swap and len(sequence.blocks) <= pool.free_host)


@mistake("preempt-and-return", "held-hits-counted-twice", expect="A hit that is held takes no available block")
class CountsHeldHits(ANSWERS.Preemption):
    def resume(self, sequence, pool, hits):
        if pool.blocks_for(sequence.num_tokens) > pool.available:
            return False
        return super().resume(sequence, pool, hits)


@mistake("preempt-and-return", "allocates-before-it-shares", expect="Share the hits before you allocate")
class AllocatesFirst(ANSWERS.Preemption):
    def resume(self, sequence, pool, hits):
        fresh = pool.blocks_for(sequence.num_tokens) - len(hits)
        if fresh + pool.idle(hits) > pool.available:
            return False
        taken = pool.allocate(fresh)
        sequence.blocks = pool.share(hits) + taken
        pool.swap_in(sequence.host_blocks, sequence.blocks, skip=len(hits))
        sequence.host_blocks = []
        sequence.num_computed = max(sequence.num_computed, len(hits) * pool.block_size)
        return True


@mistake("preempt-and-return", "forgets-what-was-swapped", expect="the keys and values of")
class ForgetsSwapped(ANSWERS.Preemption):
    def preempt(self, sequence, pool, swap):
        super().preempt(sequence, pool, swap)
        sequence.num_computed = 0


@alternative("preempt-and-return", "allocate-after-a-look-at-every-block")
class Slowly:
    def preempt(self, sequence, pool, swap):
        size, held = pool.block_size, 0
        while held * size < sequence.num_computed:
            held += 1
        if swap and held <= pool.free_host:
            sequence.host_blocks = pool.swap_out(sequence.blocks[:held])
            sequence.blocks = sequence.blocks[held:]
        else:
            sequence.num_computed = 0
        while sequence.blocks:
            pool.release([sequence.blocks.pop()])

    def resume(self, sequence, pool, hits):
        fresh = pool.blocks_for(sequence.num_tokens) - len(hits)
        unheld = [block for block in hits if pool.references[block] == 0]
        if pool.available - len(unheld) < fresh:
            return False
        for block in hits:
            sequence.blocks += pool.share([block])
        for _ in range(fresh):
            sequence.blocks += pool.allocate(1)
        if sequence.host_blocks:
            pool.swap_in(sequence.host_blocks, sequence.blocks, skip=len(hits))
        sequence.host_blocks = []
        if sequence.num_computed < len(hits) * pool.block_size:
            sequence.num_computed = len(hits) * pool.block_size
        return True


# A queue without starvation


@mistake("patient-queue", "strict-priority", expect="it starves")
class Strict:
    def __init__(self, patience):
        self.waiting, self.arrivals = [], count()

    def push(self, name, priority):
        self.waiting.append((priority, next(self.arrivals), name))

    def pop(self):
        self.waiting.sort()
        return self.waiting.pop(0)[-1]


@mistake("patient-queue", "first-come-first-served", expect="0 later requests .* overtake")
class FirstCome:
    def __init__(self, patience):
        self.waiting = deque()

    def push(self, name, priority):
        self.waiting.append(name)

    def pop(self):
        return self.waiting.popleft()


@mistake("patient-queue", "higher-number-is-sooner", expect="0 later requests|lower priority numbers are sooner")
class Reversed(ANSWERS.PatientQueue):
    def push(self, name, priority):
        super().push(name, -priority)


@mistake("patient-queue", "latest-of-equals", expect="overtake one of priority 2|lower priority numbers are sooner")
class LatestOfEquals(ANSWERS.PatientQueue):
    def push(self, name, priority):
        arrival = next(self.arrivals)
        heapq.heappush(self.heap, (arrival + self.patience * priority, -arrival, name))


@mistake("patient-queue", "patience-added-once", expect="overtake one of priority 2")
class Once(ANSWERS.PatientQueue):
    def push(self, name, priority):
        super().push(name, min(1, priority))


@mistake("patient-queue", "arrival-is-the-length-of-the-queue", expect="it starves")
class LengthForArrival(ANSWERS.PatientQueue):
    def push(self, name, priority):
        arrival = len(self.heap)
        heapq.heappush(self.heap, (arrival + self.patience * priority, arrival, name))


@mistake("patient-queue", "equals-by-name", expect="lower priority numbers are sooner|overtake one of priority 2")
class EqualsByName(ANSWERS.PatientQueue):
    def push(self, name, priority):
        heapq.heappush(self.heap, (next(self.arrivals) + self.patience * priority, name))


@alternative("patient-queue", "a-list-searched-at-each-pop")
class Searched:
    def __init__(self, patience):
        self.patience, self.waiting, self.arrivals = patience, {}, count()

    def push(self, name, priority):
        arrival = next(self.arrivals)
        self.waiting[name] = (arrival + self.patience * priority, arrival)

    def pop(self):
        name = min(self.waiting, key=self.waiting.get)
        del self.waiting[name]
        return name
