"""The engine at its boundary: what ends a request and why, faults that stay with one request, times and records."""

import json
import threading
from contextlib import suppress
from dataclasses import asdict
from functools import partial

import pytest
import torch

from minillm.data import Tokenizer
from minillm.model import ModelConfig, Transformer
from minillm.model.draw import sample_seed
from minillm.model.generate import generate
from minillm.serve import LLM, SamplingParams, Scheduler
from minillm.serve.schedule.fair import FairScheduler

CONFIG = ModelConfig(50, 32, 64, 2, 4, 2, max_seq_len=48, init_std=0.2)
MODEL = Transformer(CONFIG, seed=3)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10], [11, 12, 13, 14]]


def whole(llm):
    pool = llm.pool
    assert pool.free + pool.cached + pool.used == pool.total and pool.used == 0
    assert pool.references == [0] * pool.total and pool.free_host == pool.num_host_blocks
    assert llm.unfinished == 0 and not llm.requests.live


def naive(prompt, count, model=MODEL):
    return list(generate(model, prompt, count))


def test_not_a_number_fails_one_request_and_the_others_go_on():
    """Token 49 has an embedding of nan: the request that says it is lost, its blocks are reused by others."""
    model = Transformer(CONFIG, seed=3)
    with torch.no_grad():
        model.embedding.weight[49] = float("nan")
        model.head.weight[49] = model.head.weight[0] - 1e-3  # never the likeliest by far
    prompts = [[49, 2, 3, 4, 5], *PROMPTS, [1, 2, 3, 4, 49]]
    assert all(49 not in naive(prompt, 30, model) for prompt in PROMPTS)
    llm = LLM(model, block_size=2, num_blocks=30, max_num_seqs=3, token_budget=8)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=30, n=1))
    for lost in (outputs[0], outputs[-1]):
        assert [answer.reason for answer in lost.answers] == ["failed"] and lost.answers[0].ids == []
        assert "logits are not finite after 5 tokens" in lost.error
    assert [o.answers[0].ids for o in outputs[1:-1]] == [naive(prompt, 30, model) for prompt in PROMPTS]
    whole(llm)
    llm = LLM(model, block_size=2)
    llm.generate(prompts[:1])
    assert llm.pool.cached == 0  # what it had published is not for others


def test_a_forward_pass_that_raises_fails_its_requests_only():
    model = Transformer(CONFIG, seed=3)
    llm = LLM(model, max_num_seqs=2, token_budget=8, block_size=4)
    right, calls = model.forward, iter(range(1000))

    def forward(*args, **kwargs):
        if next(calls) == 2:
            raise RuntimeError("the device is gone")
        return right(*args, **kwargs)

    model.forward = forward
    with pytest.warns(UserWarning, match="^2 of 4 requests failed, the first: the forward pass raised RuntimeError"):
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=6))
    assert [output.answers[0].reason for output in outputs] == ["failed", "failed", "length", "length"]
    assert outputs[0].error == "the forward pass raised RuntimeError: the device is gone"
    assert [o.answers[0].ids for o in outputs[2:]] == [naive(prompt, 6) for prompt in PROMPTS[2:]]
    assert [record.error for record in llm.records if record.error] == ["RuntimeError: the device is gone"]
    whole(llm)
    [again] = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=6))
    assert again.answers[0].ids == naive(PROMPTS[0], 6) and again.hit == 0


def test_an_interrupt_leaves_nothing_behind():
    model = Transformer(CONFIG, seed=3)
    llm = LLM(model, max_num_seqs=2, token_budget=8)

    def forward(*args, **kwargs):
        raise KeyboardInterrupt

    model.forward = forward
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS)
    assert llm.step() == []
    whole(llm)


def test_cancel_and_timeout():
    now = [0.0]
    llm = LLM(MODEL, clock=lambda: now[0], max_num_seqs=2, token_budget=8)
    params = SamplingParams(max_tokens=20, n=2)
    names = [llm.add(prompt, params, timeout_s=5 if i == 3 else None) for i, prompt in enumerate(PROMPTS)]
    assert llm.step() == [] and llm.unfinished == 4
    llm.cancel(names[0])  # running
    llm.cancel(names[2])  # waiting
    first, third = llm.step()
    assert [answer.reason for answer in first.answers] == ["cancelled"] * 2
    assert third.timing.scheduled is third.timing.ttft is None and third.answers[0].ids == []
    for name in (names[0], "never"):
        with pytest.raises(ValueError, match=f"request '{name}' cannot be cancelled: it is unknown or has ended"):
            llm.cancel(name)
    now[0] = 5.0
    [late] = llm.step()
    assert late.request_id == names[3] and late.answers[0].reason == "timeout"
    ended = []
    while llm.unfinished:
        ended += llm.step()
    assert [output.request_id for output in ended] == [names[1]]
    assert [answer.ids for answer in ended[0].answers] == [naive(PROMPTS[1], 20)] * 2
    whole(llm)


