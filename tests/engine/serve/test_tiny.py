"""The engine on one page gives the naive loop's tokens, whatever its blocks, budget and preemptions."""

import random
from itertools import product
from pathlib import Path

import pytest
import torch

from course.shared.enumeration import outcomes
from minillm.model import ModelConfig, Transformer
from minillm.model.generate import generate
from minillm.serve import LLM, SamplingParams, tiny
from minillm.serve.tiny import TinyLLM

pytestmark = pytest.mark.drawn(2)

MODEL = Transformer(ModelConfig(61, 32, 64, 2, 4, 2, max_seq_len=64, init_std=0.2), seed=2)
WINDOWED = Transformer(ModelConfig(61, 32, 64, 2, 4, 2, max_seq_len=64, init_std=0.2, sliding_window=9), seed=2)


def requests(count):
    rng = random.Random(4)
    for number in range(count):
        prompt = [rng.randrange(61) for _ in range(rng.randrange(1, 30))]
        yield prompt, rng.randrange(1, 25), (0.0, 0.8, 0.0, 1.7)[number % 4], number


@pytest.mark.drawn(2)
@pytest.mark.parametrize("model", [MODEL, WINDOWED], ids=["full", "window"])
@pytest.mark.parametrize(("block_size", "token_budget"), list(product([1, 3, 16], [4, 9, 512])))
def test_tokens_are_the_naive_loops(model, block_size, token_budget):
    wanted = [
        list(generate(model, prompt, new, temperature=temperature, seed=seed))
        for prompt, new, temperature, seed in requests(16)
    ]
    sizes = {"num_blocks": -(-56 // block_size), "block_size": block_size, "token_budget": token_budget}
    llm = TinyLLM(model, max_num_seqs=4, **sizes)
    ids = [llm.add(prompt, new, temperature=temperature, seed=seed) for prompt, new, temperature, seed in requests(16)]
    found, released = {}, []
    release = llm.release
    llm.release = lambda request: (released.append(request.id), release(request))
    while llm.waiting or llm.running:
        ended = llm.step()
        found |= {request.id: request.answer for request in ended}
        held = [block for request in llm.running for block in request.block_table]
        assert sorted(held + llm.free_blocks) == list(range(llm.num_blocks)), "a block is lost or held twice"
        assert len(llm.running) <= 4
    assert [found[each] for each in ids] == wanted
    assert len(released) > len(ids), "the pool is meant to be too small: nothing was preempted"


def test_the_full_engine_gives_the_same():
    prompts = [prompt for prompt, *_ in requests(6)]
    outputs = LLM(MODEL, num_blocks=40).generate(prompts, SamplingParams(max_tokens=12))
    assert TinyLLM(MODEL).generate(prompts, 12) == [output.answers[0].ids for output in outputs]


def test_an_eos_ends_the_answer_and_is_its_last_token():
    [answer] = TinyLLM(MODEL).generate([[1, 2, 3]], 12)
    [stopped] = TinyLLM(MODEL).generate([[1, 2, 3]], 12, eos=answer[2])
    assert stopped == answer[: answer.index(answer[2]) + 1]


def test_no_step_computes_more_than_the_budget():
    llm, sizes = TinyLLM(MODEL, token_budget=7, max_num_seqs=4, block_size=4), []
    forward = llm.forward

    def counting(batch):
        sizes.append(sum(count for _, count in batch))
        return forward(batch)

    llm.forward = counting
    llm.generate([prompt for prompt, *_ in requests(8)], 5)
    assert max(sizes) == 7


@pytest.mark.drawn(3)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_every_outcome_has_its_probability(temperature):
    """All answers of two requests that share a batch, each with its probability: a product of the model's own."""
    model = Transformer(ModelConfig(4, 16, 32, 1, 2, max_seq_len=8, init_std=0.7), seed=1)
    prompts = [[1, 2], [3]]

    def run(draw):
        llm = TinyLLM(model, block_size=2, num_blocks=4, token_budget=2, max_num_seqs=2)

        def sample(logits, request):
            return draw.choose(torch.softmax(logits.double() / request.temperature, -1))

        llm.sample = sample
        return tuple(map(tuple, llm.generate(prompts, 2, temperature=temperature)))

    def chance(prompt, answer):
        p, tokens = 1.0, list(prompt)
        for token in answer:
            logits = model(torch.tensor([tokens]))[0, -1].double()
            p *= float(torch.softmax(logits / temperature, -1)[token])
            tokens.append(token)
        return p

    found = outcomes(run)
    assert len(found) == 4**4 and sum(found.values()) == pytest.approx(1)
    with torch.no_grad():
        for answers, probability in found.items():
            right = chance(prompts[0], answers[0]) * chance(prompts[1], answers[1])
            assert probability == pytest.approx(right, rel=1e-4)


def test_what_cannot_run_is_refused_in_a_sentence():
    llm = TinyLLM(MODEL, num_blocks=2, block_size=4)
    with pytest.raises(ValueError, match="need 3 blocks and the pool has 2"):
        llm.add([1, 2, 3], 8)
    with pytest.raises(ValueError, match="give 1 to 63 tokens"):
        llm.add([])
    with pytest.raises(ValueError, match="token_budget 3 at least max_num_seqs"):
        TinyLLM(MODEL, token_budget=3)


def test_it_stays_one_page():
    assert len(Path(tiny.__file__).read_text().splitlines()) <= 250
