"""Exhibits of serving with two faults, of which one keeps the code of the other from running."""

import random
from dataclasses import replace

from course.kit.receipts import Row, row
from course.lab22_bug_museum import serving_measurements as seen
from course.lab22_bug_museum.exhibit import Clue, Exhibit, Measurement, Suspect, WrongFix
from course.lab22_bug_museum.serving_runs import Asked, Served, Traffic, runs, serve, tokens
from course.shared.faults import serving as faults
from course.shared.faults.patches import Patch
from course.shared.table import Table, table
from minillm.serve import SamplingParams

# A key that never matches hides a mask that is wrong behind a hit.


def _cached_prompts(draw: random.Random) -> Traffic:
    """Everybody has a length of answer of their own, and a step takes any prompt whole."""
    template = tokens(draw, 35)
    asked = [Asked(template + tokens(draw, 5), SamplingParams(9))]
    asked += [Asked(template + tokens(draw, 3 + i), SamplingParams(10 + i), at=14) for i in range(3)]
    asked += [Asked(template + tokens(draw, 4), SamplingParams(8), at=16, salt="tan")]
    return Traffic(tuple(asked), {"token_budget": 256})


def _pieces(draw: random.Random) -> Traffic:
    traffic = _cached_prompts(draw)
    return replace(traffic, engine={"token_budget": 64, "chunk": 16})


CACHE_ROLLED_BACK = Exhibit(
    name="rolled-back-twice",
    title="The cache that was rolled back twice",
    kind="serving",
    symptom=(
        "The prefix cache is on, all prompts begin with the same page of instructions, and time to first token is "
        "what it was without a cache. A colleague has found a mended key in a branch; when it was deployed, answers "
        "became nonsense, and it was rolled back. Answers are right again, and the cache is still of no use. This "
        "exhibit has two culprits that hide each other: name both, and repair both."
    ),
    faults=(
        faults.PARAMS_IN_KEY,
        faults.MASK_FROM_ZERO,
    ),
    run=runs(_cached_prompts),
    looks=lambda served: [*seen.plausible(served), seen.same_tokens(served)],
    trace=lambda served: [
        *(seen.hit(served, number, 32, f"tokens hit by request {number}") for number in (1, 2, 3)),
        seen.hit(served, 4, 0, "tokens hit by another tenant"),
        seen.same_tokens(served),
    ],
    measurements=(
        seen.HITS,
        seen.ANSWERS,
        seen.PIECES,
        seen.STEPS,
        seen.LATENCY,
        seen.NO_CACHE,
        seen.POOL,
        seen.THROUGHPUT,
    ),
    innocents=(
        Suspect(
            "block pool, eviction",
            "the cached blocks are overwritten before the next request comes",
            "The pool is nearly empty throughout: nothing was ever evicted.",
        ),
        Suspect(
            "scheduler, admission",
            "it computes the prompt before it looks the prompt up",
            "The order is right: with equal sampling parameters the very same prompt does hit.",
        ),
        Suspect(
            "positions",
            "tokens behind a hit are rotated as if they stood at the beginning",
            "The positions of a piece and those of a decoded token come from the same line of code, and decoding is "
            "right in every answer here.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "only the key",
            "Now prompts hit, and their answers are wrong: behind a hit queries no longer begin at the first key, and "
            "the mask does not know that. The first fault kept the second from ever running.",
            ({}, None),
        ),
        WrongFix(
            "only the mask",
            "The mask is right now, and no prompt has a use for it: the parameters in the key still keep all hits "
            "away.",
            (None, {}),
        ),
        WrongFix(
            "a key without the salt",
            "This takes the parameters out of the key and the tenant with them.",
            (
                {
                    "cache_namespace(adapter and adapter.cache_key, salt)": (
                        "cache_namespace(adapter and adapter.cache_key, None)"
                    )
                },
                {},
            ),
        ),
        WrongFix(
            "a mask that hides nothing",
            "Queries see all keys of their sequence now, also those of tokens behind them, which decoding will never "
            "have.",
            ({}, {"reachable(keys - queries, queries": "reachable(keys, queries"}),
        ),
    ),
    investigation=(
        Clue(
            "cache-hits", "No request hits although all share 35 tokens: the key is too narrow, not the pool too small."
        ),
        Clue(
            "prompts-in-pieces",
            "The roll-back says that something behind a hit is wrong. A prompt in pieces takes the same path without "
            "any cache, and its answers are wrong as well: attention with keys before its first query.",
        ),
    ),
    misleading=Clue(
        "answers",
        "All answers are right, because the path with the second fault never runs. As soon as the first fault is "
        "mended they are wrong, which looks as if the repair had been the mistake.",
    ),
    lesson=(
        "When a good repair makes things worse, ask what it has switched on. Test each path by the shortest way to it "
        "(here a prompt in pieces), not by the feature that happens to lead there."
    ),
    proof=lambda patches: [*seen.against_the_loop(_pieces)(patches), seen.kept_apart(patches)],
)

# A reservation of the whole answer keeps preemption away, and so hides where a preempted sequence goes.


def _steady(draw: random.Random) -> Traffic:
    """A request every fourth step, each with a short prompt and a long answer, in a pool for three of them."""
    engine = {"block_size": 4, "num_blocks": 24, "prefix_cache": False}
    asked = (
        Asked(tokens(draw, draw.randint(10, 16)), SamplingParams(draw.randint(16, 20)), at=4 * number)
        for number in range(10)
    )
    return Traffic(tuple(asked), engine)


