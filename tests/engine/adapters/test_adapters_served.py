"""Many adapters in one batch: the greedy tokens of the merged models, whatever else the engine does."""

from itertools import product

import pytest

from minillm.adapters.store import AdapterStore
from minillm.serve import LLM, SamplingParams
from minillm.serve.speculate.proposers.ngram import NGram
from tests.engine.adapters.serving import NAMES, base, merged, right, write_all

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


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda each: "-".join(map(str, each.values())))
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
