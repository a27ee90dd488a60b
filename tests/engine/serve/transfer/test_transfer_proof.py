"""The proof with a prefill pool: whatever is switched on, tokens are those of one process."""

import functools

import pytest

from minillm.comm import launch
from minillm.predict.model import kv_bytes_per_token
from minillm.serve import LLM
from tests.engine.serve.ranks.programs import CONFIG, TIGHT, alone, drive, model_of, naive, requests_of
from tests.engine.serve.transfer.pools import COUNT, SEED, alone_with, driven, is_idle, pool_of, until, use

pytestmark = pytest.mark.drawn(2)

CASES = {  # of the decode side
    "plain": {},
    "no-prefix-cache": {**TIGHT, "prefix_cache": False},
    "chunks": {**TIGHT, "chunk": 3},
    "recomputed": TIGHT,
    "swapped": {**TIGHT, "preemption": "swap"},
    "ahead": {**TIGHT, "async_scheduling": True},
    "ahead-swapped": {**TIGHT, "async_scheduling": True, "preemption": "swap"},
    "other-blocks": {**TIGHT, "block_size": 3, "num_blocks": 26},
}


@functools.lru_cache
def expected(variant, kv_dtype=None):
    """Answers of one process; of greedy requests they are those of the naive loop."""
    model = model_of(variant)
    answers = alone_with(model, kv_dtype=kv_dtype)
    for (prompt, params), mine in zip(requests_of(SEED, COUNT), answers, strict=True):
        if params.greedy_only and kv_dtype is None:
            assert mine == naive(model, prompt, params)
    return answers


def hold_to(found, right, name, copies=1):
    answers, preemptions, outcomes, received, handed_over = found
    assert [[ids for ids, _ in each] for each in answers] == right, name
    assert set(outcomes) <= {"whole", "given up"} and outcomes["whole"] >= 5 and received > 50, (name, outcomes)
    assert preemptions or name not in ("recomputed", "swapped", "ahead-swapped"), f"{name}: nothing was preempted"
    for each in handed_over:
        if each.outcome == "whole":
            layers, kv_heads, head_dim, itemsize = 2, 2 * copies, 8, 4
            assert each.received == each.asked
            assert sum(each.nbytes) == copies * each.asked * kv_bytes_per_token(CONFIG, itemsize)
            assert each.nbytes == (2 * kv_heads * head_dim * itemsize * each.asked,) * layers


@pytest.fixture(scope="module")
def pool():
    with pool_of() as pool:
        yield pool


FULL = ("plain", "no-prefix-cache", "recomputed", "swapped", "ahead")


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.full] * (each in FULL)) for each in CASES])
def test_tokens_are_those_of_one_process(pool, name):
    llm = LLM(model_of("plain"), **CASES[name], prefill=pool)
    hold_to(use(llm), expected("plain"), name)
    until(lambda: is_idle(pool, llm.handovers.layout), "the pool holds something")
    assert pool.starts == 1


def test_drafts_and_a_pool(pool):
    from minillm.serve.speculate.registry import proposer_named

    model = model_of("plain")
    llm = LLM(model, **TIGHT, prefill=pool, proposer=proposer_named("ngram", model), k=3)
    hold_to(use(llm), expected("plain"), "drafts")


@pytest.mark.parametrize("kv_dtype", [pytest.param("int8"), pytest.param("fp8", marks=pytest.mark.full)])
def test_8_bit_keys_travel_as_codes_and_scales(kv_dtype):
    with pool_of(kv_dtype=kv_dtype) as pool:
        llm = LLM(model_of("plain"), **TIGHT, kv_dtype=kv_dtype, prefill=pool)
        answers, _, outcomes, _, handed_over = use(llm)
    assert [[ids for ids, _ in each] for each in answers] == expected("plain", kv_dtype)
    whole = [each for each in handed_over if each.outcome == "whole"]
    assert outcomes["whole"] == len(whole) >= 5
    assert all(each.nbytes == (2 * 2 * (8 + 4) * each.asked,) * 2 for each in whole)


@pytest.mark.parametrize(
    "variant",
    [pytest.param("quantized"), *(pytest.param(each, marks=pytest.mark.full) for each in ("tied", "experts"))],
)
def test_tokens_of_other_models(variant):
    with pool_of(variant) as pool:
        answers, _, outcomes, _, _ = use(LLM(model_of(variant), **TIGHT, prefill=pool))
    assert [[ids for ids, _ in each] for each in answers] == expected(variant)
    assert outcomes["whole"] >= 5


def random_sequences(pool, seeds, options):
    """Random arrivals and cancellations by each seed, one after the other, on one engine."""
    requests = requests_of(9, 7, 10)
    right, cancelled = alone(model_of("plain"), requests), 0
    llm = LLM(model_of("plain"), **options, prefill=pool)
    for seed in seeds:
        llm.pool.reset()  # with nothing in its cache, every prompt is asked for
        found, _ = drive(llm, requests, seed, 0.3)
        for mine, whole in zip(found, right, strict=True):
            for (ids, reason), full in zip(mine, whole, strict=False):
                assert ids == (full[: len(ids)] if reason == "cancelled" else full)
                cancelled += reason == "cancelled"
    assert cancelled and llm.handovers.outcomes["whole"] > len(seeds) and llm.handovers.outcomes["given up"]
    assert set(llm.handovers.outcomes) == {"whole", "given up"}
    until(lambda: is_idle(pool, llm.handovers.layout), "the pool holds something")


def test_random_arrivals_and_cancellations(pool):
    random_sequences(pool, range(8), CASES["chunks"])


@pytest.mark.full
@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", ["recomputed", "ahead-swapped"])
def test_200_random_arrivals_and_cancellations(pool, name):
    random_sequences(pool, range(100), CASES[name])


OVER_RANKS = {"recomputed": TIGHT, "ahead-swapped": CASES["ahead-swapped"]}


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(1, 2), (2, 1), *(pytest.param(*each, marks=pytest.mark.full) for each in [(2, 2), (4, 2), (1, 4)])],
)
def test_heads_are_cut_anew_between_ranks(prefill, decode):
    with pool_of(ranks=prefill) as pool:
        found = launch(driven, decode, pool.at, list(OVER_RANKS.items()), timeout=600)[0]
    for name in OVER_RANKS:
        hold_to(found[name], expected("plain"), name, copies=max(1, decode // 2))