def _overtaken_while_waiting(served: Served) -> int:
    """Admissions of a request while an earlier one, preempted before, still waited."""
    waiting: set[int] = set()
    found = 0
    for record in served.records:
        for name in record.admitted:
            number = int(name.partition("/")[0])
            waiting.discard(number)
            found += any(earlier < number for earlier in waiting)
        waiting |= {int(name.partition("/")[0]) for name in record.preempted}
    return found


def _running(served: Served) -> float:
    return sum(record.running for record in served.records) / len(served.records)


def _without_faults(served: Served) -> list[Row]:
    sound = serve(served.traffic, ())
    return [
        row("sequences running, in the mean step", _running(sound), _running(served), "", 0.02),
        row("admitted while an earlier request, once preempted, waited", 0, _overtaken_while_waiting(served)),
    ]


def _admit_by_need(served: Served) -> Table:
    """What an engineer tries on a copy of the server: another admission, and everything else as it is."""
    short = Patch(
        "minillm.serve.schedule.scheduler:Scheduler._admit",
        {"self.pool.blocks_for(sequence.wanted(self.piece, skipped))": "self.pool.blocks_for(sequence.num_tokens)"},
    )
    others = [patch for patch in served.patches if patch.target != short.target]
    again = serve(served.traffic, [*others, short])
    rows = []
    waiting: set[str] = set()
    for record in again.records:
        for name in record.admitted:
            if name in waiting:
                rows.append((str(record.step - 1), f"{name} again", _latest(again, record.step)))
                waiting.discard(name)
        for name in record.preempted:
            rows.append((str(record.step - 1), f"{name} preempted", _latest(again, record.step)))
            waiting.add(name)
    heads = ("step", "what happened", "latest request admitted so far")
    return table("the same requests, admitted as soon as their prompts fit", heads, rows[: seen.STEPS_SHOWN])


def _latest(served: Served, step: int) -> int:
    names = [name for record in served.records if record.step <= step for name in record.admitted]
    return max(int(name.partition("/")[0]) for name in names)


_SMALL_RESERVE = Measurement(
    "admit-by-need", 15, "who is preempted and who returns if prompts are admitted as soon as they fit", _admit_by_need
)

TAIL = Exhibit(
    name="idle-pool",
    title="Half the pool is idle, and filling it makes the tail worse",
    kind="serving",
    symptom=(
        "Requests queue while most of the pool of blocks holds nothing yet. An engineer found the reason and mended "
        "it: throughput rose by half, and so many users complained of answers that stood still in mid-sentence that "
        "it was rolled back. Since then nobody touches it. This exhibit has two culprits that hide each other: name "
        "both, and repair both."
    ),
    faults=(
        faults.BACK_OF_THE_QUEUE,
        faults.RESERVED,
    ),
    run=runs(_steady),
    looks=lambda served: [
        *seen.plausible(served),
        seen.same_tokens(served),
        row("admitted while an earlier request, once preempted, waited", 0, _overtaken_while_waiting(served)),
    ],
    trace=_without_faults,
    measurements=(seen.POOL, seen.THROUGHPUT, seen.LATENCY, seen.STEPS, _SMALL_RESERVE, seen.ANSWERS, seen.SEATS),
    innocents=(
        Suspect(
            "block pool",
            "blocks are not given back, so that fewer are free than there should be",
            "At the end every block is free again. They are held too early, not too long.",
        ),
        Suspect(
            "scheduler, seats",
            "max_num_seqs is too small for the load",
            "Two or three sequences run at most, and eight have a seat: requests wait for blocks.",
        ),
        Suspect(
            "scheduler, preemption",
            "the sequence that is preempted is the one that has come furthest",
            "Victims are the latest ones. It is what happens to them afterwards that matters.",
        ),
        Suspect(
            "sampler",
            "answers are longer than was asked",
            "Answers have exactly the length that was asked for.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "only the admission",
            "Blocks are given when they are needed, so sequences are preempted again, and each preempted one goes to "
            "the end of the queue: in the middle of its answer it waits for everybody who has come since.",
            (None, {}),
        ),
        WrongFix(
            "only the queue",
            "Nobody is preempted while the whole answer is reserved. This changes nothing that can be measured, and "
            "the pool stays half empty.",
            ({}, None),
        ),
        WrongFix(
            "reserve a little less",
            "Half of the answer is still reserved before it begins. A reservation has to be for what the next steps "
            "write.",
            ({}, {faults.WANTED: "self.pool.blocks_for((sequence.num_tokens + sequence.limit + 1) // 2)"}),
        ),
    ),
    investigation=(
        Clue(
            "step-records",
            "In the steps in which requests wait, the pool's blocks count as used although the running sequences have "
            "written few of them: blocks for whole answers are taken at admission. Not one sequence is preempted.",
        ),
        Clue(
            "admit-by-need",
            "With admission by need the same traffic preempts, and a request that was preempted comes back after later "
            "ones. The reservation had kept the second fault from ever running.",
        ),
    ),
    misleading=Clue(
        "pool",
        "Zero preemptions look like health. They mean that the engine never takes the risk that paging exists to take, "
        "and that no code behind a preemption has run.",
    ),
    lesson=(
        "A repair that uncovers a second fault is blamed for it. Before rolling back, ask which path runs now that did "
        "not run before; then mend both and measure the mean and the tail together."
    ),
    proof=seen.against_the_loop(_steady),
)


EXHIBITS = (CACHE_ROLLED_BACK, TAIL)
