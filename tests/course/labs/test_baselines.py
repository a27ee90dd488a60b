"""The baselines: the tokens of the naive loop and of LLM, and exactly the work that their schedule says."""

import random
from dataclasses import replace

import pytest
import torch

from course.lab14_continuous_batching.baselines import StaticBatches, TimerBatches
from minillm.bench.load import VirtualClock, arrivals, replay, skewed, uniform
from minillm.data import Tokenizer
from minillm.model import ModelConfig, Transformer
from minillm.model.generate import generate
from minillm.serve import LLM, SamplingParams

CONFIG = ModelConfig(61, 32, 64, 2, 4, 2, max_seq_len=64, init_std=0.2)
MODEL = Transformer(CONFIG, seed=2)
ENGINES = {
    "static": lambda model, **options: StaticBatches(model, 4, **options),
    "adaptive": lambda model, **options: TimerBatches(model, 4, 0.02, **options),
}
engines = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


def requests(count=14, seed=3):
    """(prompt, params): mixed lengths, draws, stops, samples."""
    rng = random.Random(seed)
    for number in range(count):
        drawn = {"temperature": 0.9, "top_p": 0.9, "top_k": 30, "min_p": 0.01, "repetition_penalty": 1.1}
        params = SamplingParams(
            max_tokens=rng.randrange(1, 20),
            n=2 if number % 4 == 1 else 1,
            seed=number,
            stop_tokens=[rng.randrange(61) for _ in range(2)],
            logprobs=2 if number % 5 == 0 else None,
            **drawn if number % 2 else {},
        )
        yield [rng.randrange(61) for _ in range(rng.randrange(1, 30))], params


@engines
@pytest.mark.drawn(2)
@pytest.mark.parametrize("variant", [{}, {"sliding_window": 5}, {"tie_embeddings": True, "qk_norm": True}], ids=str)
def test_greedy_tokens_are_those_of_the_naive_loop(engine, variant):
    model = Transformer(replace(CONFIG, **variant), seed=4)
    prompts = [prompt for prompt, _ in requests()]
    outputs = engine(model).generate(prompts, SamplingParams(max_tokens=12))
    assert [output.answers[0].ids for output in outputs] == [list(generate(model, prompt, 12)) for prompt in prompts]


@engines
def test_answers_are_those_of_llm(engine):
    """Draws, stops, samples, log-probabilities: whatever a request asks for."""
    prompts, params = zip(*requests(), strict=True)
    expected = LLM(MODEL).generate(list(prompts), list(params))
    outputs = (mine := engine(MODEL)).generate(list(prompts), list(params))
    for output, other in zip(outputs, expected, strict=True):
        assert [(a.ids, a.reason) for a in output.answers] == [(a.ids, a.reason) for a in other.answers]
        for answer, wanted in zip(output.answers, other.answers, strict=True):
            for token, right in zip(answer.tokens, wanted.tokens, strict=True):
                assert [i for i, _ in token.top] == [i for i, _ in right.top]
                assert (token.logprob is None) == (right.logprob is None)
                assert token.logprob is None or abs(token.logprob - right.logprob) < 1e-4
    assert {a.reason for output in outputs for a in output.answers} == {"stop", "length"}
    assert mine.unfinished == 0 and mine.computed - mine.waste == sum(output.computed for output in outputs)
    assert mine.computed == sum(record.tokens for record in mine.records)
    assert sum(record.sampled for record in mine.records) >= sum(len(a.ids) for o in outputs for a in o.answers)


@engines
def test_text_and_stop_texts(engine):
    tokenizer = Tokenizer.load()
    model = Transformer(replace(CONFIG, vocab_size=tokenizer.vocab_size), seed=1)
    [whole] = LLM(model, tokenizer=tokenizer).generate(["def hello"], SamplingParams(max_tokens=16))
    stop = whole.answers[0].text[8:11]
    params = SamplingParams(max_tokens=16, stop=stop)
    [expected], [output] = (
        each.generate(["def hello"], params)
        for each in (LLM(model, tokenizer=tokenizer), engine(model, tokenizer=tokenizer))
    )
    assert output.answers[0] == expected.answers[0] and stop not in output.answers[0].text


def test_a_static_batch_runs_until_its_longest_is_done():
    engine = StaticBatches(MODEL, 3)
    prompts, most = [[1] * 2, [2] * 6, [3] * 4, [4] * 5], [4, 1, 9, 2]
    outputs = engine.generate(prompts, [SamplingParams(max_tokens=n, ignore_eos=True) for n in most])
    assert len(engine.records) == 9 + 2  # the longest answer of each batch
    assert engine.computed == 3 * 6 + 8 * 3 + 5 + 1
    padding, over = (6 - 2) + (6 - 4), (9 - 4) + (9 - 1)
    assert engine.waste == padding + over
    assert [output.computed for output in outputs] == [len(p) + n - 1 for p, n in zip(prompts, most, strict=True)]
    assert engine.records[0].batch == (("request-0/0", 0, 6), ("request-1/0", 0, 6), ("request-2/0", 0, 6))
    assert engine.records[0].ended == ("request-1",) and engine.records[0].waiting == 1
    assert engine.records[8].batch == (("request-0/0", 5, 1), ("request-1/0", 6, 1), ("request-2/0", 11, 1))