def test_threads_may_add_and_cancel_while_one_steps():
    llm = LLM(MODEL, block_size=4, num_blocks=24, max_num_seqs=4, token_budget=16)
    ended, done = [], threading.Event()

    def user(number):
        for round_ in range(6):
            name = llm.add(PROMPTS[number], SamplingParams(max_tokens=8), request_id=f"{number}.{round_}")
            if round_ % 3 == 2:
                with suppress(ValueError):  # it was faster
                    llm.cancel(name)

    def stepper():
        while not done.is_set() or llm.unfinished:
            ended.extend(llm.step())
        ended.extend(llm.step())

    users = [threading.Thread(target=user, args=[number]) for number in range(4)]
    loop = threading.Thread(target=stepper)
    for thread in (loop, *users):
        thread.start()
    for thread in users:
        thread.join()
    done.set()
    loop.join()
    assert len({output.request_id for output in ended}) == len(ended) == 24
    for output in ended:
        [answer] = output.answers
        expected = naive(output.prompt, 8)
        assert answer.ids == (expected if answer.reason == "length" else expected[: len(answer.ids)])
    whole(llm)


@pytest.mark.parametrize("fails", [False, True])
def test_cancelled_during_the_forward_pass(fails):
    """The lock is free meanwhile; what a failed pass left in blocks is never hit, even if its request was cancelled."""
    model = Transformer(CONFIG, seed=3)
    llm = LLM(model, block_size=2)
    right, names = model.forward, []

    def forward(*args, **kwargs):
        if names:
            thread = threading.Thread(target=lambda: (llm.cancel(names.pop()), llm.add([7] * 5, request_id="new")))
            thread.start()
            thread.join(timeout=300)
            assert not thread.is_alive()
            if fails:
                raise RuntimeError("lost")
        return right(*args, **kwargs)

    model.forward = forward
    names.append(llm.add(PROMPTS[1], SamplingParams(max_tokens=4)))
    [output] = llm.step()
    assert output.answers[0].reason == "cancelled" and llm.pool.cached == (0 if fails else 3)
    [after] = llm.generate(PROMPTS[1:2], SamplingParams(max_tokens=4))
    assert after.answers[0].ids == naive(PROMPTS[1], 4) and after.hit == (0 if fails else 4)
    while llm.unfinished:
        llm.step()
    whole(llm)


@pytest.mark.parametrize("step", [0, 2])  # at the prompt, and while it decodes
def test_cancelled_during_a_pass_that_gave_nan(step):
    """One bad pass, as of a faulty device: what it wrote must not be hit later, though the request had left before."""
    model, prompt = Transformer(CONFIG, seed=3), [1, 2, 3, 4, 5, 6]
    llm = LLM(model, block_size=2)
    right, calls = model.forward, iter(range(1000))

    def forward(*args, **kwargs):
        if next(calls) != step:
            return right(*args, **kwargs)
        llm.cancel("lost")
        embedding = model.embedding.weight.clone()
        model.embedding.weight.fill_(float("nan"))
        logits = right(*args, **kwargs)
        model.embedding.weight.copy_(embedding)
        return logits

    model.forward = forward
    llm.add(prompt, SamplingParams(max_tokens=9), request_id="lost")
    for _ in range(step):
        assert llm.step() == []
    [lost] = llm.step()
    assert lost.answers[0].reason == "cancelled" and llm.pool.cached == 0
    again = [*prompt, *lost.answers[0].ids]
    [output] = llm.generate([again], SamplingParams(max_tokens=6))
    assert output.error is None and output.answers[0].ids == naive(again, 6) and output.hit == 0
    whole(llm)


def test_the_context_ends_an_answer():
    [output] = LLM(MODEL).generate([[1] * 45], SamplingParams(max_tokens=100))
    assert output.answers[0].ids == naive([1] * 45, 100) and len(output.answers[0].ids) == 3


@pytest.fixture(scope="module")
def talker():
    """A model of random words and a tokenizer to say them with."""
    tokenizer = Tokenizer.load()
    config = ModelConfig(tokenizer.vocab_size, 32, 64, 2, 4, 2, max_seq_len=64, init_std=0.2)
    return Transformer(config, seed=1), tokenizer


