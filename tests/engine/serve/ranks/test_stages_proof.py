"""The proof over stages: as many steps under way as there are stages, and tokens are those of one process."""

import pytest

from minillm.comm import launch
from tests.engine.comm.nccl_like import on_nccl_like
from tests.engine.serve.ranks.programs import OF_STAGES, TIGHT, mixed
from tests.engine.serve.ranks.test_ranks_proof import COUNT, MANY, PATIENCE_S, SEED, check, hold_to_one_process

FEW = ("swapped", "drafts")
DEEP = ("deep", "deep-drafts")  # five layers on three stages, of which the last alone sees everything


@pytest.mark.parametrize(("ranks", "pp", "names"), [(2, 2, FEW), (3, 3, DEEP[:1]), (4, 2, ("recomputed",))])
def test_tokens_are_those_of_one_process(ranks, pp, names):
    found, *others = launch(mixed, ranks, names, COUNT, SEED, pp, timeout=PATIENCE_S)
    check(found)
    assert others == [dict.fromkeys(names)] * (ranks - 1)


@pytest.mark.full
@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("ranks", "pp", "names"), [(2, 2, OF_STAGES), (4, 2, OF_STAGES), (8, 2, FEW), (3, 3, DEEP), (4, 4, DEEP)]
)
def test_tokens_of_every_case_are_those_of_one_process(ranks, pp, names):
    check(launch(mixed, ranks, tuple(names), COUNT, SEED, pp, timeout=PATIENCE_S)[0])


@pytest.mark.full
@pytest.mark.drawn(3)
@pytest.mark.parametrize(("ranks", "pp", "names"), [(2, 2, OF_STAGES), (4, 2, FEW), (3, 3, DEEP)])
def test_tokens_by_the_rules_of_nccl(ranks, pp, names):
    check(launch(on_nccl_like(mixed), ranks, tuple(names), COUNT, SEED, pp, timeout=PATIENCE_S)[0])


def test_a_few_tokens_by_the_rules_of_nccl():
    check(launch(on_nccl_like(mixed), 2, ("swapped",), COUNT, SEED, 2, timeout=PATIENCE_S)[0])


LAYOUTS = [
    (2, {**TIGHT, "pp": 2}),
    (2, {**TIGHT, "pp": 2, "preemption": "swap", "chunk": 5}),
    (4, {**TIGHT, "pp": 2, "proposer": "ngram", "k": 3}),
]


@pytest.mark.parametrize(("ranks", "options"), LAYOUTS[:1])
def test_random_arrivals_and_cancellations(ranks, options):
    hold_to_one_process(ranks, options, 8, 9, 7, 10)


@pytest.mark.full
@pytest.mark.drawn(2)
@pytest.mark.parametrize(("ranks", "options"), LAYOUTS)
def test_many_random_arrivals_and_cancellations(ranks, options):
    hold_to_one_process(ranks, options, MANY, 10, 6, 9)
