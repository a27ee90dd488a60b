"""The proof: whatever is switched on, and whatever else runs, tokens are those of the naive loop.

All combinations of block size, prefix cache, chunk, preemption and policy on a pool that is too small: some by default,
every one with MINILLM_PROOF=all; with asynchronous scheduling, too.
"""

import os
import random
from itertools import combinations, islice, product

import pytest
import torch

from minillm.model import ModelConfig, Transformer
from minillm.model.draw import sample_seed
from minillm.model.generate import generate
from minillm.serve import LLM, POLICIES, SamplingParams

pytestmark = pytest.mark.drawn(2)

CONFIG = ModelConfig(61, 32, 64, 2, 4, 2, max_seq_len=64, init_std=0.2)
AXES = {
    "block_size": [1, 4, 16],
    "prefix_cache": [True, False],
    "chunk": [7, 64, None],
    "preemption": ["recompute", "swap"],
    "policy": list(POLICIES),
}
EVERY = list(product(*AXES.values()))
WHOLE = os.environ.get("MINILLM_PROOF") == "all"
CHOSEN = EVERY if WHOLE else EVERY[::7]
RUNS = [*((each, False) for each in CHOSEN), *((each, True) for each in CHOSEN[:: 1 if WHOLE else 3])]


def mixed_requests(count=40):
    """(prompt, params, priority, steps until it is cancelled): shared prefixes, forks, draws, stops."""
    rng = random.Random(6)
    prefixes = [[rng.randrange(61) for _ in range(length)] for length in (24, 33)]
    requests = []
    for number in range(count):
        own = [rng.randrange(61) for _ in range(rng.randrange(1, 14))]
        prompt = rng.choice(prefixes)[: rng.choice([8, 24, 33])] + own if number % 3 else own
        drawn = {"temperature": 0.8, "seed": number} if number % 4 == 1 else {}
        params = SamplingParams(
            max_tokens=rng.randrange(1, 25),
            n=3 if number % 8 in (1, 6) else 1,
            stop_tokens=[rng.randrange(61) for _ in range(3)],
            **drawn,
        )
        cancelled = rng.randrange(1, 60) if number % 10 == 9 else None
        requests.append((prompt, params, rng.randrange(-1, 2), cancelled))
    return requests


@pytest.fixture(scope="module")
def proof():
    """The model, the requests, and for each request the answers of the naive loop."""
    model, requests = Transformer(CONFIG, seed=2), mixed_requests()
    expected = []
    for prompt, params, _, _ in requests:
        answers = []
        for index in range(params.n):
            ids = []
            for token in generate(
                model,
                prompt,
                params.max_tokens,
                temperature=params.temperature,
                seed=sample_seed(params.seed or 0, index),
            ):
                if token in params.stop_tokens:
                    break
                ids.append(token)
            answers.append(ids)
        expected.append(answers)
    assert sum(len(ids) for answers in expected for ids in answers) > 400
    return model, requests, expected