def test_text_in_text_out_and_stop_strings(talker):
    model, tokenizer = talker
    llm = LLM(model, tokenizer=tokenizer)
    [free] = llm.generate(["def hello"], SamplingParams(max_tokens=16, ignore_eos=True))
    text, ids = free.answers[0].text, free.answers[0].ids
    assert free.prompt == tokenizer.encode("def hello") and text == tokenizer.decode(ids, skip_special=True)
    assert free.answers[0].reason == "length"
    middle = len(tokenizer.decode(ids[:7]))
    stop = text[middle - 1 : middle + 2]  # across a border of tokens
    expected = text[: text.find(stop)]
    [cut] = llm.generate(["def hello"], SamplingParams(max_tokens=16, ignore_eos=True, stop=["never said", stop]))
    assert cut.answers[0].text == expected and cut.answers[0].reason == "stop"
    assert cut.answers[0].ids == ids[: len(cut.answers[0].ids)] and len(cut.answers[0].ids) < 16
    [ended] = llm.generate(["def hello"], SamplingParams(max_tokens=16, stop_tokens=[ids[4]]))
    assert ended.answers[0].ids == ids[: ids.index(ids[4])] and ended.answers[0].reason == "stop"
    whole(llm)


def test_the_end_of_text_ends_an_answer_unless_ignored(talker):
    model, tokenizer = talker
    eos, ids = tokenizer.eos_id, list(generate(model, [5, 6], 8))
    silent = Transformer(model.config, seed=1)
    right = silent.head_logits

    def head_logits(x, weight):  # says eos where it would have said ids[3]
        logits = right(x, weight)
        logits[..., eos] = torch.where(logits.argmax(-1) == ids[3], 1e3, -1e3)
        return logits

    silent.head_logits = head_logits
    llm = LLM(silent, tokenizer=tokenizer)
    [stopped] = llm.generate([[5, 6]], SamplingParams(max_tokens=8))
    [ignored] = llm.generate([[5, 6]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert stopped.answers[0].ids == ids[: ids.index(ids[3])] and stopped.answers[0].reason == "stop"
    assert len(ignored.answers[0].ids) == 8 and eos in ignored.answers[0].ids


def test_times_and_records():
    now = iter(range(10_000))
    llm = LLM(MODEL, block_size=4, num_blocks=12, clock=lambda: next(now), record_blocks=True, max_num_seqs=3, chunk=4)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=9))
    for output in outputs:
        timing = output.timing
        assert timing.arrived < timing.scheduled < timing.first_token < timing.ended
        assert timing.queue + timing.prefill == timing.ttft and timing.ttft < timing.end_to_end
        assert timing.tpot(9) == (timing.ended - timing.first_token) / 8 and timing.tpot(1) is None
        assert output.computed == len(output.prompt) + 8
    assert outputs[3].timing.queue > outputs[2].timing.queue
    assert sum(record.sampled for record in llm.records) == 36
    assert sum(record.tokens for record in llm.records) == sum(output.computed for output in outputs)
    assert [name for record in llm.records for name in record.ended] != []
    first = llm.records[0]
    assert first.batch == (("request-0/0", 0, 3), ("request-1/0", 0, 4), ("request-2/0", 0, 1))
    assert first.admitted == ("request-0/0", "request-1/0", "request-2/0") and first.waiting == 1
    for record in llm.records:
        assert record.free + record.cached + record.used == 12 == len(record.references)
        held = [block for table in record.tables.values() for block in table]
        assert len(held) == sum(record.references) and len(set(held)) == record.used
    assert json.loads(json.dumps([asdict(record) for record in llm.records]))[0]["running"] == 3
    assert LLM(MODEL, keep_records=0).generate([[1]])[0].answers[0].ids


def test_forks_share_their_prompt_in_the_records():
    llm = LLM(MODEL, block_size=4, num_blocks=40, record_blocks=True)
    [output] = llm.generate([[*range(10)]], SamplingParams(max_tokens=6, n=4, temperature=1.5, seed=1))
    expected = [
        list(generate(MODEL, [*range(10)], 6, temperature=1.5, seed=sample_seed(1, index))) for index in range(4)
    ]
    assert [answer.ids for answer in output.answers] == expected and len({tuple(ids) for ids in expected}) == 4
    assert llm.records[0].references.count(4) == 3 and llm.records[0].used == 3
    assert llm.records[1].references.count(4) == 2 and llm.records[1].used == 2 + 4 and llm.pool.copied == 3
    assert output.computed == 10 + 4 * 5


