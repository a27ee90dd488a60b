"""Layers with a sliding window: a sequence holds no more of their blocks than the window sees, however long it is, in
models where all layers have one and in models where others see everything. Whatever is switched on, tokens are those of
the naive loop. Freed blocks are spoilt at once, so none is read."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_async_scheduling import everything, take_samples
from test_proof import mixed_requests
from test_quantized_cache import by_a_model
from test_scheduler import REQUESTS, Run

from minillm.model import ModelConfig, Transformer
from minillm.model.draw import sample_seed
from minillm.model.generate import generate
from minillm.model.paged import block_by_block, gathered
from minillm.predict.model import windowed_blocks
from minillm.serve import LLM, POLICIES, BlockPool, SamplingParams, State
from minillm.serve.run import build
from minillm.serve.speculate import NGram

pytestmark = pytest.mark.drawn(2)

WINDOW = 5
CONFIG = ModelConfig(61, 32, 64, 2, 4, 2, max_seq_len=64, init_std=0.2, sliding_window=WINDOW)


@cache
def world(full_attention_layers=()):
    """A model, requests, and the naive loop's answers to them."""
    config = replace(CONFIG, full_attention_layers=full_attention_layers, num_layers=2 + len(full_attention_layers))
    model, requests, expected = Transformer(config, seed=2), mixed_requests(32), []
    for prompt, params, _, _ in requests:
        answers = []
        for index in range(params.n):
            how = {"temperature": params.temperature, "seed": sample_seed(params.seed or 0, index)}
            answers.append(list(generate(model, prompt, params.max_tokens, stop=params.stop_tokens, **how)))
        expected.append(answers)
    return model, requests, expected


def spoil_freed(llm):
    """Whatever is free and not cached when a pass begins is not a number. Returns, for each pass, the most blocks with
    a window that a sequence holds in it."""
    forward, most = llm.runner._forward, []

    def spoiling(*inputs):
        for pool, keys_and_values in zip(llm.pool.kinds, llm.runner.caches.values(), strict=True):
            keys_and_values.pool[:, :, pool._free] = float("nan")
        of_each = [list(llm.scheduler.held.tables(sequence))[-1][1].held_blocks for sequence in llm.scheduler.running]
        most.append(max(map(len, of_each)))
        return forward(*inputs)

    llm.runner._forward = spoiling
    return most


TIGHT = {"token_budget": 24, "max_num_seqs": 12, "reserve": 0, "chunk": 6}
ENGINES = {
    "defaults": {},
    "recomputed": TIGHT | {"block_size": 4, "num_blocks": 12},
    "swapped": TIGHT | {"block_size": 4, "num_blocks": 12, "preemption": "swap"},
    "no prefixes": TIGHT | {"block_size": 3, "num_blocks": 14, "prefix_cache": False},
    "no prefixes, swapped": TIGHT | {"block_size": 2, "num_blocks": 18, "prefix_cache": False, "preemption": "swap"},
    "blocks of one": TIGHT | {"block_size": 1, "num_blocks": 36},
    "by a loop": TIGHT | {"block_size": 4, "num_blocks": 12, "backend": block_by_block},
    "asynchronous": TIGHT | {"block_size": 4, "num_blocks": 12, "async_scheduling": True},
    "asynchronous, swapped": TIGHT
    | {"block_size": 2, "num_blocks": 20, "async_scheduling": True, "preemption": "swap", "policy": "longest"},
    "replayed": {"block_size": 4, "graphs": True, "backend": gathered},
    "drafts by n-gram": TIGHT | {"block_size": 4, "num_blocks": 12, "proposer": lambda _: NGram(shortest=1)},
    "drafts by a model": TIGHT | {"block_size": 4, "num_blocks": 14, "preemption": "swap", "proposer": by_a_model},
}


