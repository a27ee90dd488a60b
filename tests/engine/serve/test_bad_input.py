"""Whatever a user can get wrong: one sentence that names the value and what fits, and the other requests go on."""

from contextlib import nullcontext

import pytest
import torch

from course.lab14_continuous_batching.baselines import StaticBatches, TimerBatches
from minillm.model import ModelConfig, Transformer
from minillm.model.generate import generate
from minillm.serve import LLM, SamplingParams
from minillm.serve.sample import isolate
from minillm.serve.speculate.proposers.ngram import NGram

CONFIG = ModelConfig(50, 32, 64, 2, 4, 2, max_seq_len=48, init_std=0.2)
MODEL = Transformer(CONFIG, seed=3)
OTHERS = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10]]
RIGHT = [list(generate(MODEL, prompt, 5)) for prompt in OTHERS]
ENGINES = {
    "LLM": lambda model: LLM(model, block_size=4, num_blocks=10),
    "LLM, pieces and swap": lambda model: LLM(
        model, block_size=1, num_blocks=40, chunk=2, preemption="swap", prefix_cache=False, max_num_seqs=2
    ),
    "static": lambda model: StaticBatches(model, 2),
    "adaptive": lambda model: TimerBatches(model, 2, 0.01),
}
engines = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


def finished(engine):
    name = engine.add([1], SamplingParams(max_tokens=1))
    while name not in [output.request_id for output in engine.step()]:
        pass
    return name


def cancelled(engine):
    name = engine.add([1])
    engine.cancel(name)
    return name


CASES = {
    "empty prompt": (lambda e: e.add([]), "a prompt of 0 tokens does not fit: use 1 to 47."),
    "prompt as long as the context": (lambda e: e.add([1] * 48), "a prompt of 48 tokens does not fit: use 1 to 47."),
    "one bad among good": (lambda e: e.generate([[1], [2], []]), "a prompt of 0 tokens does not fit: use 1 to 47."),
    "no token ids": (lambda e: e.add([1, 2.5]), "the prompt [1, 2.5] must be a text or a list of token ids."),
    "id outside the vocabulary": (lambda e: e.add([50]), "token id 50 is outside 0 .. 49 (the vocabulary)."),
    "text without a tokenizer": (lambda e: e.add("x"), "has no tokenizer: pass tokenizer=, or token ids."),
    "one text for many": (lambda e: e.generate("x"), "prompts is one text: give a list of prompts."),
    "too few params": (lambda e: e.generate([[1], [2]], [None]), "2 prompts but 1 params: give one for all, or one"),
    "params of another kind": (
        lambda e: e.add([1], {"max_tokens": 3}),
        "params {'max_tokens': 3} must be SamplingParams, or None for the defaults.",
    ),
    "max_tokens 0": (lambda e: e.add([1], SamplingParams(max_tokens=0)), "max_tokens 0 must be a whole number of at"),
    "max_tokens 1.5": (lambda e: e.add([1], SamplingParams(max_tokens=1.5)), "max_tokens 1.5 must be a whole number"),
    "temperature below 0": (
        lambda e: e.add([1], SamplingParams(temperature=-0.1)),
        "temperature -0.1 must be at least",
    ),
    "temperature nan": (
        lambda e: e.add([1], SamplingParams(temperature=float("nan"))),
        "temperature nan must be at least 0 (0 takes the likeliest token).",
    ),
    "top_p 0": (lambda e: e.add([1], SamplingParams(top_p=0)), "top_p 0 must be above 0 and at most 1"),
    "top_p above 1": (lambda e: e.add([1], SamplingParams(top_p=1.01)), "top_p 1.01 must be above 0 and at most 1"),
    "top_p nan": (lambda e: e.add([1], SamplingParams(top_p=float("nan"))), "top_p nan must be above 0 and at most 1"),
    "stop of another kind": (lambda e: e.add([1], SamplingParams(stop=5)), "stop 5 must be a text or a list of texts."),
    "stop of bytes": (lambda e: e.add([1], SamplingParams(stop=[b"x"])), "stop [b'x'] must be a text or a list of"),
    "empty stop": (lambda e: e.add([1], SamplingParams(stop="")), "stop contains the empty text"),
    "stop tokens that are text": (
        lambda e: e.add([1], SamplingParams(stop_tokens=["x"])),
        "stop_tokens ['x'] must be a list of token ids.",
    ),
    "duplicate request id": (
        lambda e: (e.add([1], request_id="mine"), e.add([1], request_id="mine")),
        "request id 'mine' is taken by a request that has not ended: choose another.",
    ),
    "cancel of an unknown request": (
        lambda e: e.cancel("nobody"),
        "request 'nobody' cannot be cancelled: it is unknown or has ended.",
    ),
    "cancel of a finished request": (
        lambda e: e.cancel(finished(e)),
        "cannot be cancelled: it is unknown or has ended.",
    ),
    "cancel twice": (lambda e: e.cancel(cancelled(e)), "cannot be cancelled: it is unknown or has ended."),
}
OF_THE_POOL = {
    "prompt longer than the pool": (
        lambda e: e.add([1] * 45),
        "48 tokens need 12 blocks of 4 and the pool has 10: shorten the prompt, lower max_tokens or enlarge the pool.",
    ),
    "answer longer than the pool": (
        lambda e: e.add([1] * 20, SamplingParams(max_tokens=25)),
        "45 tokens need 11 blocks",
    ),
    "more samples than seats": (lambda e: e.add([1], SamplingParams(n=65)), "n 65 is more than max_num_seqs 64: lower"),
}
EVERY = [
    *((name, engine, *case) for name, case in CASES.items() for engine in ENGINES),
    *((name, "LLM", *case) for name, case in OF_THE_POOL.items()),
]


