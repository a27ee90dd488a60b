"""Many adapters in one batch: the greedy tokens of the merged models, whatever else the engine does."""

import asyncio
import threading
from dataclasses import replace
from itertools import product

import pytest

from minillm.adapters import detach
from minillm.adapters.peft_folder import load_peft
from minillm.adapters.store import AdapterStore
from minillm.model.config import MoEConfig
from minillm.quantize import NF4, Int, Settings, quantize
from minillm.serve import LLM, AsyncLLM, SamplingParams
from minillm.serve.requests import request
from minillm.serve.schedule.blocks import cache_namespace
from minillm.serve.speculate.proposers.ngram import NGram
from tests.engine.adapters.serving import CONFIG, NAMES, base, merged, right, write_adapter, write_all

pytestmark = pytest.mark.drawn(2)

TOKENS = 10
SHARED = [[7, 3, 9, 30, 4, 11, 2, 50, 17, 40, 21, 6, 33], [5, 5, 8, 1]]
TIGHT = {"num_blocks": 26, "block_size": 4, "token_budget": 24, "max_num_seqs": 12, "reserve": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def expected(folders):
    """(name or None, prompt) -> what the merged model says. Tenants share prompts: a prefix of another would be found,
    if its adapter were not in the key."""
    said = {}
    for name in [*NAMES, None]:
        model = base() if name is None else merged(folders[name])
        for place, prompt in enumerate(SHARED):
            said[name, place] = right(model, prompt, TOKENS)
    assert len({tuple(ids) for ids in said.values()}) > 25, "adapters have to matter"
    return said


def check_all(llm, expected, n=1):
    asked = list(expected)
    params = SamplingParams(max_tokens=TOKENS, n=n)
    outputs = llm.generate([SHARED[place] for _, place in asked], params, adapter=[name for name, _ in asked])
    for key, output in zip(asked, outputs, strict=True):
        assert [answer.ids for answer in output.answers] == [expected[key]] * n, key
    assert llm.pool.used == 0 and llm.pool.free_host == llm.pool.num_host_blocks and not llm.scheduler.running
    return outputs


def test_sixteen_adapters_in_one_batch(folders, expected):
    llm = LLM(base(), adapters=folders)
    check_all(llm, expected)
    assert len(llm.records[0].batch) == len(expected), "one step takes all"
    assert llm.adapters.loads == 16 and llm.adapters.evictions == 0


SETTINGS = [
    {"prefix_cache": cached, "preemption": preemption, "chunk": chunk, "async_scheduling": ahead}
    for cached, preemption, chunk, ahead in product((True, False), ("recompute", "swap"), (None, 5), (False, True))
]


CHOSEN = [each if place % 3 == 0 else pytest.param(each, marks=pytest.mark.full) for place, each in enumerate(SETTINGS)]


@pytest.mark.parametrize("setting", CHOSEN, ids=lambda each: "-".join(map(str, each.values())))
def test_under_preemption_chunks_and_eviction(folders, expected, setting):
    model = base()
    store = AdapterStore(model, folders, budget_bytes=260_000, max_adapters=3)
    llm = LLM(model, adapters=store, **TIGHT, **setting)
    running, hold = [], store.hold

    def watched(numbers):
        running.append(len(numbers))
        failed = hold(numbers)
        assert store.nbytes <= store.budget_bytes and set(numbers) <= set(store._resident)
        return failed

    store.hold = watched
    outputs = check_all(llm, expected)
    assert sum(output.preemptions for output in outputs) > 0 and max(running) == 3
    assert store.evictions > 0
    assert all(record.error is None for record in llm.records)


def test_samples_that_fork(folders, expected):
    outputs = check_all(LLM(base(), adapters=folders, **TIGHT), expected, n=2)
    assert sum(output.preemptions for output in outputs) > 0


@pytest.mark.parametrize("fused", [False, True])
def test_speculation_and_joined_products(folders, expected, fused):
    outputs = check_all(LLM(base(), adapters=folders, fused=fused, proposer=NGram(), k=3), expected)
    assert sum(output.drafted for output in outputs) > 0


def test_an_adapter_missing_in_the_key_of_the_prefix_cache_is_found(folders, expected, monkeypatch):
    """The bug that these tests have to see: tenants who share a prompt get each other's keys and values."""
    monkeypatch.setattr(request, "cache_namespace", lambda adapter, salt: cache_namespace(None, salt))
    with pytest.raises(AssertionError, match="tenant-"):
        check_all(LLM(base(), adapters=folders, block_size=4), expected)


def test_prefixes_are_shared_within_an_adapter_only(folders, expected):
    llm = LLM(base(), adapters=folders, block_size=4)
    params = SamplingParams(max_tokens=TOKENS)
    names = ["tenant-3", "tenant-3", "tenant-4", None, "tenant-3"]
    hits = []
    for name in names:
        [output] = llm.generate([SHARED[0]], params, adapter=name)
        assert output.answers[0].ids == expected[name, 0]
        hits.append(output.hit)
    assert [bool(hit) for hit in hits] == [False, True, False, False, True]


def test_a_name_that_fails_to_load_leaves_the_other_name_of_its_values_right(tmp_path):
    """Both are admitted in one step, and the first one's blocks would be the second one's, had it been computed."""
    folders = {name: write_adapter(tmp_path / name, 3) for name in ("first", "second")}
    expected = right(merged(folders["second"]), SHARED[0], TOKENS)
    llm = LLM(base(), adapters=folders, block_size=4)
    for name in folders:
        llm.adapters.registered(name)
    folders["first"].rename(tmp_path / "away")
    params = SamplingParams(max_tokens=TOKENS)
    lost, kept = llm.generate([SHARED[0]] * 2, params, adapter=["first", "second"])
    assert lost.error is not None and not lost.answers[0].ids
    assert kept.answers[0].ids == expected
    (tmp_path / "away").rename(folders["first"])
    for name in folders:
        [again] = llm.generate([SHARED[0]], params, adapter=name)
        assert again.answers[0].ids == expected, "nothing wrong is left in the cache"


OTHERS = {
    "window and norms": {"sliding_window": 5, "qk_norm": True},
    "biases, tied": {"qkv_bias": True, "tie_embeddings": True},
    "experts": {"moe": MoEConfig(4, 2, 16)},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_models(kind, tmp_path):
    config, prompts, said, folders = replace(CONFIG, **OTHERS[kind]), [SHARED[0], SHARED[1], [9, 8]], [], {}
    for number, rank in ((1, 4), (5, 64), (9, 7)):  # query and value alone, which every kind has
        folder = folders[f"tenant-{number}"] = write_adapter(tmp_path / str(number), number, config, rank)
        model = merged(folder, base(config=config))
        said += [right(model, prompt, TOKENS) for prompt in prompts]
    names = [name for name in folders for _ in prompts]
    llm = LLM(base(config=config), adapters=folders, block_size=4, chunk=4)
    outputs = llm.generate(prompts * 3, SamplingParams(max_tokens=TOKENS), adapter=names)
    assert [output.answers[0].ids for output in outputs] == said


@pytest.mark.parametrize("format", [Int(), Int(32, bits=4), NF4(32)], ids=["int8", "int4", "nf4"])
def test_beside_a_quantized_base(folders, format):
    """The reference is one adapter at a time, attached to the same codes. Joined layers stay joined."""
    prompts, model = [SHARED[0], SHARED[1], [9, 8]], base()
    quantize(model, Settings(format))
    said = []
    for name in NAMES[::3]:
        load_peft(model, folders[name])
        said += [right(model, prompt, TOKENS) for prompt in prompts]
        detach(model)
    names = [name for name in NAMES[::3] for _ in prompts]
    outputs = LLM(model, adapters=folders).generate(
        prompts * len(NAMES[::3]), SamplingParams(max_tokens=TOKENS), adapter=names
    )
    assert [output.answers[0].ids for output in outputs] == said


def test_steps_without_adapters_are_replayed_and_others_are_not(folders, expected):
    llm = LLM(base(), adapters=folders, graphs=True)
    replayed, compute = [], llm.runner.graphs.logits
    llm.runner.graphs.logits = lambda step, *more: (replayed.append(step.adapters), compute(step, *more))[1]
    check_all(llm, expected)
    assert replayed == []
    [output] = llm.generate([SHARED[0]], SamplingParams(max_tokens=TOKENS))
    assert output.answers[0].ids == expected[None, 0] and replayed == [None] * (TOKENS - 1)


def test_every_way_to_ask(folders, expected):
    llm = LLM(base(), adapters=folders)
    params = SamplingParams(max_tokens=TOKENS)
    name = llm.add(SHARED[1], params, adapter="tenant-7")
    while not (ended := llm.step()):
        pass
    assert ended[0].request_id == name and ended[0].answers[0].ids == expected["tenant-7", 1]
    deltas = llm.stream(SHARED[1], params, adapter="tenant-8")
    assert [token.id for delta in deltas for token in delta.tokens] == expected["tenant-8", 1]

    async def ask():
        async with AsyncLLM(llm) as server:
            asked = [server.generate(SHARED[0], params, adapter=name) for name in (*NAMES[:4], None)]
            return await asyncio.gather(*asked)

    said = [output.answers[0].ids for output in asyncio.run(ask())]
    assert said == [expected[name, 0] for name in (*NAMES[:4], None)]


def test_engines_in_several_threads_share_a_model(folders, expected):
    model, said = base(), {}
    engines = {name: LLM(model, adapters=folders if name else None) for name in ("tenant-1", "tenant-2", None)}

    def run(name):
        said[name] = []
        for _ in range(5):
            [output] = engines[name].generate([SHARED[0]], SamplingParams(max_tokens=TOKENS), adapter=name)
            said[name].append(output.answers[0].ids)

    threads = [threading.Thread(target=run, args=(name,)) for name in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == {name: [expected[name, 0]] * 5 for name in engines}
