"""The repetition penalty: the tokens of a loop that counts what was seen, while a step sends only what is new."""

import pytest
import torch

from minillm.model import ModelConfig, Transformer
from minillm.model.draw import Draw, sample_seed
from minillm.serve import LLM, SamplingParams
from minillm.serve.sample.reference import sample

MODEL = Transformer(ModelConfig(50, 32, 64, 2, 4, 2, max_seq_len=64, init_std=0.2), seed=3)
TIGHT = {"block_size": 4, "num_blocks": 20, "token_budget": 64, "max_num_seqs": 6, "reserve": 0}


def requests():
    """Every third asks for no penalty, so that rows change hands between sequences that do and that do not."""
    for number in range(14):
        prompt = [(7 * number + j * j) % 50 for j in range(1 + 3 * number % 11)]
        penalty, temperature = (1.0, 1.3, 1.8)[number % 3], (0.0, 0.9)[number % 2]
        n = 2 if number % 5 == 0 else 1
        options = {"repetition_penalty": penalty, "temperature": temperature, "n": n, "seed": number}
        yield prompt, SamplingParams(max_tokens=5 + number, **options)


@torch.no_grad()
def alone(prompt, params, index):
    tokens, draw = list(prompt), Draw(sample_seed(params.seed, index))
    for _ in range(params.max_tokens):
        tokens.append(sample(MODEL(torch.tensor([tokens]))[0, -1].float(), params, tokens, draw).id)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("options", [{}, TIGHT, TIGHT | {"async_scheduling": True}], ids=["roomy", "tight", "async"])
def test_tokens_are_those_of_a_loop(options):
    prompts, params = zip(*requests(), strict=True)
    outputs = LLM(MODEL, **options).generate(list(prompts), list(params))
    for output, prompt, wanted in zip(outputs, prompts, params, strict=True):
        assert [answer.ids for answer in output.answers] == [alone(prompt, wanted, i) for i in range(wanted.n)]
    assert options == {} or sum(output.preemptions for output in outputs) > 0


def test_a_step_sends_one_id_of_each_sequence_however_long_it_is():
    llm, sizes = LLM(MODEL), []
    execute = llm.runner.execute

    def noting(step):
        penalties = step.sampling and step.sampling.penalties
        sizes.append(0 if penalties is None else sum(len(getattr(penalties, name)) for name in ("new_ids", "rows")))
        return execute(step)

    llm.runner.execute = noting
    prompts = [[number, *range(40)] for number in range(4)]
    llm.generate(prompts, SamplingParams(max_tokens=8, repetition_penalty=1.1))
    assert sizes[0] == 4 * (41 + 1) and set(sizes[1:]) == {4 * (1 + 1)}
