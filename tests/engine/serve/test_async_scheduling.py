"""Asynchronous scheduling: the answers of the plain engine (all combinations are in `test_proof.py`), in another order
of launching and reading; what is found out one step late leaves nothing behind."""

from dataclasses import replace

import pytest
import torch
from recorded import record
from test_decode_graphs import alone, served
from test_proof import CONFIG, mixed_requests, nothing_left
from test_sampler import take_samples

from minillm.data import Tokenizer
from minillm.model import ModelConfig, Transformer
from minillm.model.generate import generate
from minillm.serve import LLM, SamplingParams
from minillm.serve.run.decode_graphs import DecodeGraphs
from minillm.serve.sample import isolate
from minillm.serve.sample.batch import SampledTokens
from minillm.serve.speculate import NGram

MODEL = Transformer(CONFIG, seed=2)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10], [11, 12, 13, 14]]
TIGHT = {"block_size": 4, "num_blocks": 20, "token_budget": 64, "max_num_seqs": 12, "reserve": 0}


def naive(prompt, count, model=MODEL):
    return list(generate(model, prompt, count))


def everything():
    """Requests that draw in every way, with log-probabilities and penalties."""
    params = []
    for number in range(16):
        options = [{}, {"top_p": 0.9}, {"top_k": 5}, {"repetition_penalty": 1.4}, {"min_p": 0.05, "logprobs": 2}]
        each = options[number % 5] | ({"temperature": 1.3} if number % 3 else {})
        params.append(SamplingParams(max_tokens=3 + number, n=1 + number % 2, seed=number, **each))
    return [prompt for prompt, *_ in mixed_requests(16)], params


def test_a_step_is_launched_before_the_one_before_it_is_read(monkeypatch):
    events, model = [], Transformer(CONFIG, seed=2)
    model.register_forward_hook(lambda *_: events.append("launch"))
    read = SampledTokens.read
    monkeypatch.setattr(SampledTokens, "read", lambda tokens: (events.append("read"), read(tokens))[1])
    [output] = LLM(model, async_scheduling=True).generate([PROMPTS[0]], SamplingParams(max_tokens=4))
    assert output.answers[0].ids == naive(PROMPTS[0], 4)
    assert events == ["launch", *["launch", "read"] * 3, "read"]  # the last one, by its length, launches nothing
    assert output.computed == 3 + 3


