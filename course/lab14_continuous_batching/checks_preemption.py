"""Lab 14, preemption: what a sequence gives up and wins back, by recomputation and by swap."""

import random
from heapq import heappop

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab14_continuous_batching.experiments import TINY, one_thread, play, requests
from course.lab14_continuous_batching.labelled_blocks import contents, draw_pool
from minillm.model import Transformer
from minillm.model.generate import generate
from minillm.serve import LLM, BlockPool, Prefix, Scheduler
from minillm.serve import Sequence as Seq
from minillm.serve.schedule.blocks import cache_namespace

ANSWERS = answers_of("14_continuous_batching")


@exercise(
    "preempt-and-return",
    minutes=30,
    difficulty=4,
    hints=(
        "Write down what each holds before and after. Recompute: nothing of the sequence remains in the pool, so how "
        "many of its tokens are computed? Swap: which of its blocks have anything in them?",
        "preempt: swap_out the blocks_for(num_computed) first blocks if so many fit free_host, release the others; "
        "else num_computed = 0 and release all. resume: first count (fresh blocks, plus hits without a holder, "
        "against available), then take: share the hits, allocate the rest, swap_in with skip=len(hits).",
    ),
)
def check_preemption(learner: type) -> Receipt:
    moved, due = 0, 0
    for swap, host, shared in (
        (False, 0, 0), (False, 16, 2), (True, 16, 0), (True, 16, 2), (True, 1, 0), (True, 16, 4), (True, None, 0),
    ) * 3:  # fmt: skip
        one, two = _one_round(learner, swap, host, shared)
        moved, due = moved + one, due + two
    for swap in (False, True):
        _refuses_what_does_not_fit(learner, swap)
    _takes_hits_beyond_what_was_swapped(learner)
    _takes_what_just_fits(learner)
    rows = [row("blocks moved to the host and back", due, moved)]
    model = Transformer(TINY, seed=2)
    for swap in (False, True):
        rows += _in_an_engine(learner, model, swap)
    return receipt("preempted and brought back", rows, open_rows=len(rows))


def _one_round(learner: type, swap: bool, host: int | None, shared: int) -> tuple[int, int]:
    """One sequence out and in, some of its first blocks also held by another one; (blocks moved, blocks due)."""
    pool, labelled, sequence, other = draw_pool(host, shared)
    computed, tokens, host = sequence.num_computed, list(sequence.tokens), pool.free_host
    held, size = pool.blocks_for(computed), pool.block_size
    fits = swap and held <= host
    hits = list(sequence.blocks[:shared])
    where = f"{'swap' if swap else 'recompute'}, {computed} of {len(tokens)} tokens computed, {host} free on the host"
    mine = learner()
    mine.preempt(sequence, pool, swap)
    labelled.settle()
    if sequence.tokens != tokens:
        raise CheckFailed(f"{where}: preempt changes the tokens; what was sampled has been sent to its reader")
    if sequence.blocks:
        raise CheckFailed(f"{where}: after preempt the sequence still names blocks {sequence.blocks}")
    if pool.used != len(other.blocks):
        raise CheckFailed(
            f"{where}: after preempt {pool.used} blocks are used; the other sequence holds {len(other.blocks)}. Each "
            "block is released once"
        )
    if (out := labelled.out) != (held if fits else 0):
        raise CheckFailed(
            f"{where}: preempt moves {out} blocks to the host, {held if fits else 0} are right: those with something "
            "in them, if all of them fit"
        )
    if sequence.num_computed != (computed if fits else 0):
        raise CheckFailed(
            f"{where}: after preempt num_computed is {sequence.num_computed}, but the keys and values of "
            f"{computed if fits else 0} tokens are kept"
        )
    if mine.resume(sequence, pool, hits) is not True:
        raise CheckFailed(f"{where}: {pool.available} blocks are available, yet resume does not return True")
    labelled.settle()
    if len(sequence.blocks) != pool.blocks_for(len(tokens)) or sequence.blocks[: len(hits)] != hits:
        raise CheckFailed(
            f"{where}: resume gives blocks {sequence.blocks}; {pool.blocks_for(len(tokens))} are needed, the hits "
            f"{hits} first"
        )
    if sequence.host_blocks or pool.free_host != host:
        raise CheckFailed(f"{where}: after resume {host - pool.free_host} slots on the host are still taken: they leak")
    back = max(0, held - len(hits)) if fits else 0
    if labelled.back != back:
        raise CheckFailed(
            f"{where}, {len(hits)} hits: resume moves {labelled.back} blocks back, {back} are right: a hit is there "
            "already, and others are reading it"
        )
    kept = max(computed if fits else 0, len(hits) * size)
    if sequence.num_computed != kept:
        raise CheckFailed(
            f"{where}, {len(hits)} hits: after resume num_computed is {sequence.num_computed}, but {kept} tokens have "
            "their keys and values"
        )
    if contents(labelled, sequence, size)[:kept] != tokens[:kept]:
        raise CheckFailed(f"{where}: after resume a block holds the keys and values of other tokens")
    references = [(s.blocks, pool.references) for s in (sequence, other)]
    if pool.used != len({*sequence.blocks, *other.blocks}) or any(r[b] < 1 for blocks, r in references for b in blocks):
        raise CheckFailed(f"{where}: after resume {pool.used} blocks are used, not those the two sequences name")
    return labelled.out + labelled.back, (held + back if fits else 0)


