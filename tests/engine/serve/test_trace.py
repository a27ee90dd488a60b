"""Arrivals: lengths, times and prompts as asked; replay in their order; percentiles that occurred."""

import math
import time
from itertools import pairwise

import pytest

from course.lab14_continuous_batching.baselines import StaticBatches
from minillm.bench.load import VirtualClock, arrivals, replay, skewed, uniform
from minillm.model import ModelConfig, Transformer
from minillm.model.generate import generate
from minillm.serve import LLM, Answer, Output, SamplingParams, Timing, Token
from minillm.serve.requests.summary import spread, summary

MODEL = Transformer(ModelConfig(61, 32, 64, 2, 4, 2, max_seq_len=64, init_std=0.2), seed=2)


def test_uniform_requests_are_alike_but_for_their_prompts():
    trace = uniform(20, prompt_tokens=9, max_tokens=5, shared_prefix=4, vocab_size=61)
    assert {len(each.prompt) for each in trace} == {9} and {each.params.max_tokens for each in trace} == {5}
    assert {tuple(each.prompt[:4]) for each in trace} == {tuple(trace[0].prompt[:4])}
    assert len({tuple(each.prompt) for each in trace}) == 20 and all(0 <= t < 61 for e in trace for t in e.prompt)
    assert all(each.at == 0 and each.params.ignore_eos for each in trace)
    assert trace == uniform(20, prompt_tokens=9, max_tokens=5, shared_prefix=4, vocab_size=61)
    assert trace != uniform(20, prompt_tokens=9, max_tokens=5, shared_prefix=4, vocab_size=61, seed=1)


@pytest.mark.parametrize("count", [1, 2, 16, 64, 1000])
def test_skewed_lengths_are_few_long_ones_among_many_short(count):
    lengths = sorted(each.params.max_tokens for each in skewed(count, prompt_tokens=3, max_tokens=200, vocab_size=9))
    assert lengths[0] >= 1 and lengths[-1] == 200
    if count >= 16:
        assert sum(lengths) / count > 1.3 * lengths[count // 2] and lengths[-1] > 5 * lengths[count // 2]
    assert {each.params.max_tokens for each in skewed(8, sigma=0, prompt_tokens=3, max_tokens=7, vocab_size=9)} == {7}


def test_arrivals_are_poisson():
    times = [each.at for each in uniform(4000, rate=50, prompt_tokens=1, max_tokens=1, vocab_size=2)]
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert times == sorted(times) and mean == pytest.approx(1 / 50, rel=0.1)
    assert math.sqrt(variance) == pytest.approx(mean, rel=0.1)  # as with an exponential, and with nothing else usual


def test_prompts_are_cut_from_a_text_and_params_pass_through():
    text = [*range(1000, 1400)]
    trace = skewed(30, prompt_tokens=(5, 12), max_tokens=9, text=text, temperature=0.7, top_p=0.9)
    assert {len(each.prompt) for each in trace} == set(range(5, 13))
    for number, each in enumerate(trace):
        assert each.prompt == [*range(each.prompt[0], each.prompt[0] + len(each.prompt))]
        assert (each.params.temperature, each.params.top_p, each.params.seed) == (0.7, 0.9, number)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens 0 and shared_prefix 0: a prompt has at least 1"),
        ({"prompt_tokens": (5, 4)}, "prompt_tokens \\(5, 4\\)"),
        ({"shared_prefix": 4}, "shared_prefix 4"),
        ({"rate": 0}, "rate 0 must be above 0 requests per second"),
        ({"vocab_size": None}, "give either vocab_size"),
        ({"text": [1]}, "give either vocab_size"),
        ({"vocab_size": None, "text": [1]}, "text of 1 tokens is too short for prompts of 3"),
        ({"max_tokens": 0}, "max_tokens 0 must be"),
    ],
)
def test_bad_traces_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        uniform(2, **{"prompt_tokens": 3, "max_tokens": 2, "vocab_size": 9} | options)


def test_sigma_is_checked():
    with pytest.raises(ValueError, match="sigma -1 must be at least 0"):
        skewed(2, sigma=-1, prompt_tokens=3, max_tokens=2, vocab_size=9)


