"""Stop 13: blocks of keys and values: waste, a shared prefix, copies on write, four bugs told by their receipts."""

from collections.abc import Iterator

from course.lab13_paged_attention import experiments
from course.lab13_paged_attention import experiments_breaks as breaks
from course.lab13_paged_attention import experiments_sharing as sharing
from course.lab13_paged_attention import formulas as predict
from minillm.labkit.receipts import Row, row

PREFIX, OWN, REQUESTS, SIZE = 100, 20, 4, 16


def rows() -> Iterator[Row]:
    """Real requests through the target model; blocks, hits and copies against closed forms."""
    wasted = experiments.waste(SIZE, count=12)
    unused = wasted["unused"]
    yield row("blocks of 16: unused slots of a sequence, below 16", True, max(unused) < SIZE)
    yield row("    on average", predict.mean_unused_slots(SIZE), sum(unused) / len(unused), "", 0.2)
    yield row("    unused share", None, 1 - wasted["filled"] / wasted["held"])
    context = experiments.target().config.max_seq_len
    yield row("    of reservations of the whole context", None, predict.reserved_waste(wasted["lengths"], context))
    yield from _sharing()
    forked = sharing.forks()
    yield row("3 samples of 22 tokens, blocks of 4: copies", predict.fork_copies(22, 3, 4), forked["copied"])
    yield row("    blocks at the end", predict.fork_blocks(22, 13, 3, 4), forked["blocks"])
    yield row("    tokens of three single requests", True, forked["equal"])
    yield row("    blocks given back", *reversed(forked["left"]))
    for bug in ("none", *breaks.BUGS):
        found = breaks.run(bug)
        off = (found.hit != found.hit_expected, found.uncounted > 0, found.unfinished > 0)
        expected = {
            "none": (False, False, False),
            "frees shared blocks": (False, True, False),
            "whole prompt from the cache": (True, False, True),
        }.get(bug, (True, False, False))
        yield row(f"bug: {bug}: hits, counts, ends off", expected, off)


def _sharing() -> Iterator[Row]:
    found = sharing.share(PREFIX, OWN, REQUESTS, SIZE)
    computed = predict.computed_tokens(PREFIX, OWN, REQUESTS, SIZE)
    yield row(f"{REQUESTS} requests, {PREFIX} tokens shared: prompt tokens computed", computed, found["passed"])
    all_tokens = REQUESTS * (PREFIX + OWN)
    yield row("    fewer by exactly the hits", all_tokens - found["hit"], found["passed"])
    yield row("    blocks held", predict.shared_blocks(PREFIX, OWN, REQUESTS, SIZE), found["blocks"])
    yield row("    holders of a shared block", REQUESTS, found["holders"])
    yield row("    the plain loop's tokens", True, found["equal"])


CLAIMS = (rows,)
