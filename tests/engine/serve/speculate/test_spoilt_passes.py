"""A draft token that makes logits infinite spoils its pass: it is computed again, and nobody hits what it wrote."""

import pytest
import torch

from minillm.model import ModelConfig, Transformer
from minillm.model.generate import generate
from minillm.serve import LLM, SamplingParams
from minillm.serve.speculate.proposal import Draft

PROMPTS = [[first, *range(1, 12)] for first in (1, 2, 3, 4)]


class Proposes:
    wants_hidden = False

    def __init__(self, draft):
        self.draft = draft

    def propose(self, asked):
        return [Draft(self.draft(each)) for each in asked]

    def observe(self, *given): ...

    def forget(self, key): ...


def poisoned(prompts=PROMPTS, window=None):
    """(a model with a token whose embedding is not a number, that token, the answers, in which it does not occur)"""
    config = ModelConfig(61, 32, 64, 2, 4, 2, max_seq_len=64, init_std=0.2, sliding_window=window)
    model = Transformer(config, seed=2)
    answers = [list(generate(model, prompt, 24)) for prompt in prompts]
    used = {token for tokens in (*prompts, *answers) for token in tokens}
    poison = next(token for token in range(61) if token not in used)
    with torch.no_grad():
        model.embedding.weight[poison] = torch.nan
    return model, poison, answers


def ids(outputs):
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [list(output.answers[0].ids) for output in outputs]


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_also_a_pass_over_all_tokens_after_a_preemption(prefix_cache, preemption):
    model, poison, answers = poisoned()
    options = {"prefix_cache": prefix_cache, "preemption": preemption, "block_size": 4, "num_blocks": 14, "reserve": 0}
    llm = LLM(model, proposer=Proposes(lambda each: [poison]), k=2, **options)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=24))
    assert ids(outputs) == answers and sum(output.preemptions for output in outputs) > 2
    assert llm.pool.available == 14


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
def test_blocks_of_a_window_stay_while_the_last_token_may_be_taken_back(block_size, prefix_cache):
    model, poison, answers = poisoned(PROMPTS[:1], window=5)
    options = {"block_size": block_size, "num_blocks": 40, "prefix_cache": prefix_cache}
    llm = LLM(model, proposer=Proposes(lambda each: [poison]), k=2, **options)
    forward = llm.runner._forward

    def forward_with_free_blocks_spoilt(*given):
        llm.cache.pool[:, :, llm.pool._free] = torch.nan
        return forward(*given)

    llm.runner._forward = forward_with_free_blocks_spoilt
    assert ids(llm.generate(PROMPTS[:1], SamplingParams(max_tokens=24))) == answers


@pytest.mark.parametrize("steps", range(1, 9))
def test_nobody_hits_what_a_spoilt_pass_wrote(steps):
    """Its request is cancelled right after it, and another one begins with the same tokens."""
    prompt = list(range(1, 10))
    model, poison, [answer] = poisoned([prompt])
    proposer = Proposes(lambda each: [poison])
    llm = LLM(model, proposer=proposer, k=2, block_size=4, num_blocks=40)
    request = llm.add(prompt, SamplingParams(max_tokens=24))
    for _ in range(steps):
        llm.step()
    llm.cancel(request)
    llm.step()
    proposer.draft = lambda each: []
    assert ids(llm.generate([[*prompt, *answer[:13]]], SamplingParams(max_tokens=5))) == [answer[13:18]]


@pytest.mark.parametrize("k, block_size, num_blocks", [(3, 2, 4), (5, 4, 3), (3, 2, 5)])
def test_accepted_drafts_do_not_fill_a_pool_that_a_window_fits(k, block_size, num_blocks):
    prompt = list(range(1, 6))
    model, _, [answer] = poisoned([prompt], window=5)
    proposer = Proposes(lambda each: (prompt + answer)[len(each.tokens) : len(each.tokens) + each.k])
    options = {"block_size": block_size, "num_blocks": num_blocks, "chunk": 1, "token_budget": 16, "max_num_seqs": 1}
    llm = LLM(model, proposer=proposer, k=k, **options)
    llm.add(prompt, SamplingParams(max_tokens=24))
    outputs = []
    for _ in range(40):
        outputs += llm.step()
    assert ids(outputs) == [answer] and llm.pool.available == num_blocks
