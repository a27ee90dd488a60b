"""A step as plain arrays: pickled and executed by a second runner, it gives the same tokens, step by step."""

import pickle
from dataclasses import fields

import numpy as np
import pytest
import torch
from test_async_scheduling import MODEL, TIGHT, everything

from minillm.model.paged import PagedCache
from minillm.serve import LLM
from minillm.serve.run.model_runner import Runner
from minillm.serve.run.step_inputs import SamplingInputs, StepInputs


class Both:
    """A storage of two ranks: what moves blocks on one moves them on the other."""

    def __init__(self, *caches):
        self.caches = caches

    def __getattr__(self, name):
        return lambda *args: [getattr(cache, name)(*args) for cache in self.caches]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_second_runner_executes_what_was_sent(async_scheduling, graphs):
    """Prompts in pieces, forks, preemption, every kind of sampling, placeholders; each keeps its own tables and ids."""
    llm = LLM(MODEL, async_scheduling=async_scheduling, graphs=graphs, chunk=5, preemption="swap", **TIGHT)
    cache = PagedCache(MODEL.config, llm.pool.total, 4, num_host_blocks=llm.pool.num_host_blocks)
    rows, width = llm.runner.tables.host.shape
    twin = Runner(MODEL, cache, llm.backend, table_rows=rows, table_width=width, graphs=12 * graphs)
    llm.pool.storage = Both(llm.cache, cache)
    execute, placeholders, sent = llm.runner.execute, [], []

    def both(step):
        message = pickle.dumps(step)
        placeholders.append((step.tokens < 0).any())
        mine, its = execute(step), twin.execute(pickle.loads(message))
        assert torch.equal(mine.logits, its.logits)
        if step.sampling is None:
            assert mine.sampled is its.sampled is None
        else:
            assert torch.equal(mine.sampled.ids, its.sampled.ids)
            sent.append(step.sampling.count)
        return mine

    llm.runner.execute = both
    prompts, params = everything()
    outputs = llm.generate(prompts, params)
    assert all(output.error is None for output in outputs) and sum(output.preemptions for output in outputs) > 0
    assert sum(sent) >= sum(len(answer.ids) for output in outputs for answer in output.answers)
    assert any(placeholders) == async_scheduling
    assert (llm.cache.pool == cache.pool).all()


def test_a_step_holds_arrays_of_whole_numbers_alone():
    llm, steps = LLM(MODEL, block_size=4), []
    execute = llm.runner.execute
    llm.runner.execute = lambda step: (steps.append(step), execute(step))[1]
    prompts, params = everything()
    llm.generate(prompts[:6], params[:6])
    arrays = [each.name for each in fields(StepInputs) if each.name not in ("hidden", "sampling")]
    for step in steps:
        assert all(getattr(step, name).dtype == np.int64 for name in arrays)
        assert len(step.starts) == len(step.counts) == len(step.rows) and len(step.tokens) == step.counts.sum()
        for each in fields(SamplingInputs) if step.sampling is not None else ():
            value = getattr(step.sampling, each.name)
            assert value is None or isinstance(value, int | np.ndarray)
