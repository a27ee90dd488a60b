"""Exhibits of the prefix cache: keys that say too little, and a prompt that was there already."""

import random

from course.kit.receipts import row
from course.lab22_bug_museum import serving_measurements as seen
from course.lab22_bug_museum.exhibit import Clue, Exhibit, Suspect, WrongFix
from course.lab22_bug_museum.serving_runs import Asked, Traffic, runs, tokens
from course.shared.faults import serving as faults
from minillm.serve import SamplingParams

# Tokens cut to a byte.


def _two_templates(draw: random.Random) -> Traffic:
    """Two templates whose ids differ by multiples of 256, and one with the first one's tokens in another order."""
    template = tokens(draw, 24)
    alike, turned = tuple(token ^ 256 for token in template), template[1:8] + template[:1] + template[8:]
    params = SamplingParams(10)
    later = [template + tokens(draw, 5), alike + tokens(draw, 4), turned + tokens(draw, 4), tokens(draw, 20)]
    first = Asked(template + tokens(draw, 4), params)
    return Traffic((first, *(Asked(prompt, params, at=14) for prompt in later)))


ONE_BYTE_HASH = Exhibit(
    name="nobody-asked",
    title="The answer to a question that nobody asked",
    kind="serving",
    symptom=(
        "Since the prefix cache is on, one customer in a few hundred complains that the model answers a question that "
        "nobody asked. Sent again to a server that has just started, the same prompt is answered well. There is no "
        "error, the hit rate is better than was hoped, and memory is as it should be."
    ),
    faults=(faults.ONE_BYTE,),
    run=runs(_two_templates),
    looks=seen.plausible,
    trace=lambda served: [
        seen.hit(served, 1, 24, "tokens hit by the prompt with the cached template"),
        seen.hit(served, 2, 0, "tokens hit by the prompt with the other template"),
        seen.hit(served, 3, 0, "tokens hit by the template in another order"),
        seen.same_tokens(served),
    ],
    measurements=(seen.ANSWERS, seen.HITS, seen.NO_CACHE, seen.ALONE, seen.POOL, seen.HOLDERS, seen.THROUGHPUT),
    innocents=(
        Suspect(
            "block pool, release",
            "a block is given back while another sequence still reads it",
            "Then a block would stand in more tables than it has counted holders. Every count is right here: the wrong "
            "sequence was handed the block on purpose, as a hit.",
        ),
        Suspect(
            "attention, the mask",
            "queries behind a hit see the wrong keys",
            "Then the request that hits its own template would be wrong as well. It is right, token by token.",
        ),
        Suspect(
            "block pool, eviction",
            "a block is overwritten while it is still listed in the cache",
            "Nothing was evicted: the pool never came near its end.",
        ),
        Suspect(
            "sampler",
            "requests of a batch share their random numbers",
            "These requests are greedy: no random number was taken.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "a key that never matches",
            "No wrong hit is left because no hit is left. The cache still costs its memory and no longer saves a "
            "token.",
            ({"tuple(self.tokens[start : start + block_size])": "(object(),)"},),
        ),
        WrongFix(
            "the sum of the tokens",
            "A sum is the same in any order, so a template with two tokens exchanged still gets the other's keys. A "
            "key has to tell apart whatever attention tells apart.",
            ({"tuple(self.tokens[start : start + block_size])": "(sum(self.tokens[start : start + block_size]),)"},),
        ),
        WrongFix(
            "the length as well",
            "Two prompts of one length collide as before, and a prompt of another length no longer shares its "
            "template.",
            (
                {
                    "tuple(self.tokens[start : start + block_size])": (
                        "(len(self.tokens), *(token & 0xFF for token in self.tokens[start : start + block_size]))"
                    )
                },
            ),
        ),
    ),
    investigation=(
        Clue(
            "prefix-cache-off",
            "All answers are right without the cache. That halves the space: attention, sampler and scheduler are out, "
            "and what is left decides which block a prompt may take over.",
        ),
        Clue(
            "cache-hits",
            "A prompt that shares not one block with anything before it hits 24 tokens. Its blocks were not damaged: "
            "they are somebody else's, so the key said that two different texts are equal.",
        ),
    ),
    misleading=Clue(
        "throughput",
        "Throughput and hit rate are better than on the sound server. A hit rate counts hits, not right ones, so this "
        "fault makes the dashboard look good.",
    ),
    lesson=(
        "A cache key has to contain all that the cached value depends on, and a hit has to be compared before it is "
        "trusted. minillm compares every token of the chain on a hit; the fault had to be planted where the key is "
        "made."
    ),
    proof=lambda patches: [*seen.against_the_loop(_two_templates)(patches), seen.told_apart(patches)],
)