@pytest.mark.drawn(2)
@pytest.mark.parametrize("doubtful", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_every_kind_of_draw_is_the_same(doubtful, preemption, monkeypatch):
    """Where many rows are sampled again, it is after the next pass has read the wrong token."""
    if doubtful:
        take_samples(monkeypatch)
    prompts, params = everything()
    redone, read = [], SampledTokens.read
    monkeypatch.setattr(SampledTokens, "read", lambda tokens: (read(tokens), redone.extend(tokens.resampled))[0])
    found = []
    for ahead in (False, True):
        llm = LLM(MODEL, preemption=preemption, async_scheduling=ahead, **TIGHT)
        outputs = llm.generate(prompts, params)
        found.append([answer.ids for output in outputs for answer in output.answers])
        assert sum(output.preemptions for output in outputs) > 0
        for output, each in zip(outputs, params, strict=True):
            assert all((token.logprob is None) == (each.logprobs is None) for token in output.answers[0].tokens)
        nothing_left(llm)
        for prefix in llm.pool._cache:
            assert all(token >= 0 for token in prefix.tokens), "a placeholder was published"
    assert found[0] == found[1] and bool(redone) == doubtful


def test_replayed_steps_take_tokens_from_the_device(monkeypatch):
    monkeypatch.setattr(DecodeGraphs, "_record", lambda self, compute: record(compute))
    monkeypatch.setattr("minillm.model.transformer.check_tokens", lambda *_: None)
    requests = mixed_requests(12)
    llm = LLM(MODEL, graphs=True, async_scheduling=True, **TIGHT)
    outputs = served(llm, requests)
    for output, (prompt, params, _, _) in zip(outputs, requests, strict=True):
        assert [answer.ids for answer in output.answers] == alone(MODEL, prompt, params)
    assert llm.runner.graphs.graphs
    nothing_left(llm)


def test_blocks_that_an_answer_filled_are_hit():
    """A second turn, whose prompt is the first answer and more."""
    llm, params = LLM(MODEL, block_size=4, async_scheduling=True), SamplingParams(max_tokens=14)
    [first] = llm.generate([PROMPTS[1]], params)
    again = [*PROMPTS[1], *first.answers[0].ids, 7]
    [second] = llm.generate([again], params)
    assert second.hit == 16 and second.answers[0].ids == naive(again, 14)  # of 19 that were computed


def test_a_stop_is_found_one_step_late_and_streams_do_not_show_it():
    tokenizer = Tokenizer.load()
    model = Transformer(ModelConfig(tokenizer.vocab_size, 32, 64, 2, 4, 2, max_seq_len=64, init_std=0.2), seed=1)
    plain, ahead = (LLM(model, tokenizer=tokenizer, async_scheduling=each) for each in (False, True))
    [free] = plain.generate(["def hello"], SamplingParams(max_tokens=16, ignore_eos=True))
    text, ids = free.answers[0].text, free.answers[0].ids
    for options in ({"stop": text[12:15]}, {"stop_tokens": [ids[5]]}, {"first_tokens": [ids[3], 9]}):
        params = SamplingParams(max_tokens=16, ignore_eos=True, **options)
        [right], [found] = (llm.generate(["def hello"], params) for llm in (plain, ahead))
        assert found.answers == right.answers
        assert "".join(delta.text for delta in ahead.stream("def hello", params)) == right.answers[0].text
        late = right.answers[0].reason == "stop"
        assert ahead.unfinished == 0 and found.computed == right.computed + late  # what is dropped had been computed
    ahead.step()
    nothing_left(ahead)


@pytest.mark.parametrize("bad", [2, 3])
def test_a_pass_that_raises_fails_its_requests_after_the_tokens_before_it(bad):
    model = Transformer(CONFIG, seed=2)
    llm = LLM(model, max_num_seqs=2, token_budget=8, block_size=4, async_scheduling=True)
    right, calls = model.forward, iter(range(1000))

    def forward(*args, **kwargs):
        if next(calls) == bad:
            raise RuntimeError("the device is gone")
        return right(*args, **kwargs)

    model.forward = forward
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=6))
    assert [output.answers[0].reason for output in outputs] == ["failed", "failed", "length", "length"]
    assert outputs[0].error == "the forward pass raised RuntimeError: the device is gone"
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        count = bad if output.error and prompt is PROMPTS[0] else len(output.answers[0].ids)
        assert output.answers[0].ids == naive(prompt, count)
    assert [each.error for each in llm.records if each.error] == ["RuntimeError: the device is gone"]
    nothing_left(llm)


def test_what_is_wrong_with_one_request_ends_it_alone(monkeypatch):
    """Logits of NaN, a request that is cancelled, sampling that raises: the others' tokens are right."""
    model = Transformer(CONFIG, seed=2)
    with torch.no_grad():
        model.embedding.weight[60] = float("nan")
        model.head.weight[60] = 0  # never the likeliest
    llm = LLM(model, block_size=4, num_blocks=40, async_scheduling=True)
    right, calls = isolate.sample_on_device, []

    def spoilt(logits, inputs, *more):
        if not inputs.greedy_only and 0.123 in inputs.min_p:
            calls.append(1)
            if len(calls) > 2:
                raise RuntimeError("no such kernel")
        return right(logits, inputs, *more)

    monkeypatch.setattr(isolate, "sample_on_device", spoilt)
    odd = SamplingParams(max_tokens=8, temperature=0.9, min_p=0.123, n=2, seed=1)
    names = [llm.add(prompt, SamplingParams(max_tokens=8)) for prompt in PROMPTS]
    names += [llm.add([60, 1], SamplingParams(max_tokens=8, n=2)), llm.add([3, 2], odd)]
    found = {output.request_id: output for _ in range(3) for output in llm.step()}
    llm.cancel(names[3])
    while llm.unfinished:
        found |= {output.request_id: output for output in llm.step()}
    assert [found[name].answers[0].ids for name in names[:3]] == [naive(prompt, 8, model) for prompt in PROMPTS[:3]]
    assert found[names[3]].answers[0].reason == "cancelled"
    assert found[names[3]].answers[0].ids == naive(PROMPTS[3], 8, model)[: len(found[names[3]].answers[0].ids)]
    assert found[names[4]].error == "its logits are not finite after 2 tokens (NaN or infinite)"
    assert found[names[5]].error == "sampling its token 2 raised RuntimeError: no such kernel"
    llm.step()
    nothing_left(llm)