def _refuses_what_does_not_fit(learner: type, swap: bool) -> None:
    """A hit without a holder is one of the available blocks: counted once, and counted first."""
    pool, _, sequence, _ = draw_pool(16 if swap else 0, 2, spare=0, release_other=True)
    hits = list(sequence.blocks[:2])
    mine = learner()
    mine.preempt(sequence, pool, swap)
    taken = pool.allocate(pool.available - pool.blocks_for(sequence.num_tokens) + 1)
    before = (pool.available, list(pool.references), pool.free_host)
    kept = (sequence.num_computed, list(sequence.host_blocks))
    needed = pool.blocks_for(sequence.num_tokens)
    where = (
        f"{'swap' if swap else 'recompute'}, {pool.available} blocks are available, 2 of them the hits, {needed} needed"
    )
    try:
        done = mine.resume(sequence, pool, hits)
    except RuntimeError:
        raise CheckFailed(f"{where}: resume runs out of blocks halfway; count before you take") from None
    if done is not False or (pool.available, list(pool.references), pool.free_host) != before or sequence.blocks:
        raise CheckFailed(f"{where}: resume must return False and take nothing")
    if (now := (sequence.num_computed, list(sequence.host_blocks))) != kept:
        raise CheckFailed(
            f"{where}: resume returns False and leaves (num_computed, host_blocks) as {now}; they were {kept}, and the "
            "sequence goes on waiting with what it had"
        )
    pool.release(taken)


def _takes_hits_beyond_what_was_swapped(learner: type) -> None:
    """While a sequence was swapped out early in its prompt, another one has computed and cached more of the same."""
    size, computed = random.choice((3, 4, 5)), random.randint(1, 6)
    pool, tokens = BlockPool(40, size, num_host_blocks=16), [random.randrange(1000) for _ in range(10 * size)]
    hits, prefix = pool.allocate(random.randint(7, 9)), cache_namespace()
    for place, block in enumerate(hits):
        prefix = Prefix(prefix, tuple(tokens[place * size : (place + 1) * size]))
        pool.cache_block(block, prefix)
    sequence = Seq(tokens, len(tokens) + 8, name="q", num_computed=computed)
    sequence.blocks = pool.allocate(10)
    mine = learner()
    mine.preempt(sequence, pool, True)
    mine.resume(sequence, pool, list(hits))
    if (found := sequence.num_computed) != (due := len(hits) * size):
        raise CheckFailed(
            f"swapped out with {computed} tokens computed, and another sequence has cached {len(hits)} blocks since, "
            f"of {size} tokens that both have: after resume num_computed is {found}, but {due} tokens have their keys "
            "and values. Hits may reach further than what was swapped"
        )
    if pool.free_host < 16 or sequence.host_blocks:
        raise CheckFailed(f"all {computed} swapped tokens are hits, and after resume their host blocks are still taken")