# A tenant's salt.


def _two_tenants(draw: random.Random) -> Traffic:
    """Three tenants and a request of none send the same beginning of a prompt."""
    template, params = tokens(draw, 24), SamplingParams(8)
    who = ("red", "red", "tan", None, "blue")
    return Traffic(
        tuple(Asked(template + tokens(draw, 5), params, at=12 * place, salt=salt) for place, salt in enumerate(who))
    )


TENANTS = Exhibit(
    name="secret-is-out",
    title="Every token is right, and a secret is out",
    kind="serving",
    symptom=(
        "A security review sends guesses of another tenant's system prompt to the shared server and times the first "
        "token. It claims that it can tell which guess is right. The serving team replies that all answers are the "
        "reference's, token by token, and closes the ticket."
    ),
    faults=(faults.NO_SALT,),
    run=runs(_two_tenants),
    looks=lambda served: [*seen.plausible(served), seen.same_tokens(served)],
    trace=lambda served: [
        seen.hit(served, 1, 24, "tokens hit by the tenant who sent the prompt before"),
        seen.hit(served, 2, 0, "tokens hit by another tenant"),
        seen.hit(served, 3, 0, "tokens hit by a request of no tenant"),
        seen.hit(served, 4, 0, "tokens hit by a third tenant"),
    ],
    measurements=(seen.ANSWERS, seen.HITS, seen.LATENCY, seen.HOLDERS, seen.ALONE, seen.POOL),
    innocents=(
        Suspect(
            "prefix cache, the key of a block",
            "different tokens have the same key",
            "The texts that hit each other here are equal, token by token, and no answer is wrong.",
        ),
        Suspect(
            "block pool, reset",
            "blocks keep the keys of a tenant who has left",
            "They do, and may: stale contents are harmless as long as no lookup of another tenant finds them.",
        ),
        Suspect(
            "scheduler, priority",
            "one tenant's requests are preferred, and that is the difference in time",
            "Nothing waits in this run. The difference is in the tokens that are computed, not in the queue.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "no sharing at all",
            "Now a tenant does not share with itself either. Isolation has to separate tenants, not requests.",
            ({"repr((adapter, salt))": "repr((adapter, salt, object()))"},),
        ),
        WrongFix(
            "a short fingerprint",
            "Tenants with equal fingerprints still share. A salt has to enter whole, or through a hash that nobody can "
            "steer.",
            ({"repr((adapter, salt))": "repr((adapter, len(salt or '')))"},),
        ),
        WrongFix(
            "only who has a salt",
            "This separates requests with a salt from those without and leaves all tenants in one cache.",
            ({"repr((adapter, salt))": "repr((adapter, salt is None))"},),
        ),
    ),
    investigation=(
        Clue(
            "cache-hits",
            "The first request that a tenant ever sends hits 24 tokens. It cannot have computed them: it was given "
            "another tenant's. Nothing else is needed.",
        ),
    ),
    misleading=Clue(
        "answers",
        "Equal tokens in the same model give equal keys, so every answer is right. Comparing tokens proves that the "
        "values are sound and says nothing about who may see them.",
    ),
    lesson=(
        "Time is an output, too. When something is shared, list who may share it and test that the others do not hit; "
        "no comparison of answers can find this one."
    ),
    proof=lambda patches: [
        seen.same_tokens(runs(_two_tenants)(patches, random.randrange(2**31)), "the naive loop: tokens that differ"),
        seen.kept_apart(patches),
    ],
)


# A prompt of which everything is cached.


