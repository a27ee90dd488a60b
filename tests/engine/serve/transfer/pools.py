"""Prefill pools for these tests, and what is left of them."""

import time

from minillm.serve import LLM, over_ranks
from minillm.serve.transfer import PrefillPool
from minillm.serve.transfer.wire import dial
from tests.engine.serve.ranks.programs import TIGHT, drive, model_of, requests_of

OPTIONS = {"num_blocks": 40, "block_size": 4, "token_budget": 32, "max_num_seqs": 8, "chunk": 5}  # of the pool
PATIENCE_S = 240
SEED, COUNT = 6, 12


def until(fits, what):
    end = time.monotonic() + PATIENCE_S
    while not fits():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def pool_of(variant="plain", ranks=1, **options):
    return PrefillPool.spawn(model_of(variant), ranks, **{"min_tokens": 4, "timeout_s": PATIENCE_S} | OPTIONS | options)


def state_of(pool, layout):
    """What the pool's engine holds: blocks, requests, bytes that are not sent yet."""
    line = dial(pool.at.address)
    try:
        line.tell(kind="control", peer=0, layout=layout.to_json())
        line.hear(PATIENCE_S)
        line.tell(state=True)
        return line.hear(PATIENCE_S)
    finally:
        line.close()


def is_idle(pool, layout):
    return state_of(pool, layout) == {"used": 0, "unfinished": 0, "staged": 0}


def driven(group, at, names_and_options):
    """Over ranks: for each case the answers to mixed requests, and what became of the hand-overs."""
    found = {}
    for name, options in names_and_options:
        how = {"prefill": at, **options}
        found[name] = over_ranks(group, model_of("plain"), use, **how)
    return found


def use(llm):
    answers, preemptions = drive(llm, requests_of(SEED, COUNT), SEED)
    return answers, preemptions, dict(llm.handovers.outcomes), llm.handovers.received, list(llm.handovers.handed_over)


def alone_with(model, **options):
    """Answers of one process, each request by itself, with an option of its own."""
    llm = LLM(model, num_blocks=64, **options)
    return [
        [answer.ids for answer in llm.generate([prompt], params)[0].answers]
        for prompt, params in requests_of(SEED, COUNT)
    ]


__all__ = [
    "COUNT",
    "OPTIONS",
    "SEED",
    "TIGHT",
    "alone_with",
    "driven",
    "is_idle",
    "pool_of",
    "state_of",
    "until",
    "use",
]