def test_salts_do_not_share():
    llm = LLM(MODEL, block_size=4)
    prompt, hits = [*range(13)], []
    for salt in (None, "a", "b", "a", None):
        llm.add(prompt, SamplingParams(max_tokens=1), salt=salt)
        hits += [output.hit for output in llm.step()]
    assert hits == [0, 0, 0, 12, 12]


def test_stream_gives_tokens_as_they_come_and_leaves_others_alone():
    llm = LLM(MODEL, block_size=4)
    other = llm.add(PROMPTS[1], SamplingParams(max_tokens=3))
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=8))
    assert [token.id for delta in stream for token in delta.tokens] == naive(PROMPTS[0], 8)
    assert [output.request_id for output in llm.step()] == [other]
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=8, n=2))
    assert [next(stream)[0] for _ in range(3)] == [0, 1, 0]
    stream.close()
    assert llm.step() == []
    whole(llm)


def test_logprobs_are_those_of_the_model():
    [output] = LLM(MODEL).generate([[1, 2, 3]], SamplingParams(max_tokens=5, logprobs=1))
    answer = output.answers[0]
    with torch.no_grad():
        logprobs = MODEL(torch.tensor([[1, 2, 3, *answer.ids]]))[0].log_softmax(-1)
    for place, token in enumerate(answer.tokens, start=2):
        assert abs(token.logprob - float(logprobs[place, token.id])) < 1e-4 and token.top[0][0] == token.id


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate([[]]), "a prompt of 0 tokens does not fit: use 1 to 47"),
        (lambda llm: llm.generate([[1] * 48]), "a prompt of 48 tokens does not fit: use 1 to 47"),
        (
            lambda llm: llm.generate([[1], [1] * 40]),
            "48 tokens need 12 blocks of 4 and the pool has 8",
        ),
        (lambda llm: llm.generate([[50]]), "token id 50 is outside 0 .. 49"),
        (lambda llm: llm.generate([[-1]]), "token id -1 is outside"),
        (lambda llm: llm.generate([[1]], SamplingParams(stop_tokens=[77])), "token id 77 is outside"),
        (lambda llm: llm.generate(["hello"]), "the prompt is text and this LLM has no tokenizer"),
        (lambda llm: llm.generate([[1]], SamplingParams(stop="x")), "is text and this LLM has no tokenizer"),
        (lambda llm: llm.generate("hello"), "prompts is one text: give a list"),
        (lambda llm: llm.generate([[1], [2]], [SamplingParams()]), "2 prompts but 1 params"),
        (lambda llm: llm.generate([[1]], SamplingParams(n=65)), "n 65 is more than max_num_seqs 64"),
        (lambda llm: llm.generate([["a"]]), "the prompt \\['a'\\] must be a text or a list of token ids"),
        (lambda llm: llm.generate([7]), "the prompt 7 must be a text or a list of token ids"),
        (lambda llm: llm.add([1], priority="high"), "priority 'high' must be a whole number"),
        (lambda llm: llm.add([1], timeout_s=0), "timeout_s 0 must be above 0"),
        (lambda llm: llm.add([1], timeout_s="5"), "timeout_s '5' must be above 0"),
        (lambda llm: llm.add([1], salt=["mine"]), "salt \\['mine'\\] must be a text, or None"),
        (lambda llm: (llm.add([1], request_id="x"), llm.add([1], request_id="x")), "request id 'x' is taken"),
    ],
)
def test_bad_requests_are_refused_in_one_sentence(call, message):
    llm = LLM(MODEL, block_size=4, num_blocks=8)
    with pytest.raises(ValueError, match=message) as error:
        call(llm)
    assert "\n" not in str(error.value)
    while llm.unfinished:
        llm.step()
    whole(llm)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size 0 must be a whole number of at least 1"),
        ({"num_blocks": 0}, "num_blocks 0 must be"),
        ({"policy": "x"}, "policy 'x' is unknown"),
        ({"policy": ["x"]}, "policy \\['x'\\] is unknown"),
        ({"block_size": "4"}, "block_size '4' must be a whole number of at least 1"),
        ({"patience": None}, "patience None must be a whole number of at least 0"),
        ({"max_num_seqs": 1.5}, "max_num_seqs 1.5 must be a whole number of at least 1"),
        ({"max_num_seqs": 1.5, "num_blocks": 9}, "max_num_seqs 1.5 must be a whole number of at least 1"),
        ({"token_budget": "many"}, "token_budget 'many' must be a whole number"),
        ({"reserve": True}, "reserve True must be a whole number"),
        ({"chunk": 0.5}, "chunk 0.5 must be a whole number of at least 1, or None"),
        ({"keep_records": -1}, "keep_records -1 must be a whole number of at least 0"),
        ({"clock": 5}, "clock 5 must be a function that returns seconds"),
        ({"backend": "x"}, "backend 'x' must be an attention function"),
        ({"proposer": 5}, "proposer 5 has no propose: it must be a Proposer"),
        ({"tokenizer": "gpt2"}, "tokenizer 'gpt2' must be a Tokenizer"),
        ({"max_num_seq": 5}, "LLM has no option 'max_num_seq': did you mean max_num_seqs?"),
        ({"speed": 5}, "LLM has no option 'speed': a scheduler takes token_budget, max_num_seqs"),
        ({"num_blocks": 10**12}, "num_blocks 1000000000000 blocks are .* GB of keys and values, and the memory is"),
        ({"num_host_blocks": 10**12}, "num_host_blocks 1000000000000 blocks are"),
        ({"num_blocks": "all"}, "num_blocks 'all' must be a whole number"),
        ({"gpu_memory_utilization": "0.5"}, "gpu_memory_utilization '0.5' must be above 0"),
    ],
)
def test_bad_engines_are_refused(options, message):
    with pytest.raises(ValueError, match=message) as error:
        LLM(MODEL, **options)
    assert "\n" not in str(error.value) and str(error.value).endswith((".", "?"))