def _prompts_again(draw: random.Random) -> Traffic:
    """Prompts of 24, 25 and 27 tokens, each sent a second time; blocks have 8."""
    prompts = [tokens(draw, length) for length in (24, 25, 27)]
    params = SamplingParams(5)
    return Traffic(tuple(Asked(prompt, params, at=at) for at in (0, 12) for prompt in prompts), steps=60)


NOTHING_LEFT = Exhibit(
    name="never-ends",
    title="A request that waits for nothing",
    kind="serving",
    symptom=(
        "Once or twice a day a request never ends, and its client runs into the timeout. The server is healthy: it "
        "answers all others meanwhile, with free memory, an idle queue and no error. Sent once more, the request hangs "
        "again; with one word more in its prompt it is answered at once."
    ),
    faults=(faults.WHOLE_PROMPT,),
    run=runs(_prompts_again),
    looks=lambda served: [
        row("errors in outputs and records", 0, served.errors),
        row("requests that wait", 0, served.records[-1].waiting),
        seen.same_answers_so_far(served),
    ],
    trace=lambda served: [
        row("requests that did not end", 0, served.unfinished),
        row("tokens hit by the prompt of 24 tokens", 16, served.hit[3]),
        row("tokens hit by the prompt of 25 tokens", 24, served.hit[4]),
        row("tokens hit by the prompt of 27 tokens", 24, served.hit[5]),
    ],
    measurements=(seen.LATENCY, seen.STEPS, seen.SEATS, seen.HITS, seen.NO_CACHE_ENDS, seen.POOL, seen.HOLDERS),
    innocents=(
        Suspect(
            "scheduler, starvation",
            "others are always preferred to it",
            "Nothing else is running in the end, and it still gets no token.",
        ),
        Suspect(
            "scheduler, blocks",
            "it waits for blocks that nobody gives back",
            "It is admitted and holds all blocks that it needs, and most of the pool is free.",
        ),
        Suspect(
            "server, the stream",
            "its tokens are sampled and get lost on their way to the client",
            "No step computed anything of it after it was admitted: there is nothing that could get lost.",
        ),
        Suspect(
            "model",
            "its end token is never sampled",
            "The length of its answer is bounded, and a step that had sampled anything would be in the records.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "one block less",
            "It ends now, and every other prompt computes a block that it has: 25 tokens hit 16 and not 24. Only the "
            "last token has to be computed, for its logits.",
            ({"(sequence.num_tokens - 1) // self.pool.block_size": "sequence.num_tokens // self.pool.block_size - 1"},),
        ),
        WrongFix(
            "no hit for whole blocks",
            "A prompt that fills its blocks now hits nothing, although all of it but the last block could be taken "
            "over.",
            (
                {
                    "(sequence.num_tokens - 1) // self.pool.block_size": (
                        "(sequence.num_tokens // self.pool.block_size) * bool(sequence.num_tokens % "
                        "self.pool.block_size)"
                    )
                },
            ),
        ),
        WrongFix(
            "two tokens to compute",
            "One query is enough: the prompt of 25 tokens computes nine here, because a hit covers whole blocks.",
            ({"(sequence.num_tokens - 1)": "(sequence.num_tokens - 2)"},),
        ),
    ),
    investigation=(
        Clue(
            "scheduler-counts",
            "One sequence runs, none waits, and the engine was asked for many more steps than computed anything. So it "
            "has its blocks and its seat, and the plan gives it no token.",
        ),
        Clue(
            "step-records",
            "It was admitted in a step whose batch does not name it. Its prompt has 24 tokens, three whole blocks, and "
            "was sent before: it lacks zero tokens.",
        ),
    ),
    misleading=Clue(
        "latency",
        "All other requests are as fast as ever. A mean leaves out whoever never ends, so the dashboard has no entry "
        "for the one request that matters.",
    ),
    lesson=(
        "A cache gives keys and values; the next token needs logits, and those come from a query. At least one token "
        "is always computed. Alert on the oldest unanswered request, not on the mean of those that were answered."
    ),
    proof=seen.against_the_loop(_prompts_again),
)

EXHIBITS = (ONE_BYTE_HASH, TENANTS, NOTHING_LEFT)