def _takes_what_just_fits(learner: type) -> None:
    """A hit that another sequence holds needs no block of those available."""
    pool, _, sequence, _ = draw_pool(0, 2, spare=0)
    hits = list(sequence.blocks[:2])
    mine = learner()
    mine.preempt(sequence, pool, False)
    fresh = pool.blocks_for(sequence.num_tokens) - len(hits)
    pool.allocate(pool.available - fresh)
    if mine.resume(sequence, pool, hits) is not True:
        raise CheckFailed(
            f"{fresh + 2} blocks are needed; 2 of them are hits that another sequence holds, and {fresh} are "
            "available: that is enough, yet resume does not return True. A hit that is held takes no available block"
        )


@one_thread()
def _in_an_engine(learner: type, model: Transformer, swap: bool) -> list:
    """Greedy tokens of an engine that preempts and resumes as the learner does, against the naive loop's."""

    class Yours(Scheduler):
        mine = learner()

        def _preempt(self, sequence: Seq) -> None:
            self._stop_running(sequence)
            sequence.preemptions += 1
            self.mine.preempt(sequence, self.pool, self.swaps)
            self._wait(sequence)

        def _admit(self, sequence: Seq) -> bool:
            if not sequence.preemptions:
                return super()._admit(sequence)
            if self.num_seqs + sequence.num_seqs > self.max_num_seqs:
                return False
            hits = self.pool.lookup(self._prefixes(sequence))
            if not self.mine.resume(sequence, self.pool, hits):
                return False
            return self._seat(sequence)

        def _seat(self, sequence: Seq) -> bool:
            heappop(self._heap)
            self.num_waiting, self.num_seqs = self.num_waiting - 1, self.num_seqs + sequence.num_seqs
            sequence.state = type(sequence.state).RUNNING
            self.running.append(sequence)
            self.running.sort(key=lambda s: s.rank)
            return True

    how = "swap" if swap else "recompute"
    options = {"num_blocks": 8, "block_size": 4, "num_host_blocks": 8 if swap else 0}
    scheduling = {"token_budget": 24, "max_num_seqs": 6, "reserve": 0, "preemption": how}
    while True:  # until some are preempted
        arrivals = requests([(random.randint(6, 18), random.randint(6, 10)) for _ in range(6)])
        if play(arrivals, **options, **scheduling).preemptions > 1:
            break
    llm = LLM(model, scheduler=Yours, **options, **scheduling)
    prompts = [each.prompt for each in arrivals]
    found = llm.generate(prompts, [each.params for each in arrivals])
    same = sum(
        output.answers[0].ids == list(generate(model, output.prompt, each.params.max_tokens))
        for output, each in zip(found, arrivals, strict=True)
    )
    if same < len(found):
        raise CheckFailed(
            f"{how}: in an engine with your class {len(found) - same} of {len(found)} answers differ from the naive "
            "loop's: some block does not hold what num_computed says. One way to get there is to allocate before you "
            "share the hits, since allocating may give away a cached block that no sequence holds"
        )
    left = (llm.pool.used, llm.pool.num_host_blocks - llm.pool.free_host)
    return [
        row(f"{how}: answers equal to the naive loop's, of 6", 6, same),
        row("    preemptions on the way", None, sum(output.preemptions for output in found)),
        row("    blocks used afterwards, slots taken", (0, 0), left),
    ]