def test_replay_on_a_virtual_clock_is_exact():
    """Three requests, passes of 1 s: what each waits for is known to the second."""
    trace = [
        type(each)(at, each.prompt, each.params)
        for each, at in zip(arrivals([3, 2, 1], prompt_tokens=4, vocab_size=61), (10.0, 0.5, 10.5), strict=True)
    ]
    clock = VirtualClock(lambda tokens: 1.0)
    with clock.of(MODEL):
        outputs = replay(LLM(MODEL, clock=clock), trace)
        assert clock() == 13.0
        clock(), clock.sleep(7)
        late = replay(LLM(MODEL, clock=clock), trace)  # starts when it is told to
    for found in (outputs, late):
        assert [output.timing.ttft for output in found] == [1.0, 1.0, 1.5]
        assert [output.timing.end_to_end for output in found] == [3.0, 2.0, 1.5]
        assert [output.timing.queue for output in found] == [0.0, 0.0, 0.5]
    assert [output.answers[0].ids for output in outputs] == [
        list(generate(MODEL, each.prompt, each.params.max_tokens)) for each in trace
    ]
    MODEL(MODEL.embedding.weight.new_zeros(1, 1).long())
    assert clock() == 33.0  # the model is let go


def test_a_shared_prefix_is_computed_once():
    trace = uniform(6, prompt_tokens=20, max_tokens=3, shared_prefix=16, vocab_size=61)
    found = summary(replay(LLM(MODEL, block_size=4), trace))
    assert (found.hit, found.computed) == (5 * 16, 6 * (20 + 2) - 5 * 16)
    engine = StaticBatches(MODEL, 6)
    assert summary(replay(engine, trace)).computed == 6 * (20 + 2) == engine.computed


def test_a_replay_leaves_other_requests_alone():
    llm = LLM(MODEL)
    other = llm.add([1, 2], SamplingParams(max_tokens=9))
    outputs = replay(llm, uniform(2, prompt_tokens=3, max_tokens=2, vocab_size=61))
    assert len(outputs) == 2 and other not in [output.request_id for output in outputs] and llm.unfinished == 1


def test_a_draft_may_cost_less_than_its_target():
    clock = VirtualClock(lambda tokens: 1.0)
    token = MODEL.embedding.weight.new_zeros(1, 1).long()
    with clock.of(MODEL):
        MODEL(token)
    with clock.of(MODEL, lambda tokens: 0.25 * tokens):
        MODEL(token)
    assert clock() == 1.25


def test_replay_in_real_time_adds_nobody_early():
    trace = uniform(5, prompt_tokens=3, max_tokens=2, rate=40, vocab_size=61)
    for engine in (LLM(MODEL), StaticBatches(MODEL, 2)):
        start = time.perf_counter()
        outputs = replay(engine, trace)
        for each, output in zip(trace, outputs, strict=True):
            assert output.timing.scheduled >= start + each.at - 1e-6
            assert output.prompt == each.prompt and len(output.answers[0].ids) == 2
        assert engine.unfinished == 0


def test_a_replay_that_breaks_leaves_nothing_behind():
    llm = LLM(MODEL)
    trace = [
        *uniform(3, prompt_tokens=3, max_tokens=9, vocab_size=61),
        *uniform(1, prompt_tokens=70, max_tokens=9, vocab_size=61),
    ]
    with pytest.raises(ValueError, match="a prompt of 70 tokens does not fit"):
        replay(llm, trace)
    assert llm.unfinished == 0 and llm.pool.used == 0


def test_summary_counts_useful_tokens_and_failed_requests():
    def output(arrived, first, ended, tokens, error=None):
        answer = Answer([Token(1)] * tokens, reason="length")
        return Output("x", [1], [answer], Timing(arrived, arrived, first, ended), error, 10, 2, 1)

    found = summary(
        [output(0.0, 1.0, 3.0, 5), output(1.0, 3.0, 5.0, 2), output(1.0, 2.0, 2.0, 1), output(0, 0, 9, 3, "bad")]
    )
    assert (found.requests, found.failed, found.tokens, found.seconds, found.tokens_per_s) == (4, 1, 8, 5.0, 1.6)
    assert (found.ttft.p50, found.ttft.p99, found.tpot.p50, found.tpot.most) == (1.0, 2.0, 0.5, 2.0)
    assert (found.end_to_end.most, found.computed, found.hit, found.preemptions) == (4.0, 40, 8, 4)
    with pytest.raises(ValueError, match="none of 0 outputs has a token"):
        summary([])


def test_percentiles_are_values_that_occurred():
    assert spread([*range(1, 101)]) == spread([*range(100, 0, -1)]) and spread([*range(1, 101)]).p99 == 99
    assert (spread([4.0]).p50, spread([1, 2, 3, 4]).p50, spread([1, 2]).p99) == (4.0, 2, 2)
    assert math.isnan(spread([]).p50)


def test_params_of_a_trace_can_be_greedy_or_drawn():
    [each] = uniform(1, prompt_tokens=2, max_tokens=3, vocab_size=9, ignore_eos=False)
    assert each.params == SamplingParams(max_tokens=3, seed=0)