def nothing_left(llm):
    pool = llm.pool
    assert pool.free + pool.cached + pool.used == pool.total and pool.used == 0
    assert pool.references == [0] * pool.total and pool.free_host == pool.num_host_blocks
    assert llm.unfinished == llm.scheduler.num_waiting == llm.scheduler.num_seqs == 0
    assert not llm.requests.live and not llm.scheduler.running


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("combination", "ahead"), RUNS, ids=["-".join(map(str, each)) + "-async" * ahead for each, ahead in RUNS]
)
def test_tokens_equal_those_of_the_naive_loop(proof, combination, ahead):
    model, requests, expected = proof
    options = dict(zip(AXES, combination, strict=True)) | {"async_scheduling": ahead}
    blocks = -(-63 // options["block_size"]) + 16 // options["block_size"]
    llm = LLM(model, num_blocks=blocks, token_budget=64, max_num_seqs=12, reserve=0, **options)
    arrivals, outputs, cancelled = iter(enumerate(requests)), {}, {}
    for step in range(3000):
        for number, (prompt, params, priority, end) in islice(arrivals, 3):
            llm.add(prompt, params, request_id=str(number), priority=priority)
            if end is not None:
                cancelled.setdefault(step + end, []).append(str(number))
        for name in cancelled.pop(step, []):
            if name not in outputs:
                llm.cancel(name)
        outputs |= {output.request_id: output for output in llm.step()}
        if len(outputs) == len(requests):
            break
    for number, (_, params, _, _) in enumerate(requests):
        output, full = outputs[str(number)], expected[number]
        for answer, ids in zip(output.answers, full, strict=False):
            if answer.reason == "cancelled":
                assert answer.ids == ids[: len(answer.ids)]
            else:
                assert answer.ids == ids
                assert answer.reason == (
                    "stop" if len(ids) < min(params.max_tokens, 64 - len(output.prompt)) else "length"
                )
    reasons = [answer.reason for output in outputs.values() for answer in output.answers]
    assert {"stop", "length", "cancelled"} == set(reasons)
    assert sum(output.preemptions for output in outputs.values()) >= 8
    assert llm.pool.copied > 0 or options["block_size"] == 1
    nothing_left(llm)


def test_the_default_selection_meets_every_pair_of_settings():
    chosen = EVERY[::7]
    for (a, left), (b, right) in combinations(enumerate(AXES.values()), 2):
        assert {(c[a], c[b]) for c in chosen} >= set(product(left, right))


@pytest.mark.parametrize(
    "variant", [{"sliding_window": 5}, {"qk_norm": True, "tie_embeddings": True, "qkv_bias": True}]
)
def test_other_models(variant):
    from dataclasses import replace

    model = Transformer(replace(CONFIG, **variant), seed=5)
    prompts = [prompt for prompt, _, _, _ in mixed_requests(12)]
    llm = LLM(model, block_size=4, num_blocks=24, chunk=7, token_budget=64)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=10))
    assert [output.answers[0].ids for output in outputs] == [list(generate(model, prompt, 10)) for prompt in prompts]
    nothing_left(llm)


def test_draws_do_not_depend_on_the_batch(proof):
    model = proof[0]
    params = SamplingParams(
        max_tokens=12, temperature=1.1, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=8, n=2, logprobs=3
    )
    alone, crowd = LLM(model), LLM(model, block_size=4, num_blocks=30, chunk=3, token_budget=32, max_num_seqs=16)
    [expected] = alone.generate([[5, 6, 7]], params)
    others = [prompt for prompt, _, _, _ in proof[1]]
    loud = SamplingParams(max_tokens=9, temperature=2.0, seed=8)
    outputs = crowd.generate([*others[:20], [5, 6, 7], *others[20:]], [*[loud] * 20, params, *[loud] * 20])
    for mine, theirs in zip(outputs[20].answers, expected.answers, strict=True):
        assert mine.ids == theirs.ids
        for a, b in zip(mine.tokens, theirs.tokens, strict=True):
            assert abs(a.logprob - b.logprob) < 1e-4 and [i for i, _ in a.top] == [i for i, _ in b.top]
    assert expected.answers[0].ids != expected.answers[1].ids


def test_computed_tokens_fall_by_exactly_the_hit(proof):
    model = proof[0]
    prompts = [[*range(40), last] for last in range(41, 49)]
    work = {}
    for prefix_cache in (True, False):
        llm = LLM(model, block_size=4, num_blocks=200, prefix_cache=prefix_cache)
        outputs = llm.generate(prompts, SamplingParams(max_tokens=5))
        assert sum(record.tokens for record in llm.records) == sum(output.computed for output in outputs)
        work[prefix_cache] = sum(output.computed for output in outputs), sum(output.hit for output in outputs)
    assert work[False] == (8 * 45, 0) and work[True] == (8 * 45 - 7 * 40, 7 * 40)


@torch.no_grad()
def test_the_largest_reuse_of_a_poisoned_pool(proof):
    """Blocks full of nan, as a freed pool may be: no slot is read that its sequence has not written."""
    model, requests, expected = proof
    llm = LLM(model, block_size=4, num_blocks=20, token_budget=64)
    llm.cache.pool.fill_(float("nan"))
    greedy = [i for i, (_, params, _, _) in enumerate(requests) if params.temperature == 0 and params.n == 1]
    outputs = llm.generate([requests[i][0] for i in greedy], [requests[i][1] for i in greedy])
    assert [output.answers[0].ids for output in outputs] == [expected[i][0] for i in greedy]
