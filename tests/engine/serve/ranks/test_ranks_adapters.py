"""Adapters beside a model that is cut over ranks and stages: tokens of the merged models, and no byte more is sent."""

from dataclasses import replace
from functools import partial

import pytest

from minillm.adapters.store import AdapterStore
from minillm.comm import launch
from minillm.measure import ledger
from minillm.quantize.formats import Int
from minillm.quantize.in_place import Settings, quantize, quantized_layers
from minillm.quantize.kernels import DEQUANTIZE
from minillm.serve import LLM, SamplingParams, over_ranks
from tests.engine.adapters.serving import CONFIG, base, merged, right, write_adapter
from tests.engine.comm.nccl_like import on_nccl_like
from tests.engine.serve.ranks.test_ranks_proof import PATIENCE_S

PROMPTS = [[7, 3, 9, 30, 4, 11, 2, 50, 17, 40, 21, 6, 33], [5, 5, 8, 1]]
TOKENS, NUMBERS = 10, (0, 1, 2, 3, 6)  # of layers and ranks that differ
TIGHT = {"num_blocks": 14, "block_size": 4, "token_budget": 24, "max_num_seqs": 8, "reserve": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {f"tenant-{number}": write_adapter(folder / str(number), number) for number in NUMBERS}


@pytest.fixture(scope="module")
def expected(folders):
    """By (name or None, prompt): what the merged model says."""
    models = {name: merged(folder) for name, folder in folders.items()} | {None: base()}
    said = {(name, place): right(models[name], PROMPTS[place], TOKENS) for name in models for place in (0, 1)}
    assert len({tuple(ids) for ids in said.values()}) > 9, "adapters have to matter"
    return said


def in_codes():
    model = base()
    quantize(model, Settings(Int(bits=4, group=8)))
    for layer in quantized_layers(model).values():
        layer.use(DEQUANTIZE)  # in float32: the packed kernel rounds its inputs, and so would each rank's share
    return model


def answers(llm, asked):
    prompts, names = [PROMPTS[place] for _, place in asked], [name for name, _ in asked]
    outputs = llm.generate(prompts, SamplingParams(TOKENS), adapter=names)
    assert llm.pool.used == 0 and not llm.scheduler.running
    return [output.answers[0].ids for output in outputs], sum(output.preemptions for output in outputs)


def served(group, make, adapters, asked, cases):
    """By case: the answers and preemptions, how often the store threw one out."""
    use = lambda llm: (*answers(llm, asked), llm.adapters.evictions)  # noqa: E731
    return {name: over_ranks(group, make(), use, adapters=adapters, **how) for name, how in cases.items()}


CASES = {
    "recomputed": TIGHT,
    "swapped": {**TIGHT, "preemption": "swap", "chunk": 5},
    "ahead": {**TIGHT, "async_scheduling": True},
    "drafts": {**TIGHT, "proposer": "ngram", "k": 3},
}


def few(folders):
    """A store with room for some of them only."""
    return partial(AdapterStore, folders=folders, budget_bytes=60_000, max_adapters=2)


@pytest.mark.parametrize(
    ("ranks", "pp", "names", "how"),
    [
        (2, 1, ("swapped", "ahead"), launch),
        (2, 2, ("recomputed",), launch),
        pytest.param(1, 1, tuple(CASES), launch, marks=pytest.mark.full),
        pytest.param(4, 1, tuple(CASES), launch, marks=pytest.mark.full),
        pytest.param(4, 2, ("recomputed", "swapped", "drafts"), launch, marks=pytest.mark.full),
        pytest.param(2, 1, ("recomputed", "ahead"), "rules of NCCL", marks=pytest.mark.full),
    ],
)
def test_tokens_are_those_of_the_merged_models(ranks, pp, names, how, folders, expected):
    program = served if how is launch else on_nccl_like(served)
    cases = {name: {**CASES[name], "pp": pp} for name in names}
    found = launch(program, ranks, base, few(folders), list(expected), cases, timeout=PATIENCE_S)[0]
    for name, (ids, preemptions, evictions) in found.items():
        assert ids == list(expected.values()), name
        assert preemptions and evictions, name


def test_beside_codes(folders, expected):
    asked = list(expected)
    alone, _ = answers(LLM(in_codes(), adapters=folders), asked)
    assert launch(served, 2, in_codes, folders, asked, {"": {}}, timeout=PATIENCE_S)[0][""][0] == alone


def sent(group, adapters, name):
    with ledger() as book:
        use = lambda llm: llm.generate(PROMPTS, SamplingParams(TOKENS, ignore_eos=True), adapter=name) and None  # noqa: E731
        over_ranks(group, base(), use, adapters=adapters, num_blocks=64)
    return {op: (sum(each.op == op for each in book.events), book.bytes(op=op)) for op in ("all_reduce", "all_gather")}


def both(group, folders):
    return sent(group, folders, "tenant-0"), sent(group, folders, None)


def test_a_step_sends_as_many_bytes_as_without(folders):
    for adapted, plain in launch(both, 2, folders):
        assert adapted == plain and adapted["all_reduce"][1] > 0


def refused(group, adapters):
    ask = lambda llm: llm.generate(PROMPTS, SamplingParams(TOKENS), adapter="other")  # noqa: E731
    try:
        over_ranks(group, base(), ask, adapters=adapters)
    except ValueError as error:
        return str(error)


def test_refusals(tmp_path):
    other = write_adapter(tmp_path, 0, replace(CONFIG, hidden_size=16))
    assert "must be folders by name" in launch(refused, 2, "adapters/french")[1]
    assert "was trained on another base: its" in launch(refused, 2, {"other": other})[0]
