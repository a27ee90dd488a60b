"""Sampling against transformers' processors, and each rule on numbers one can follow."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.model.draw import Draw
from minillm.serve import SamplingParams
from minillm.serve.sample.reference import filtered, sample


def theirs(logits, params, seen):
    from transformers import (
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    steps = [
        RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)),
        TemperatureLogitsWarper(params.temperature),
    ]
    if params.top_k is not None:
        steps.append(TopKLogitsWarper(params.top_k))
    steps += [TopPLogitsWarper(params.top_p), MinPLogitsWarper(params.min_p)]
    scores = logits[None]
    for step in steps:
        scores = step(torch.tensor([seen]), scores)
    return scores[0].softmax(-1)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 999),
    temperature=st.floats(0.1, 3),
    top_k=st.none() | st.integers(1, 30),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 0.5),
    penalty=st.floats(0.5, 2),
)
def test_equals_the_processors_of_transformers(seed, temperature, top_k, top_p, min_p, penalty):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(24, generator=generator)
    seen = torch.randint(24, (6,), generator=generator).tolist()
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty)
    ours = filtered(logits, params, seen).softmax(-1)
    torch.testing.assert_close(ours, theirs(logits, params, seen), rtol=1e-5, atol=1e-6)


def test_rules_one_by_one():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()

    def kept(**options):
        scores = filtered(logits, SamplingParams(temperature=1, **options), [])
        return scores.isfinite().nonzero().flatten().tolist()

    assert kept() == [0, 1, 2, 3]
    assert kept(top_k=2) == [0, 1] and kept(top_k=99) == [0, 1, 2, 3]
    assert kept(top_p=0.5001) == [0, 1] and kept(top_p=1e-9) == [0]
    assert kept(min_p=0.3) == [0, 1, 2] and kept(min_p=0.31) == [0, 1] and kept(min_p=1) == [0]
    penalised = filtered(torch.tensor([2.0, -2.0, 1.0]), SamplingParams(repetition_penalty=2.0), [0, 1, 0])
    assert penalised.tolist() == [1.0, -4.0, 1.0]


def test_top_k_keeps_k_of_equals_and_top_k_1_is_greedy():
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0])
    for top_k, left in ((1, [1]), (2, [1, 3]), (3, [1, 3, 4]), (4, [1, 2, 3, 4])):
        scores = filtered(logits, SamplingParams(temperature=1.0, top_k=top_k), [])
        assert scores.isfinite().nonzero().flatten().tolist() == left
    for seed in range(50):
        assert sample(logits, SamplingParams(temperature=1.0, top_k=1), [], Draw(seed)).id == 1


def test_draws_follow_the_distribution_and_the_seed():
    logits, params = torch.tensor([1.0, 0.0, -1.0, 2.0]), SamplingParams(temperature=0.7, top_k=3)
    draw = torch.Generator().manual_seed(0)
    drawn = torch.tensor([sample(logits, params, [], draw).id for _ in range(4000)])
    expected = filtered(logits, params, []).softmax(-1)
    assert (torch.bincount(drawn, minlength=4) / len(drawn) - expected).abs().max() < 0.03
    twice = [[sample(logits, params, [], torch.Generator().manual_seed(5)).id for _ in range(3)] for _ in range(2)]
    assert twice[0] == twice[1]


def test_logprobs_are_the_models_own():
    logits = torch.tensor([1.0, 0.0, 3.0, -2.0])
    token = sample(logits, SamplingParams(temperature=5.0, top_k=1, logprobs=2), [], torch.Generator())
    expected = logits.log_softmax(-1).tolist()
    assert token.id == 2 and math.isclose(token.logprob, expected[2], rel_tol=1e-6)
    assert [i for i, _ in token.top] == [2, 0] and math.isclose(token.top[1][1], expected[0], rel_tol=1e-6)
    assert sample(logits, SamplingParams(logprobs=0), [], torch.Generator()).top == ()
    assert sample(logits, SamplingParams(), [], torch.Generator()).logprob is None


def test_a_temperature_near_zero_is_the_likeliest_token():
    for temperature in (1e-3, 1e-30, 5e-324):
        assert sample(torch.tensor([1.0, 2.0]), SamplingParams(temperature=temperature), [], torch.Generator()).id == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens 0 must be a whole number of at least 1"),
        ({"max_tokens": None}, "max_tokens None must be"),
        ({"n": True}, "n True must be a whole number"),
        ({"top_k": 0}, "top_k 0 must be a whole number of at least 1"),
        ({"logprobs": -1}, "logprobs -1 must be a whole number of at least 0"),
        ({"seed": 1.5}, "seed 1.5 must be"),
        ({"temperature": -0.1}, "temperature -0.1 must be at least 0"),
        ({"temperature": float("nan")}, "temperature nan must be at least 0"),
        ({"temperature": float("inf")}, "temperature inf must be at least 0"),
        ({"temperature": "hot"}, "temperature 'hot' must be at least 0"),
        ({"top_p": 0}, "top_p 0 must be above 0 and at most 1"),
        ({"top_p": 1.01}, "top_p 1.01 must be above 0 and at most 1"),
        ({"min_p": -1}, "min_p -1 must be from 0"),
        ({"repetition_penalty": 0}, "repetition_penalty 0 must be above 0"),
        ({"stop": 7}, "stop 7 must be a text or a list of texts"),
        ({"stop": ["a", 7]}, "must be a text or a list of texts"),
        ({"stop": ["a", ""]}, "stop contains the empty text"),
        ({"stop_tokens": 7}, "stop_tokens 7 must be a list of token ids"),
        ({"stop_tokens": "7"}, "stop_tokens '7' must be a list of token ids"),
    ],
)
def test_wrong_wishes_are_refused_in_one_sentence(options, message):
    with pytest.raises(ValueError, match=message) as error:
        SamplingParams(**options)
    assert "\n" not in str(error.value)
