"""Exhibits of the scheduler: a stall, and seats that leak."""

import random

from course.kit.receipts import row
from course.lab22_bug_museum import serving_measurements as seen
from course.lab22_bug_museum.exhibit import Clue, Exhibit, Suspect, WrongFix
from course.lab22_bug_museum.serving_runs import MOST_STEPS, Asked, Served, Traffic, runs, tokens
from course.shared.faults import serving as faults
from minillm.serve import SamplingParams

# Phases that are never mixed.


def _chat_and_documents(draw: random.Random) -> Traffic:
    """Four chats that decode, and two long documents that arrive meanwhile, in pieces of 16 tokens."""
    chats = [Asked(tokens(draw, 8), SamplingParams(96)) for _ in range(4)]
    documents = [Asked(tokens(draw, 100), SamplingParams(4), at=at) for at in (8, 22)]
    return Traffic((*chats, *documents), {"num_blocks": 128, "token_budget": 32, "chunk": 16})


def _slowest_document(served: Served) -> int:
    return max(
        MOST_STEPS if ended is None else ended - asked.at + 1
        for asked, ended in zip(served.traffic.asked[4:], served.ended[4:], strict=True)
    )


STALL = Exhibit(
    name="held-breath",
    title="Every chat holds its breath",
    kind="serving",
    symptom=(
        "Prompts are computed in pieces, so that long ones do not disturb the others: that is what the configuration "
        "says. Users see something else. Now and then every chat stops for a moment, all at once, and goes on. The "
        "mean time per token is a little worse than was planned, for which the load is blamed."
    ),
    faults=(faults.PROMPTS_FIRST,),
    run=runs(_chat_and_documents),
    looks=lambda served: [*seen.plausible(served), seen.same_tokens(served)],
    trace=lambda served: [
        row(
            "most steps from one token of a chat to the next",
            1,
            max(served.longest_gap(number) for number in range(4)),
        ),
        row("steps from the arrival of a document to its end, at most", 10, _slowest_document(served)),
    ],
    measurements=(
        seen.THROUGHPUT,
        seen.LATENCY,
        seen.STEPS,
        seen.ANSWERS,
        seen.POOL,
        seen.WHOLE_PROMPT_GAPS,
        seen.SEATS,
    ),
    innocents=(
        Suspect(
            "configuration, chunk",
            "the pieces are too large",
            "A piece has 16 tokens and a step room for 32. The chats stop for as many steps as the document has "
            "pieces, so smaller pieces make it worse.",
        ),
        Suspect(
            "block pool",
            "the document preempts the chats",
            "Nobody is preempted, and the pool has room for all.",
        ),
        Suspect(
            "sampler",
            "a large batch takes longer to sample",
            "The gap is counted in steps, and in the steps of the gap nothing of the chats is sampled at all.",
        ),
        Suspect(
            "server, the stream",
            "tokens are collected and sent in bursts",
            "Their tokens are not late in the records either: in those steps they do not exist yet.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "taking turns",
            "Every second step still leaves the chats out while a document comes in. A decoding sequence costs one "
            "token of the budget: there is no reason to wait at all.",
            ({faults.BUDGET: "    if prompts and self.step % 2:\n        batch.clear()\n" + faults.BUDGET},),
        ),
        WrongFix(
            "one chat goes on",
            "The first chat is served and the others stop as before.",
            ({faults.BUDGET: "    if prompts:\n        del batch[1:]\n" + faults.BUDGET},),
        ),
        WrongFix(
            "only large prompts wait",
            "Two documents still stop everybody: the condition has changed and not the plan.",
            (
                {
                    faults.BUDGET: "    if prompts and prompts[0].num_tokens > 32:\n        batch.clear()\n"
                    + faults.BUDGET
                },
            ),
        ),
    ),
    investigation=(
        Clue(
            "latency",
            "The longest gap of every chat is the same: one step more than a document has pieces. All at once and as "
            "long as a prompt: that is the plan of the step, not the load.",
        ),
        Clue(
            "step-records",
            "While a document comes in, a step holds its pieces and not one decoded token, with half of the budget "
            "unused.",
        ),
    ),
    misleading=Clue(
        "throughput",
        "Tokens per step are a little fewer, as under any load: the steps that two documents cost are spread over "
        "hundreds of tokens. A stall is a tail, and no mean shows it.",
    ),
    lesson=(
        "Report the largest gap between two tokens, not the mean. Pieces of prompts help only if the same step "
        "decodes: decoding goes first, it costs one token a sequence, and prompts get the rest of the budget."
    ),
    proof=seen.against_the_loop(_chat_and_documents),
)


