"""The proof over ranks: whatever is switched on, tokens are those of one process."""

import functools
import os

import pytest

from minillm.comm import launch
from tests.engine.comm.nccl_like import on_nccl_like
from tests.engine.serve.ranks.programs import (
    CASES,
    TIGHT,
    alone,
    mixed,
    model_of,
    naive,
    random_sequences,
    requests_of,
)

pytestmark = pytest.mark.drawn(2)

SEED, COUNT = 6, 12
MANY = 200 if os.environ.get("MINILLM_PROOF") == "all" else 50  # sequences of a layout
PATIENCE_S = 600  # one rank alone says nothing for long on a busy machine
DEFAULT = ("chunks", "swapped", "ahead", "drafts", "quantized")
PREEMPTED = [name for name, (_, options) in CASES.items() if options and name != "window"]


@functools.lru_cache
def expected(variant):
    """Answers of one process; of greedy requests they are those of the naive loop."""
    model, requests = model_of(variant), requests_of(SEED, COUNT)
    answers = alone(model, requests)
    for number, (prompt, params) in enumerate(requests):
        if params.greedy_only:
            assert answers[number] == naive(model, prompt, params)
    return answers


def check(found):
    for name, (answers, preemptions) in found.items():
        ids = [[ids for ids, _ in each] for each in answers]
        assert ids == expected(CASES[name][0]), name
        assert preemptions or name not in PREEMPTED, f"{name}: nothing was preempted"


@pytest.mark.parametrize(("tp", "names"), [(2, DEFAULT), (4, ("recomputed",))])
def test_tokens_are_those_of_one_process(tp, names):
    found, *others = launch(mixed, tp, names, COUNT, SEED, timeout=PATIENCE_S)
    check(found)
    assert others == [dict.fromkeys(names)] * (tp - 1)


@pytest.mark.full
@pytest.mark.drawn(3)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_tokens_of_every_case_are_those_of_one_process(tp):
    check(launch(mixed, tp, tuple(CASES), COUNT, SEED, timeout=PATIENCE_S)[0])


@pytest.mark.full
@pytest.mark.drawn(2)
@pytest.mark.parametrize(("tp", "names"), [(2, tuple(CASES)), (4, DEFAULT)])
def test_tokens_by_the_rules_of_nccl(tp, names):
    check(launch(on_nccl_like(mixed), tp, names, COUNT, SEED, timeout=PATIENCE_S)[0])


def test_a_few_tokens_by_the_rules_of_nccl():
    check(launch(on_nccl_like(mixed), 2, ("ahead",), COUNT, SEED, timeout=PATIENCE_S)[0])


def hold_to_one_process(ranks, options, sequences, *size):
    """Answers over ranks, whatever arrives or is cancelled when. size: of the requests, see `requests_of`."""
    requests, cancelled = requests_of(*size), 0
    found = launch(random_sequences, ranks, range(sequences), options, requests, timeout=PATIENCE_S)[0]
    right = alone(model_of("plain"), requests)
    for answers in found:
        for mine, full in zip(answers, right, strict=True):
            for (ids, reason), whole in zip(mine, full, strict=False):
                assert ids == (whole[: len(ids)] if reason == "cancelled" else whole)
                cancelled += reason == "cancelled"
    assert cancelled


LAYOUTS = [
    (2, TIGHT),
    (2, {**TIGHT, "async_scheduling": True, "preemption": "swap"}),
    (4, {**TIGHT, "proposer": "ngram", "k": 3, "chunk": 5}),
]


@pytest.mark.parametrize(("tp", "options"), LAYOUTS)
def test_random_arrivals_and_cancellations(tp, options):
    hold_to_one_process(tp, options, 8, 9, 7, 10)


@pytest.mark.full
@pytest.mark.drawn(3)
@pytest.mark.parametrize(("tp", "options"), LAYOUTS)
def test_many_random_arrivals_and_cancellations(tp, options):
    hold_to_one_process(tp, options, MANY, 10, 6, 9)
