"""A request that moves from one engine to another goes on with the same tokens, and its keys are not computed again."""

import threading

import pytest

from minillm.model import ModelConfig, Transformer
from minillm.serve import LLM, SamplingParams
from minillm.serve.transfer import PrefillAt, keys_offered, put_in, take_out
from tests.engine.serve.ranks.programs import alone, model_of

SIZES = {"block_size": 4, "num_blocks": 40}
PROMPT = list(range(20))
ASKED = {
    "greedy": SamplingParams(16),
    "sampled": SamplingParams(16, temperature=0.9, seed=3, top_p=0.95),
    "penalised": SamplingParams(16, temperature=0.5, seed=4, repetition_penalty=1.3, logprobs=2),
}


def steps(llm, count):
    for _ in range(count):
        assert not llm.step()


def ended(llm):
    outputs = []
    while llm.unfinished:
        outputs += llm.step()
    return outputs


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", ASKED)
def test_a_request_goes_on_elsewhere(name, ahead):
    model, params = model_of("plain"), ASKED[name]
    first = LLM(model, **SIZES, async_scheduling=ahead)
    with keys_offered(first) as address:
        second = LLM(model, **SIZES, async_scheduling=ahead, prefill=PrefillAt(address, min_tokens=1))
        there = first.add(PROMPT, params)
        steps(first, 7)
        moved = take_out(first, there)
        assert 0 < len(moved.answer) < 16
        here = put_in(second, moved, "moved")
        [output] = ended(second)
        second.handovers.close()
    assert output.request_id == here
    assert [answer.ids for answer in output.answers] == alone(model, [(PROMPT, params)])[0]
    if params.logprobs is not None:
        whole = LLM(model).generate([PROMPT], params)[0].answers[0].tokens
        for mine, right in zip(output.answers[0].tokens, whole, strict=True):
            assert mine.logprob == pytest.approx(right.logprob, abs=1e-4)
    known = len(PROMPT) + len(moved.answer)
    assert second.handovers.outcomes == {"whole": 1} and second.handovers.received == known - 1
    assert output.computed == len(PROMPT) + 16 - known
    assert sum(record.tokens for record in first.records) <= known + 1 + SIZES["block_size"]
    assert first.pool.used == 0 and second.pool.used == 0


def test_an_engine_offers_keys_beside_its_own_requests():
    model, own = model_of("plain"), [[7, 8, 9] * 5, [3] * 11]
    right = alone(model, [(prompt, ASKED["greedy"]) for prompt in (*own, PROMPT)])
    first = LLM(model, **SIZES)
    with keys_offered(first) as address:
        second = LLM(model, **SIZES, prefill=PrefillAt(address, min_tokens=1))
        names = [first.add(prompt, ASKED["greedy"]) for prompt in (*own, PROMPT)]
        steps(first, 4)
        put_in(second, take_out(first, names[2]))
        outputs = []
        thread = threading.Thread(target=lambda: outputs.extend(ended(first)))
        thread.start()
        [moved] = ended(second)
        thread.join()
        second.handovers.close()
    answers = {each.request_id: each.answers[0] for each in outputs}
    assert [answers[name].ids for name in names[:2]] == [ids for [ids] in right[:2]]
    assert answers[names[2]].reason == "cancelled"
    assert moved.answers[0].ids == right[2][0]


def test_a_request_that_cannot_move_is_named():
    llm = LLM(model_of("plain"), **SIZES)
    with pytest.raises(ValueError, match="request 'x' cannot be moved: it is unknown"):
        take_out(llm, "x")
    name = llm.add(PROMPT, SamplingParams(4, n=2))
    steps(llm, 1)
    with pytest.raises(ValueError, match="has 2 samples and cannot be moved: let it end"):
        take_out(llm, name)


def test_keys_of_layers_whose_blocks_lie_apart_are_refused_and_go_on_in_blocks_of_all():
    model = Transformer(ModelConfig(64, 32, 64, 2, 4, 2, sliding_window=8, full_attention_layers=(1,)), seed=2)
    refusal = r"sliding window of 8 tokens lie apart: say windows_apart=False"
    with pytest.raises(ValueError, match=refusal), keys_offered(LLM(model, **SIZES)):
        pass
    first = LLM(model, **SIZES, windows_apart=False)
    with keys_offered(first) as address:
        second = LLM(model, **SIZES, prefill=PrefillAt(address, min_tokens=1))
        there = first.add(PROMPT, ASKED["greedy"])
        steps(first, 7)
        put_in(second, take_out(first, there))
        [output] = ended(second)
        second.handovers.close()
    assert second.handovers.outcomes == {"whole": 1}
    assert [answer.ids for answer in output.answers] == alone(model, [(PROMPT, ASKED["greedy"])])[0]