# Seats that are not given back.


def _impatient(draw: random.Random) -> Traffic:
    """A client who asks for four samples and goes away while its prompt is computed; then more than there are seats.

    Among them are four samples whose prompt takes several steps, while others end and more wait.
    """
    gone = [Asked(tokens(draw, 40), SamplingParams(12, n=4), leaves=2)]
    steady = [Asked(tokens(draw, 24), SamplingParams(40))]
    short = [Asked(tokens(draw, 10), SamplingParams(4), at=8) for _ in range(3)]
    four = [Asked(tokens(draw, 60), SamplingParams(6, n=4), at=8)]
    later = [Asked(tokens(draw, 10), SamplingParams(12), at=8) for _ in range(8)]
    return Traffic((*gone, *steady, *short, *four, *later), {"num_blocks": 128, "chunk": 8})


def _most_running(served: Served) -> int:
    return max(record.running for record in served.records)


SEATS = Exhibit(
    name="slower-every-day",
    title="Slower every day, and well again after a restart",
    kind="serving",
    symptom=(
        "A server is fast after each restart and slower every day. Memory does not grow, all blocks come back, no "
        "request fails, and the machine is less busy than in the beginning. Users of best-of-4 are impatient people "
        "and close the page early; nobody sees a connection."
    ),
    faults=(faults.ONE_SEAT_BACK,),
    run=runs(_impatient),
    looks=lambda served: [
        *seen.plausible(served),
        seen.same_tokens(served),
        row("blocks in use at the end", 0, served.used),
    ],
    trace=lambda served: [
        row("sequences counted as running when all is over", 0, served.seats),
        row("sequences running, at most", 8, _most_running(served)),
    ],
    measurements=(seen.POOL, seen.THROUGHPUT, seen.SEATS, seen.LATENCY, seen.STEPS, seen.ANSWERS, seen.NO_CANCELS),
    innocents=(
        Suspect(
            "block pool",
            "a cancelled request keeps its blocks",
            "All blocks are free at the end: memory is not what leaks.",
        ),
        Suspect(
            "requests, the table",
            "cancelled requests stay in it and are looked through in every step",
            "No request is left that has not ended. And a step would take longer, while here steps have fewer "
            "sequences.",
        ),
        Suspect(
            "prefix cache",
            "it fills up, and evictions cost time",
            "Nothing is evicted, and an eviction costs the scheduler one look-up.",
        ),
        Suspect(
            "server, connections",
            "sockets of clients who have gone stay open",
            "The engine gets and carries out every cancellation; the same happens with no server around it.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "count again when all is quiet",
            "The count is right again once nothing runs, and a busy server is never quiet: it gets slower as before.",
            ({"self.num_seqs -= sequence.num_seqs": ("self.num_seqs = self.num_seqs - 1 if self.running else 0")},),
        ),
        WrongFix(
            "as many as are running",
            "A request with four samples runs as one sequence until its prompt is computed, and then as four. Counted "
            "as one it lets others in, and its samples run beyond max_num_seqs.",
            ({"self.num_seqs -= sequence.num_seqs": "self.num_seqs = len(self.running)"},),
        ),
        WrongFix(
            "as many as were asked for",
            "After the fork each sample ends by itself and gives back one seat. Giving back n for each makes the count "
            "fall below the truth, and too many are admitted.",
            ({"self.num_seqs -= sequence.num_seqs": "self.num_seqs -= sequence.request.params.n"},),
        ),
    ),
    investigation=(
        Clue(
            "throughput",
            "Fewer sequences run than there are seats, while requests wait. Something else than work fills the engine.",
        ),
        Clue(
            "scheduler-counts",
            "Nothing runs any more and sequences are still counted as running. A number that is kept beside the list "
            "that it counts has drifted; it is three for each request that went away.",
        ),
    ),
    misleading=Clue(
        "pool",
        "Everybody looks for a memory leak first, because leaks are of memory. Blocks are counted in one place, in and "
        "out; seats are a number that several places change.",
    ),
    lesson=(
        "Whatever is counted beside the thing itself drifts. Compare both when the server is idle, and print the "
        "difference as a metric: running + waiting must explain every seat."
    ),
    proof=seen.against_the_loop(_impatient),
)

EXHIBITS = (STALL, SEATS)
