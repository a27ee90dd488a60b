"""Draft tokens in a step (`minillm.serve.speculate`): their blocks, and what is left of those once they are checked.

They preempt nobody, delay no prompt and are not published: only their own sequence sees them.
"""

from minillm.serve.schedule.held import Holdings
from minillm.serve.schedule.sequence import Plan, Sequence


def add_drafts(plan: Plan, budget: int, held: Holdings) -> None:
    """Into a plan, as many as the rest of the budget and of the blocks allows."""
    pool = held.pool
    for place, (sequence, tokens) in enumerate(plan.batch):
        if sequence.num_draft_tokens and tokens == sequence.num_uncomputed:
            room = (len(sequence.blocks) + held.available) * pool.block_size - sequence.num_tokens
            drafts = min(sequence.num_draft_tokens, budget, room)
            missing = pool.blocks_for(sequence.num_tokens + drafts) - len(sequence.blocks)
            held.allocate(sequence, max(0, missing))
            plan.batch[place] = sequence, tokens + drafts
            budget -= drafts


def commit_accepted(sequence: Sequence, held: Holdings) -> None:
    """Its new tokens are verified: the blocks they filled are shared, those of rejected draft tokens go back."""
    size, before, computed = held.pool.block_size, sequence.num_computed, len(sequence.tokens) - 1
    sequence.num_computed = computed
    if before // size < computed // size:  # for most sequences of a step neither is to be done
        held.cache(sequence, before, computed)
    if computed <= (len(sequence.blocks) - 1) * size or held.slides:
        held.trim(sequence, -(-computed // size))
