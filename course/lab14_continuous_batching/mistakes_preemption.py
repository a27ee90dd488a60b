"""Spoilers of lab 14's preemption: wrong victims, blocks lost or used twice, queues that starve a request."""

from itertools import count

from course.kit.exercises import KnownAnswers

# Which sequence to preempt

preemption_victim = KnownAnswers("preemption-victim")

preemption_victim.mistake(
    "anybody-but-me",
    {"s.rank > needy.rank": "s is not needy"},
    says="Blocks may be taken from later sequences only: an earlier one would take them back in its next "
    "step, and so on without end.",
)
preemption_victim.mistake(
    "also-me",
    {" if s.rank > needy.rank": ""},
    says="The sequence that needs the block can be its own victim here. If no later one runs, it waits: None.",
)
preemption_victim.mistake(
    "most-recently-used",
    {"-s.last_step": "s.last_step"},
    says="The least recently used sequence has the smallest last_step.",
)
preemption_victim.mistake(
    "highest-priority",
    {"lambda s: s.priority": "lambda s: -s.priority"},
    says="The lowest priority is the largest number: lower numbers are sooner.",
)
preemption_victim.mistake(
    "earliest-of-equals",
    {"(number(s), s.rank)": "number(s)"},
    says="Among equals the one of the largest rank gives way.",
)
preemption_victim.mistake(
    "always-the-last",
    {"(number(s), s.rank)": "s.rank"},
    says="The policy has no effect: you take the largest rank of all.",
)
preemption_victim.mistake(
    "by-arrival-instead-of-rank",
    {"s.rank > needy.rank": "s.rank[1] > needy.rank[1]"},
    says="Whether a sequence is behind the needy one is a question of rank, not of arrival alone.",
)
preemption_victim.mistake(
    "place-in-the-list-instead-of-rank",
    {"[s for s in running if s.rank > needy.rank]": "running[running.index(needy) + 1 :]"},
    says="Later is a matter of rank: the list of running sequences is in any order.",
)
preemption_victim.mistake(
    "latest-by-rank",
    {"lambda s: s.rank[1]": "lambda s: s.rank"},
    says='"latest" goes by arrival, rank[1], and not by the whole rank, which includes the priority.',
)
preemption_victim.mistake(
    "longest-by-computed-tokens",
    {"lambda s: s.num_tokens": "lambda s: s.num_computed"},
    says="The longest sequence has the most tokens, num_tokens, whether they are computed or not.",
)
preemption_victim.alternative(
    "sort-and-take-the-last",
    {
        "return max(behind, key=lambda s: (number(s), s.rank), default=None)": (
            "behind.sort(key=lambda s: s.rank)\n    return sorted(behind, key=number)[-1] if behind else None"
        )
    },
)


# Preempt and return

preempt_and_return = KnownAnswers("preempt-and-return")

preempt_and_return.mistake(
    "keeps-num-computed", {"sequence.num_computed = 0": "pass"}, expect="the keys and values of 0 tokens are kept"
)
preempt_and_return.mistake(
    "starts-the-answer-again",
    {"sequence.blocks = []": "sequence.blocks = []\n        del sequence.tokens[-1:]"},
    expect="what was sampled has been sent to its reader",
)
preempt_and_return.mistake(
    "blocks-not-released", {"pool.release(sequence.blocks)": "pass"}, expect="Each block is released once"
)
preempt_and_return.mistake(
    "still-names-its-blocks", {"sequence.blocks = []": "pass"}, expect="the sequence still names blocks"
)
preempt_and_return.mistake(
    "swaps-empty-blocks",
    {"held = pool.blocks_for(sequence.num_computed)": "held = len(sequence.blocks)"},
    expect="those with something in them",
)
preempt_and_return.mistake(
    "host-may-be-full", {"swap and held <= pool.free_host": "swap"}, expect="do not fit the host"
)
preempt_and_return.mistake(
    "hits-added-to-what-is-computed",
    {
        "max(sequence.num_computed, len(hits) * pool.block_size)": (
            "sequence.num_computed + len(hits) * pool.block_size"
        )
    },
    expect=r"after resume num_computed is",
)
preempt_and_return.mistake(
    "copies-over-the-hits",
    {"sequence.blocks, skip=len(hits)": "sequence.blocks"},
    expect="a hit is there already, and others are reading it",
)
preempt_and_return.mistake(
    "slots-stay-taken", {"fresh = pool": "sequence.host_blocks = []\n        fresh = pool"}, expect="they leak"
)
preempt_and_return.mistake("hits-counted-as-free", {" + pool.idle(hits)": ""}, expect="count before you take")
preempt_and_return.mistake(
    "asks-room-for-empty-blocks",
    {"held <= pool.free_host": "len(sequence.blocks) <= pool.free_host"},
    expect="preempt moves 0 blocks",
)
preempt_and_return.mistake(
    "held-hits-counted-twice", {"pool.idle(hits)": "len(hits)"}, expect="A hit that is held takes no available block"
)
preempt_and_return.mistake(
    "allocates-before-it-shares",
    {
        "sequence.blocks = pool.share(hits) + pool.allocate(fresh)": (
            "allocated = pool.allocate(fresh)\n        sequence.blocks = pool.share(hits) + allocated"
        )
    },
    expect="allocate before you share the hits",
)
preempt_and_return.mistake(
    "hits-only-without-a-swap",
    {
        "sequence.host_blocks = []\n        sequence.num_computed = max(": (
            "back, sequence.host_blocks = bool(sequence.host_blocks), []\n"
            "        sequence.num_computed = sequence.num_computed if back else max("
        )
    },
    expect="Hits may reach further than what was swapped",
)
preempt_and_return.mistake(
    "counts-the-hits-before-it-refuses",
    {
        "fresh = pool": "sequence.num_computed = max(sequence.num_computed, len(hits) * pool.block_size)\n"
        "        fresh = pool"
    },
    expect="resume returns False and leaves",
)
preempt_and_return.mistake(
    "forgets-what-was-swapped",
    {"sequence.blocks = []": "sequence.blocks, sequence.num_computed = [], 0"},
    expect="the keys and values of",
)


@preempt_and_return.alternative("allocate-after-a-look-at-every-block")
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

patient_queue = KnownAnswers("patient-queue")

patient_queue.mistake("strict-priority", {"arrival + self.patience * priority": "priority"}, expect="it starves")
patient_queue.mistake(
    "first-come-first-served", {"arrival + self.patience * priority, ": ""}, expect="0 later requests .* overtake"
)
patient_queue.mistake(
    "higher-number-is-sooner",
    {"arrival + self": "arrival - self"},
    expect="0 later requests|lower priority numbers are sooner",
)
patient_queue.mistake(
    "latest-of-equals",
    {"priority, arrival, name": "priority, -arrival, name"},
    expect="overtake one of priority 2|lower priority numbers are sooner",
)
patient_queue.mistake(
    "patience-added-once",
    {"self.patience * priority": "self.patience * min(1, priority)"},
    expect="overtake one of priority 2",
)
patient_queue.mistake(
    "arrival-is-the-length-of-the-queue", {"next(self.arrivals)": "len(self.heap)"}, expect="it starves"
)
patient_queue.mistake(
    "equals-by-name",
    {"priority, arrival, name": "priority, name"},
    expect="lower priority numbers are sooner|overtake one of priority 2",
)


@patient_queue.alternative("a-list-searched-at-each-pop")
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