IN_BRIEF = ("defaults", "swapped", "asynchronous, swapped", "replayed", "drafts by n-gram")
BOTH_KINDS = [name if name in IN_BRIEF else pytest.param(name, marks=pytest.mark.full) for name in ENGINES]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", ENGINES)
def test_tokens_are_those_of_the_naive_loop_and_blocks_are_bounded(name):
    serve_all(name, ENGINES[name])


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", BOTH_KINDS)
def test_so_it_is_where_a_layer_sees_everything(name, monkeypatch):
    """Each of the two pools fits little more than one sequence."""
    options = ENGINES[name]
    if "num_blocks" in options:
        size = options["block_size"]
        options = options | {"num_blocks": -(-60 // size)}
        most = windowed_blocks(WINDOW, size, options["chunk"] + 3 + 1) + 2
        monkeypatch.setattr(build, "most_windowed_blocks", lambda *_: most)
    serve_all(name, options, full_attention_layers=(1,))


def serve_all(name, options, full_attention_layers=()):
    model, requests, expected = world(full_attention_layers)
    options, drafts = dict(options), 0
    if "proposer" in options:
        drafts = 3
        options |= {"proposer": options["proposer"](model), "k": drafts}
    chosen = [i for i, (_, params, *_) in enumerate(requests) if name != "drafts by a model" or not params.temperature]
    llm, outputs = LLM(model, **options), {}
    most = spoil_freed(llm)
    windowed = llm.pool.windowed or llm.pool
    for number in chosen:
        prompt, params, priority, _ = requests[number]
        llm.add(prompt, params, request_id=str(number), priority=priority)
    for step in range(2000):
        if step == 9:
            for number in chosen:
                if requests[number][3] is not None and str(number) not in outputs:
                    llm.cancel(str(number))
        outputs |= {output.request_id: output for output in llm.step()}
        if len(outputs) == len(chosen):
            break
    for number in chosen:
        for answer, ids in zip(outputs[str(number)].answers, expected[number], strict=False):
            assert answer.ids == (ids[: len(answer.ids)] if answer.reason == "cancelled" else ids)
    step = options.get("chunk", 512) + drafts + bool(options.get("async_scheduling"))
    assert 0 < max(most) <= windowed_blocks(WINDOW, llm.pool.block_size, step)
    assert (llm.pool.windowed is None) == (not full_attention_layers) and windowed.window == WINDOW
    assert ("num_blocks" in options) == (sum(output.preemptions for output in outputs.values()) > 2)
    if options.get("prefix_cache", True):
        assert sum(output.hit for output in outputs.values()) > 20
    for pool in llm.pool.kinds:
        assert pool.used == 0 and pool.references == [0] * pool.total and pool.free_host == pool.num_host_blocks
    assert not llm.scheduler.running


@pytest.mark.parametrize("backend", [gathered, block_by_block])
def test_a_sequence_longer_than_the_pool(backend):
    """63 tokens through 4 blocks of 4."""
    model = world()[0]
    llm = LLM(model, block_size=4, num_blocks=4, chunk=4, prefix_cache=False, record_blocks=True, backend=backend)
    spoil_freed(llm)
    prompt = [(7 * i) % 61 for i in range(40)]
    [output] = llm.generate([prompt], SamplingParams(max_tokens=24))
    assert output.answers[0].ids == list(generate(model, prompt, 24))
    held = [len(table) for record in llm.records for table in record.tables.values()]
    assert max(held) <= windowed_blocks(WINDOW, 4, 4) and max(held[-20:]) <= windowed_blocks(WINDOW, 4)
    with pytest.raises(ValueError, match="shorten the prompt, lower max_tokens or enlarge the pool"):
        LLM(model, block_size=4, num_blocks=2, chunk=4).add(prompt, SamplingParams(max_tokens=8))


def test_a_hit_takes_only_what_the_window_sees():
    model = world()[0]
    llm = LLM(model, block_size=4, num_blocks=16, chunk=8)
    prompt = [(5 * i) % 61 for i in range(41)]
    first, second = (llm.generate([prompt], SamplingParams(max_tokens=2))[0] for _ in range(2))
    assert first.hit == 0 and second.hit == 40 and first.answers[0].ids == second.answers[0].ids
    llm.add(prompt, SamplingParams(max_tokens=2))
    llm.step()
    assert llm.pool.used == windowed_blocks(WINDOW, 4)  # of the 10 that were hit one is seen, and one is new


@pytest.mark.parametrize("size", [1, 2])
def test_what_a_token_that_is_taken_back_sees_is_still_there(size, monkeypatch):
    """Rows that are sampled again, after the next step was launched with a wrong token: that step is done again."""
    take_samples(monkeypatch)
    prompts, params = everything()
    found = []
    for ahead in (False, True):
        llm = LLM(
            world()[0], block_size=size, num_blocks=60, max_num_seqs=24, prefix_cache=False, async_scheduling=ahead
        )
        spoil_freed(llm)
        outputs = llm.generate(prompts, params)
        assert all(output.error is None for output in outputs)
        found.append([answer.ids for output in outputs for answer in output.answers])
    assert found[0] == found[1]


def test_a_pass_that_fails_costs_others_no_hit():
    """Blocks that a sequence gave back hold another's prefix by now; those that still hold its own are wrong."""
    llm = LLM(world()[0], block_size=4, num_blocks=7, chunk=4)
    failing, other = [(5 * i) % 61 for i in range(20)], [(7 * i + 3) % 61 for i in range(12)]
    llm.add(failing, SamplingParams(max_tokens=30))
    while not llm.records or not llm.records[-1].sampled:
        llm.step()
    [sequence] = llm.scheduler.running
    llm.generate([other], SamplingParams(max_tokens=1))
    held = dict(zip(sequence.blocks, sequence.block_hashes, strict=False))
    cached = {block: prefix for block, prefix in enumerate(llm.pool._prefix) if prefix is not None}
    others = {block: prefix for block, prefix in cached.items() if held.get(block) != prefix}
    gone = sequence.blocks[: sequence.first_block]
    assert any(block in others for block in gone) and any(held[block] == cached.get(block) for block in gone)
    forward = llm.runner._forward
    llm.runner._forward = lambda *inputs: 1 / 0
    [output] = llm.step()
    llm.runner._forward = forward
    assert "ZeroDivisionError" in output.error
    assert {block: prefix for block, prefix in enumerate(llm.pool._prefix) if prefix is not None} == others


def test_a_layer_that_sees_all_keeps_all_blocks_and_the_others_those_of_the_window():
    model = world((1,))[0]
    assert model.config.window_of_all_layers is None and CONFIG.window_of_all_layers == WINDOW
    assert replace(CONFIG, sliding_window=None).window_of_all_layers is None
    prompt, most = [(7 * i) % 61 for i in range(40)], windowed_blocks(WINDOW, 4, 5 + 1)
    for options in ({}, {"windows_apart": False}):
        llm = LLM(model, block_size=4, chunk=5, max_num_seqs=2, prefix_cache=False, record_blocks=True, **options)
        [output] = llm.generate([prompt], SamplingParams(max_tokens=12))
        assert output.answers[0].ids == list(generate(model, prompt, 12))
        assert max(len(table) for record in llm.records for table in record.tables.values()) == 13
        if options:
            assert llm.pool.windowed is None and all(record.windowed is None for record in llm.records)
            continue
        assert 1 < max(record.windowed for record in llm.records) <= most
        assert llm.pool.windowed.total == 2 * (most + 1) < llm.pool.total == 2 * 16
        blocks = {slots: cache.pool.shape[1:3] for slots, cache in llm.runner.caches.items()}
        assert blocks == {"slots": (1, 32), "windowed slots": (2, llm.pool.windowed.total)}


def test_a_prefix_is_a_hit_only_as_far_as_both_kinds_have_what_the_next_token_sees():
    model, prompt = world((1,))[0], [(5 * i) % 61 for i in range(41)]
    llm = LLM(model, block_size=4, num_blocks=40)
    spoil_freed(llm)

    def hit():
        [output] = llm.generate([prompt], SamplingParams(max_tokens=2))
        assert output.answers[0].ids == list(generate(model, prompt, 2))
        return output.hit

    def forget(pool, place):
        blocks = {prefix.tokens: block for prefix, block in pool._cache.items()}
        block = blocks[tuple(prompt[4 * place : 4 * place + 4])]
        pool.invalidate([block], [pool._prefix[block]])

    assert (hit(), hit()) == (0, 40)
    forget(llm.pool.windowed, 2)  # no token that is left to compute sees it
    assert hit() == 40
    forget(llm.pool.windowed, 9)  # the last token sees it, and so do 36 .. 39, which are computed again
    assert hit() == 36
    assert hit() == 40  # the block that was computed again is cached, although the other pool had its keys
    forget(llm.pool, 3)
    assert hit() == 8  # 12 would be there, but the token behind them sees block 2
    assert hit() == 40


@settings(max_examples=200)
@given(
    requests=REQUESTS,
    policy=st.sampled_from(sorted(POLICIES)),
    preemption=st.sampled_from(["recompute", "swap"]),
    size=st.sampled_from([1, 4, 16]),
    chunk=st.sampled_from([None, 1, 5]),
    host=st.sampled_from([0, 3, 64]),
    window=st.integers(1, 20),
    prefix_cache=st.booleans(),
    others_see_all=st.booleans(),
)
def test_every_request_ends_within_the_bound(
    requests, policy, preemption, size, chunk, host, window, prefix_cache, others_see_all
):
    """The pool of the layers with a window holds one sequence's and little more; so does the other, if there is one."""
    piece = min(chunk or 16, 16)
    most = windowed_blocks(window, size, piece + 1)
    longest = max(-(-(prompt + new - 1) // size) for prompt, new, *_ in requests)
    blocks = {"blocks": longest + 1, "windowed": most + 1} if others_see_all else {"blocks": most + 1}
    options = {"policy": policy, "preemption": preemption, "chunk": chunk}
    run = Run(size=size, host=host, prefix_cache=prefix_cache, window=window, **blocks, **options)
    for prompt, new, priority, num_seqs, after, cancelled, prefix in requests:
        for _ in range(after):
            run.step()
            check(run, most)
        tokens = [1000 * prefix + place for place in range(prompt)]
        run.add(tokens, prompt + new, priority=priority, num_seqs=num_seqs)
        if cancelled and run.family[0].state is not State.FINISHED:
            run.scheduler.finish(run.family[0])
    for _ in range(5000):
        if all(sequence.state is State.FINISHED for sequence in run.family):
            break
        run.step()
        check(run, most)
    run.finish()


def check(run, most):
    running = run.scheduler.running
    for kind, pool in enumerate(run.pool.kinds):
        held = [(sequence, (sequence, sequence.windowed)[kind]) for sequence in running]
        for sequence, table in held:
            assert pool.window is None or len(table.held_blocks) <= most
            assert len(table.blocks) == len(sequence.blocks)
            chain = sequence.prefixes(sequence.num_computed // pool.block_size, pool.block_size)
            for place in range(table.first_block, len(chain)):
                assert pool._prefix[table.blocks[place]] in (None, chain[place])
        holders = [block for _, table in held for block in table.held_blocks]
        assert all(pool.references[block] or block in pool._idle for block in pool._cache.values())
        assert [holders.count(block) for block in range(pool.total)] == pool.references


@given(window=st.integers(1, 30), size=st.integers(1, 17), step=st.integers(1, 20))
def test_the_bound_is_reached_and_never_passed(window, size, step):
    pool, held = BlockPool(99, size, window=window), []
    for computed in range(window, window + 2 * size):
        held.append(pool.blocks_for(computed + step) - pool.first_needed(computed))
    assert max(held) == windowed_blocks(window, size, step)