def test_padding_does_not_meet_what_a_slot_held_before():
    """Rows of very unequal prompts whose answers grow into the padding of the longest."""
    prompts = [[7], [*range(40)], [8, 9]]
    outputs = StaticBatches(MODEL, 3).generate(prompts, SamplingParams(max_tokens=23))
    assert [output.answers[0].ids for output in outputs] == [list(generate(MODEL, prompt, 23)) for prompt in prompts]


def test_batches_of_equal_lengths_waste_nothing_and_skewed_ones_do():
    options = {"prompt_tokens": 5, "max_tokens": 40, "vocab_size": 61}
    wasted = []
    for trace in (uniform, skewed):
        engine = StaticBatches(MODEL, 8)
        replay(engine, trace(16, **options))
        wasted.append(engine.waste / engine.computed)
    assert wasted[0] == 0 and wasted[1] > 0.4


def passes(cost=0.01):
    return VirtualClock(lambda tokens: cost)


def test_a_timed_batch_starts_when_full_or_when_its_oldest_has_waited():
    trace = arrivals([1] * 7, prompt_tokens=3, vocab_size=61)
    trace = [replace(each, at=at) for each, at in zip(trace, (0.0, 0.03, 0.04, 0.05, 1.0, 1.02, 1.2), strict=True)]
    clock = passes()
    engine = TimerBatches(MODEL, 4, 0.1, clock=clock)
    with clock.of(MODEL):
        outputs = replay(engine, trace)
    assert [len(record.batch) for record in engine.records] == [4, 2, 1]
    assert [round(record.started, 6) for record in engine.records] == [0.05, 1.1, 1.3]
    assert [round(output.timing.queue, 6) for output in outputs] == [0.05, 0.02, 0.01, 0.0, 0.1, 0.08, 0.1]


def test_with_a_free_engine_nobody_waits_longer_than_the_timer():
    """Latency <= timer + batch time (P96), and a longer timer means fewer passes."""
    found = []
    for wait_s in (0.0, 0.05, 0.4):
        clock = passes()
        engine = TimerBatches(MODEL, 64, wait_s, clock=clock)
        with clock.of(MODEL):
            outputs = replay(engine, uniform(40, prompt_tokens=4, max_tokens=1, rate=30, vocab_size=61))
        assert max(output.timing.end_to_end for output in outputs) <= wait_s + 2 * 0.01 + 1e-9
        found.append(len(engine.records))
    assert found[0] > found[1] > found[2]


def test_generate_waits_for_the_timer():
    clock = passes()
    [output] = TimerBatches(MODEL, 4, 0.3, clock=clock).generate([[1]])
    assert output.timing.queue == 0.3


@engines
def test_cancelled_requests_end_and_the_others_go_on(engine):
    mine = engine(MODEL, clock=passes())
    names = [mine.add([token], SamplingParams(max_tokens=9, n=2)) for token in range(6)]
    ended = [*mine.step()]
    mine.clock.sleep(1)
    ended += mine.step()
    for name in (names[0], names[5]):
        mine.cancel(name)
    with pytest.raises(ValueError, match="'request-0' cannot be cancelled: it is unknown or has ended"):
        mine.cancel(names[0])
    while mine.unfinished:
        ended += mine.step()
        mine.clock.sleep(1)
    by_name = {output.request_id: output for output in ended + mine.step()}
    assert sorted(by_name) == names
    for token, name in enumerate(names):
        reason = "cancelled" if name in (names[0], names[5]) else "length"
        assert [answer.reason for answer in by_name[name].answers] == [reason] * 2
        full = list(generate(MODEL, [token], 9))
        assert all(answer.ids == full[: len(answer.ids)] for answer in by_name[name].answers)


@engines
def test_nan_ends_its_request_only(engine):
    model = Transformer(CONFIG, seed=2)
    with torch.no_grad():
        model.embedding.weight[13] = float("nan")
    good, bad = engine(model).generate([[1, 2], [1, 13]], SamplingParams(max_tokens=5, n=2))
    assert bad.error == "its logits are not finite after 2 tokens (NaN or infinite)" and not bad.answers[0].ids
    assert good.error is None and good.answers[0].ids == list(generate(MODEL, [1, 2], 5))


@engines
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.add([]), "a prompt of 0 tokens does not fit: use 1 to 63"),
        (lambda e: e.add([1] * 64), "a prompt of 64 tokens does not fit"),
        (lambda e: e.add("text"), "the prompt is text and this LLM has no tokenizer"),
        (lambda e: (e.add([1], request_id="x"), e.add([1], request_id="x")), "request id 'x' is taken"),
        (lambda e: e.cancel("nobody"), "request 'nobody' cannot be cancelled"),
    ],
)
def test_bad_requests_are_refused_in_one_sentence(engine, call, message):
    with pytest.raises(ValueError, match=message):
        call(engine(MODEL))


def test_bad_engines_are_refused():
    with pytest.raises(ValueError, match="batch_size 0 must be a whole number of at least 1"):
        StaticBatches(MODEL, 0)
    with pytest.raises(ValueError, match="wait_s -1 must be at least 0 seconds"):
        TimerBatches(MODEL, 4, -1)
