"""Exhibits of the prefix cache: keys that say too little, a key that says too much, and what it hid."""

import random
from dataclasses import replace

from course.kit.receipts import Row, row
from course.lab22_bug_museum import serving_measurements as seen
from course.lab22_bug_museum.exhibit import Clue, Exhibit, Suspect, WrongFix
from course.lab22_bug_museum.patches import Patch
from course.lab22_bug_museum.serving_runs import Asked, Served, Traffic, runs, tokens
from minillm.serve import SamplingParams

ONE_BYTE = Patch(
    "minillm.serve.schedule.sequence:Sequence.prefixes",
    {
        "tuple(self.tokens[start : start + block_size])": (
            "tuple(token & 0xFF for token in self.tokens[start : start + block_size])"
        )
    },
)
NO_SALT = Patch(
    "minillm.serve.schedule.blocks:cache_namespace",
    {"repr((adapter, salt))": "repr((adapter,))"},
    also=("minillm.serve.requests.request:cache_namespace",),
)
PARAMS_IN_KEY = Patch(
    "minillm.serve.requests.request:new_request",
    {
        "cache_namespace(adapter and adapter.cache_key, salt)": (
            "cache_namespace(adapter and adapter.cache_key, repr((salt, params)))"
        )
    },
    also=("minillm.serve.requests.table:new_request",),
)
MASK_FROM_ZERO = Patch(
    "minillm.model.paged.gather:Gathered.prepare", {"reachable(keys - queries, queries": "reachable(0, queries"}
)


def _hit(served: Served, number: int, expected: int, name: str) -> Row:
    return row(name, expected, served.hit[number])


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
    threads=(
        "https://github.com/waybarrios/vllm-mlx/pull/444",
        "https://github.com/openvinotoolkit/openvino.genai/issues/3722",
    ),
    symptom=(
        "Since the prefix cache is on, one customer in a few hundred complains that the model answers a question that "
        "nobody asked. Sent again to a server that has just started, the same prompt is answered well. There is no "
        "error, the hit rate is better than was hoped, and memory is as it should be."
    ),
    faults=(ONE_BYTE,),
    run=runs(_two_templates),
    looks=seen.plausible,
    trace=lambda served: [
        _hit(served, 1, 24, "tokens hit by the prompt with the cached template"),
        _hit(served, 2, 0, "tokens hit by the prompt with the other template"),
        _hit(served, 3, 0, "tokens hit by the template in another order"),
        seen.same_tokens(served),
    ],
    measurements=(seen.ANSWERS, seen.HITS, seen.NO_CACHE, seen.ALONE, seen.POOL, seen.HOLDERS, seen.THROUGHPUT),
    suspects=(
        Suspect("prefix cache, the key of a block", "the key keeps only a part of each token, so other tokens match"),
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
    proof=seen.against_the_loop(_two_templates),
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
    threads=("https://github.com/vllm-project/vllm/issues/44701", "https://github.com/vllm-project/vllm/issues/30931"),
    symptom=(
        "A security review sends guesses of another tenant's system prompt to the shared server and times the first "
        "token. It claims that it can tell which guess is right. The serving team replies that all answers are the "
        "reference's, token by token, and closes the ticket."
    ),
    faults=(NO_SALT,),
    run=runs(_two_tenants),
    looks=lambda served: [*seen.plausible(served), seen.same_tokens(served)],
    trace=lambda served: [
        _hit(served, 1, 24, "tokens hit by the tenant who sent the prompt before"),
        _hit(served, 2, 0, "tokens hit by another tenant"),
        _hit(served, 3, 0, "tokens hit by a request of no tenant"),
        _hit(served, 4, 0, "tokens hit by a third tenant"),
    ],
    measurements=(seen.ANSWERS, seen.HITS, seen.LATENCY, seen.HOLDERS, seen.ALONE, seen.POOL),
    suspects=(
        Suspect("prefix cache, the namespace", "a tenant's salt does not reach the key, so tenants share blocks"),
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
        seen.same_tokens(runs(_two_tenants)(patches, random.randrange(2**31)), "the naive loop: tokens that differ")
    ],
)


# Two faults: a key that never matches hides a mask that is wrong behind a hit.


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
    threads=(
        "https://github.com/meta-pytorch/gpt-fast/issues/233",
        "https://github.com/vllm-project/vllm/issues/30931",
    ),
    symptom=(
        "The prefix cache is on, all prompts begin with the same page of instructions, and time to first token is "
        "what it was without a cache. A colleague has found a mended key in a branch; when it was deployed, answers "
        "became nonsense, and it was rolled back. Answers are right again, and the cache is still of no use. This "
        "exhibit has two culprits that hide each other: name both, and repair both."
    ),
    faults=(PARAMS_IN_KEY, MASK_FROM_ZERO),
    run=runs(_cached_prompts),
    looks=lambda served: [*seen.plausible(served), seen.same_tokens(served)],
    trace=lambda served: [
        *(_hit(served, number, 32, f"tokens hit by request {number}") for number in (1, 2, 3)),
        _hit(served, 4, 0, "tokens hit by another tenant"),
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
    suspects=(
        Suspect("prefix cache, the namespace", "what a request asks of the sampler is part of the key of its blocks"),
        Suspect("attention, the mask", "it counts queries from the first key, not from the place where they stand"),
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
    proof=seen.against_the_loop(_pieces),
)

EXHIBITS = (ONE_BYTE_HASH, TENANTS, CACHE_ROLLED_BACK)