def test_blocks_of_a_spoilt_step_are_not_taken_over():
    """The keys and logits of one pass are not finite, and it is read after the next step is planned."""
    model, prompt = Transformer(CONFIG, seed=2), list(range(1, 14))
    llm = LLM(model, block_size=4, async_scheduling=True)
    right, calls = model.forward, iter(range(100))

    def forward(*args, **kwargs):
        logits = right(*args, **kwargs)
        if next(calls) == 0:
            llm.cache.pool.fill_(float("nan"))
            logits.fill_(float("nan"))
        return logits

    model.forward = forward
    names = [llm.add(prompt, SamplingParams(max_tokens=8))]
    found = {output.request_id: output for output in llm.step()}
    names.append(llm.add(prompt, SamplingParams(max_tokens=8)))
    while llm.unfinished:
        found |= {output.request_id: output for output in llm.step()}
    assert found[names[0]].error == "its logits are not finite after 13 tokens (NaN or infinite)"
    assert found[names[1]].error is None and found[names[1]].answers[0].ids == naive(prompt, 8)
    nothing_left(llm)


def test_what_is_dropped_after_a_stop_fails_nobody():
    """Sample 0 stops, and the step that was launched before that was known has logits of NaN for it."""
    free = SamplingParams(max_tokens=12, n=2, temperature=1.3, seed=5)
    [output] = LLM(MODEL).generate([PROMPTS[0]], free)
    first, second = (answer.ids for answer in output.answers)
    place = next(i for i in range(2, 12) if first[i] not in first[:i] + second)
    model = Transformer(CONFIG, seed=2)
    right, calls = model.forward, iter(range(100))

    def forward(*args, **kwargs):
        logits = right(*args, **kwargs)
        if next(calls) == place + 1:
            assert logits.shape[1] == 2
            logits[:, 0] = float("nan")
        return logits

    model.forward = forward
    llm = LLM(model, async_scheduling=True)
    [output] = llm.generate([PROMPTS[0]], replace(free, stop_tokens=[first[place]]))
    assert output.error is None and [answer.reason for answer in output.answers] == ["stop", "length"]
    assert [answer.ids for answer in output.answers] == [first[:place], second]
    nothing_left(llm)


def test_an_interrupt_forgets_what_was_launched():
    model = Transformer(CONFIG, seed=2)
    llm = LLM(model, block_size=4, async_scheduling=True)
    for prompt in PROMPTS:
        llm.add(prompt, SamplingParams(max_tokens=9))
    right, calls = model.forward, iter(range(100))

    def forward(*args, **kwargs):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return right(*args, **kwargs)

    model.forward = forward
    with pytest.raises(KeyboardInterrupt):
        while llm.unfinished:
            llm.step()
    outputs = llm.step()
    assert {output.error for output in outputs} == {"the step was interrupted by KeyboardInterrupt: "}
    nothing_left(llm)
    assert llm.generate([PROMPTS[1]], SamplingParams(max_tokens=5))[0].answers[0].ids == naive(PROMPTS[1], 5)


def test_what_cannot_overlap_is_refused():
    with pytest.raises(ValueError, match="async_scheduling with a proposer: drafts need tokens that are not read"):
        LLM(MODEL, proposer=NGram(), async_scheduling=True)
    with pytest.raises(ValueError, match="async_scheduling 'yes' must be True or False"):
        LLM(MODEL, async_scheduling="yes")