def end(engine):
    ended = {}
    while engine.unfinished:
        ended |= {output.request_id: output for output in engine.step()}
    return ended | {output.request_id: output for output in engine.step()}


def whole(engine):
    if isinstance(engine, LLM):
        pool = engine.pool
        assert pool.free + pool.cached == pool.total and pool.references == [0] * pool.total
        assert pool.free_host == pool.num_host_blocks and not engine.scheduler.num_waiting
    assert engine.unfinished == 0


@pytest.mark.parametrize(("name", "engine", "call", "message"), EVERY, ids=[f"{c[0]}-{c[1]}" for c in EVERY])
def test_refused_in_one_sentence_and_the_others_go_on(name, engine, call, message):
    engine = ENGINES[engine](MODEL)
    names = [engine.add(prompt, SamplingParams(max_tokens=5)) for prompt in OTHERS]
    early = {output.request_id: output for output in engine.step()}
    seen = engine.step
    engine.step = lambda: [early.setdefault(output.request_id, output) for output in seen()]
    with pytest.raises(ValueError) as error:
        call(engine)
    assert message in str(error.value) and "\n" not in str(error.value) and str(error.value).endswith(".")
    outputs = early | end(engine)
    if name == "one bad among good":  # refused as a whole
        assert len(outputs) == len(OTHERS)
    assert [outputs[request_id].answers[0].ids for request_id in names] == RIGHT
    whole(engine)


@engines
def test_logits_that_are_nan_fail_their_request_and_the_others_go_on(engine):
    model = Transformer(CONFIG, seed=3)
    with torch.no_grad():
        model.embedding.weight[49] = float("nan")
        model.head.weight[49] = model.head.weight[0] - 1e-3  # never the likeliest by far
    engine = engine(model)
    params = SamplingParams(max_tokens=6, n=2)
    names = [engine.add(prompt, params) for prompt in (OTHERS[0], [7, 49], *OTHERS[1:], [49])]
    outputs = end(engine)
    for lost, tokens in ((names[1], 2), (names[4], 1)):
        assert outputs[lost].error == f"its logits are not finite after {tokens} tokens (NaN or infinite)"
        assert {answer.reason for answer in outputs[lost].answers} == {"failed"}
        assert not any(answer.ids for answer in outputs[lost].answers)
    for request_id, prompt in zip((names[0], *names[2:4]), OTHERS, strict=True):
        assert outputs[request_id].error is None
        assert [answer.ids for answer in outputs[request_id].answers] == [list(generate(model, prompt, 6))] * 2
    whole(engine)


@pytest.mark.parametrize("speculating", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_whose_sampling_raises_ends_alone(speculating, temperature, monkeypatch):
    """Two samples of one request among others, from the third token on; the others draw what they draw anyway."""
    options = {"proposer": NGram(), "k": 2} if speculating else {}
    wanted = [SamplingParams(max_tokens=6, temperature=temperature, seed=seed) for seed in range(3)]
    params = [*wanted, SamplingParams(max_tokens=6, temperature=0.9, min_p=0.123, n=2, seed=9)]
    prompts = [*OTHERS, [7, 8]]
    right = LLM(MODEL, block_size=4, num_blocks=40, **options).generate(prompts, params)
    calls = []

    def spoilt(function, min_p):
        def call(*arguments):
            if 0.123 in min_p(*arguments):
                calls.append(1)
                if len(calls) > 2:
                    raise RuntimeError("no such kernel")
            return function(*arguments)

        return call

    batch = spoilt(isolate.sample_on_device, lambda logits, inputs, *_: () if inputs.greedy_only else inputs.min_p)
    monkeypatch.setattr(isolate, "sample_on_device", batch)
    llm = LLM(MODEL, block_size=4, num_blocks=40, **options)
    if speculating:
        judge = spoilt(llm.speculation.judge, lambda logits, rows, *_: [row.params.min_p for row in rows])
        monkeypatch.setattr(llm.speculation, "judge", judge)
    found = llm.generate(prompts, params)
    assert [output.answers[0].ids for output in found[:3]] == [output.answers[0].ids for output in right[:3]]
    assert all(output.error is None for output in found[:3])
    assert found[3].error.startswith("sampling its token ") and "raised RuntimeError: no such kernel" in found[3].error
    assert [answer.reason for answer in found[3].answers] == ["failed", "failed"]
    whole(llm)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_whatever_else_raises_after_the_pass_ends_its_requests(kind, monkeypatch):
    """An error of the step's own bookkeeping, or Ctrl-C: the pool stays whole, and the next request is answered."""
    llm = LLM(MODEL, block_size=4, num_blocks=40)
    for prompt in OTHERS:
        llm.add(prompt, SamplingParams(max_tokens=5))

    def broken(*arguments):
        raise kind("no more")

    with monkeypatch.context() as patch, nullcontext() if kind is RuntimeError else pytest.raises(kind):
        patch.setattr(llm.core.next_tokens, "advance", broken)
        outputs = llm.step()
    outputs = outputs if kind is RuntimeError else llm.step()
    what = "sampling raised" if kind is RuntimeError else "the step was interrupted by"
    assert [output.error for output in outputs] == [f"{what} {kind.__name__}: no more"] * len(OTHERS)
    whole(llm)
    assert llm.generate([OTHERS[0]], SamplingParams(max_tokens=5))[0].answers[0].ids == RIGHT[0]