class Extended(Scheduler):
    def __init__(self, pool, *, mine=1, **options):
        super().__init__(pool, **options)


def anything(pool, **options):
    return Scheduler(pool, max_num_seqs=options["seats"])


@pytest.mark.parametrize("scheduler", [FairScheduler, partial(FairScheduler, shares={}), Extended, partial(Extended)])
def test_options_that_no_scheduler_takes_are_refused_whatever_its_class(scheduler):
    with pytest.raises(ValueError, match=r"LLM has no option 'max_num_seq': did you mean max_num_seqs\?"):
        LLM(MODEL, scheduler=scheduler, max_num_seq=5)
    with pytest.raises(ValueError, match=r"LLM has no option 'speed': a scheduler takes .*token_budget"):
        LLM(MODEL, scheduler=scheduler, speed=5)
    assert LLM(MODEL, scheduler=scheduler, max_num_seqs=5).scheduler.max_num_seqs == 5


def test_a_scheduler_may_take_options_of_its_own():
    LLM(MODEL, scheduler=Extended, mine=2, max_num_seqs=5)
    assert LLM(MODEL, scheduler=anything, seats=3).scheduler.max_num_seqs == 3


def test_what_is_no_model_is_refused():
    with pytest.raises(ValueError, match="model 'llama' must be a Transformer"):
        LLM("llama")


@pytest.mark.parametrize("n", [1, 2])
def test_streams_that_take_turns_lose_no_token(n):
    """Each `next` steps for all, so a stream finds several tokens, or its end, when its turn comes."""
    llm, params = LLM(MODEL, block_size=4, num_blocks=40), SamplingParams(max_tokens=8, n=n, temperature=0.9, seed=3)
    expected = [output.answers for output in llm.generate(PROMPTS[:2], params)]
    streams, taken = [llm.stream(prompt, params) for prompt in PROMPTS[:2]], [[], []]
    for turn in (0, 1, 1, 0, 1, 0):
        taken[turn].append(next(streams[turn]))
    other = llm.generate([PROMPTS[2]], params)[0]  # to the end, and both streams with it
    for mine, stream in zip(taken, streams, strict=True):
        mine += stream
    for mine, answers in zip(taken, expected, strict=True):
        found = [[token for delta in mine if delta.sample == i for token in delta.tokens] for i in range(n)]
        assert found == [answer.tokens for answer in answers]
    assert len(other.answers[0].tokens) == 8 and llm.unfinished == 0


def test_a_cancelled_request_that_is_not_queued_yet_holds_up_no_other():
    """Both are cancelled during a pass: the one that runs gets no token of it."""
    llm = LLM(MODEL)
    running = llm.add([1, 2, 3], SamplingParams(max_tokens=24))
    llm.step()
    forward = llm.runner._forward

    def cancelling(*given):
        llm.runner._forward = forward
        llm.cancel(llm.add([1, 2]))
        llm.cancel(running)
        return forward(*given)

    llm.runner._forward = cancelling
    outputs = {output.request_id: output for output in [*llm.step(), *llm.step()]}
    assert len(outputs) == 2 and len(outputs[running].answers[0].ids) == 1
