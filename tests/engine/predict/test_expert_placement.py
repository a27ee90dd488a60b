"""Which expert lives where: equally many slots, near the best packing, and better than neighbours together."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.predict.training.expert_placement import contiguous, packed, replicated
from minillm.predict.training.moe import imbalance


def skewed(experts, steps=1, seed=0):
    draw = random.Random(seed)
    popular = [1 / (1 + rank) for rank in range(experts)]
    draw.shuffle(popular)
    return [[round(1000 * share * draw.uniform(0.8, 1.2)) for share in popular] for _ in range(steps)]


def test_the_picture_in_the_docstring():
    loads = [90, 50, 30, 10]
    assert contiguous(4, 2).rank_loads(loads) == [140, 40]
    assert packed(loads, 2).rank_loads(loads) == [100, 80]
    assert sorted(replicated(loads, 2, 3).rank_loads(loads)) == [85, 95]


@given(st.lists(st.integers(0, 1000), min_size=8, max_size=8), st.integers(1, 4), st.sampled_from([1, 2, 4]))
def test_every_expert_has_a_slot_and_every_rank_equally_many(loads, spare, nodes):
    chosen = replicated(loads, 4, 2 + spare, nodes=nodes, groups=4)
    assert [len(held) for held in chosen.slots] == [2 + spare] * 4
    assert min(chosen.replicas) >= 1 and sum(chosen.replicas) == 4 * (2 + spare)
    assert sum(chosen.rank_loads(loads)) == pytest.approx(sum(loads))
    if nodes > 1:  # a group stays on one node
        for group in range(4):
            homes = {rank * nodes // 4 for rank in range(4) for e in chosen.slots[rank] if e // 2 == group}
            assert len(homes) == 1


@given(st.lists(st.integers(0, 100), min_size=6, max_size=6))
def test_packing_is_within_four_thirds_of_the_best(loads):
    """4/3 - 1/(3 ranks), with three slots on each rank (Kellerer and Woeginger 1993); the best by enumeration."""
    best = min(max(sum(loads[e] for e in half), sum(loads) - sum(loads[e] for e in half))
               for half in itertools.combinations(range(6), 3))  # fmt: skip
    assert max(packed(loads, 2).rank_loads(loads)) <= 7 / 6 * best


def test_replicas_help_where_one_expert_is_hotter_than_a_rank():
    loads = [700, 50, 50, 50, 50, 50, 25, 25]
    one_each, spread = packed(loads, 4), replicated(loads, 4, 3)
    assert imbalance(one_each.rank_loads(loads)) > 2.8 and imbalance(spread.rank_loads(loads)) < 1.25
    assert spread.replicas[0] >= 3


def test_bad_input_in_one_sentence():
    for call, message in (
        (lambda: contiguous(6, 4), "6 experts do not divide over 4 ranks"),
        (lambda: packed([1, 2, 3], 2), "3 experts do not divide"),
        (lambda: replicated([1, 2, 3, 4, 5], 2, 2), "2 ranks of 2 slots hold 4 experts, not 5"),
        (lambda: replicated([1] * 4, 2, 2, groups=3), "4 experts do not divide into 3"),
        (lambda: replicated([1] * 4, 2, 2, nodes=2), "1 groups do not divide into 2"),
        (lambda: contiguous(4, 2).rank_loads([1, 2]), "2 loads for 4 experts"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
