"""A step as plain arrays: pickled and executed by a second runner, it gives the same tokens, step by step."""

import pickle
from dataclasses import fields
from itertools import count

import numpy as np
import pytest
import torch
from test_async_scheduling import MODEL, TIGHT, everything

from minillm.model.paged import PagedCache
from minillm.serve import LLM
from minillm.serve.run.model_runner import Runner
from minillm.serve.run.penalties import Penalties
from minillm.serve.run.step_inputs import SamplingInputs, StepInputs
from minillm.serve.schedule.blocks import COPY, FROM_HOST, TO_HOST


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_second_runner_executes_what_was_sent(async_scheduling, graphs):
    """Prompts in pieces, copies for forks, swapping, all kinds of sampling, placeholders; each has its own tables."""
    llm = LLM(MODEL, async_scheduling=async_scheduling, graphs=graphs, chunk=5, preemption="swap", **TIGHT)
    cache = PagedCache(MODEL.config, llm.pool.total, 4, num_host_blocks=llm.pool.num_host_blocks)
    rows, width = llm.runner.tables.host.shape
    twin = Runner(MODEL, cache, llm.backend, table_rows=rows, table_width=width, graphs=12 * graphs)
    execute, placeholders, sent, moved = llm.runner.execute, [], [], set()

    def both(step):
        message = pickle.dumps(step)
        placeholders.append((step.tokens < 0).any())
        moved.update(step.moves[:, 0].tolist())
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
    assert moved == {COPY, TO_HOST, FROM_HOST}
    assert (llm.cache.pool == cache.pool).all() and (llm.cache.host == cache.host).all()


def test_a_step_holds_arrays_of_whole_numbers_alone():
    llm, steps = LLM(MODEL, block_size=4), []
    execute = llm.runner.execute
    llm.runner.execute = lambda step: (steps.append(step), execute(step))[1]
    prompts, params = everything()
    llm.generate(prompts[:6], params[:6])
    rest = ("hidden", "sampling", "largest_only", "adapters")
    arrays = [each.name for each in fields(StepInputs) if each.name not in rest]
    for step in steps:
        assert step.adapters is None  # see test_adapters_served.py
        assert all(getattr(step, name).dtype == np.int64 for name in arrays)
        assert len(step.starts) == len(step.counts) == len(step.rows) and len(step.tokens) == step.counts.sum()
        for each in fields(SamplingInputs) if step.sampling is not None else ():
            value = getattr(step.sampling, each.name)
            assert value is None or isinstance(value, int | np.ndarray | Penalties)


def test_moves_of_a_step_that_was_not_executed_are_made_up_for():
    """A sequence is swapped out for a step that fails before its inputs are made: it comes back with its own keys."""
    llm, failed = LLM(MODEL, preemption="swap", **TIGHT), []
    build = llm.core.builder.build

    def broken(step, *args, **options):
        if not failed and any(kind == TO_HOST for kind, _, _ in llm.pool.moves):
            failed.append([sequence.name for sequence in step.plan.preempted])
            raise RuntimeError("no inputs")
        return build(step, *args, **options)

    llm.core.builder.build = broken
    prompts, params = everything()
    outputs = llm.generate(prompts, params)
    assert failed[0]
    for output, right in zip(outputs, LLM(MODEL).generate(prompts, params), strict=True):
        assert output.error or [each.ids for each in output.answers] == [each.ids for each in right.answers]
    assert all(output.error is None for output in outputs if f"{output.request_id}/0" in failed[0])


def test_moves_that_fail_are_made_up_for():
    """The device refuses a copy once: that step's requests fail, and no other gets wrong keys."""
    llm, calls = LLM(MODEL, preemption="swap", **TIGHT), count(1)

    def once(move):
        def moved(*blocks):
            if next(calls) == 3:
                raise RuntimeError("no copy")
            move(*blocks)

        return moved

    for name in ("copy", "to_host", "from_host"):
        setattr(llm.cache, name, once(getattr(llm.cache, name)))
    prompts, params = everything()
    outputs = llm.generate(prompts, params)
    for output, right in zip(outputs, LLM(MODEL).generate(prompts, params), strict=True):
        assert output.error or [each.ids for each in output.answers] == [each.ids for each in right.answers]
    assert any("no copy" in (output.error or "") for output in outputs) and not all(output.error for output in outputs)
    assert llm.pool.available == llm.pool.total and llm.pool.free_host == llm.pool.num_host_blocks
