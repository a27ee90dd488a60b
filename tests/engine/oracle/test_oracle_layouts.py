"""The oracle on layouts of 2 to 8 ranks: one of every axis, those that failed once, and others that are drawn anew in
each run, on the CPU's backend and under the rules of NCCL.

A failure shows the seed; MINILLM_SEED=... draws the same layouts again. MINILLM_PROOF=all draws 500 of them.
"""

import os
from collections import Counter

import pytest

from minillm.equivalence import CASES, CONTEXT_CASES, EXPERT_CASES, SPLIT_CASES, ParallelConfig, compare
from minillm.parallel.context_parallel import CONTEXTS
from minillm.parallel.pipeline_parallel.schedule.schedules import SCHEDULES
from minillm.train.strategies.hybrid import make_strategy
from tests.engine.comm.nccl_like import make_nccl_like_strategy
from tests.engine.oracle.layouts import FAILED_ONCE, ONE_PER_AXIS, Drawn, draw, one_per_axis

SEED = int(os.environ["MINILLM_SEED"])
COUNT = 500 if os.environ.get("MINILLM_PROOF") == "all" else 30
SMALL, ALL = (2, 4), (2, 4, 8, 6, 4, 8)
STRATEGIES = [make_strategy, make_nccl_like_strategy]
backends = pytest.mark.parametrize("backend", [0, 1], ids=["gloo", "nccl_like"])


def check(chosen: Drawn, backend: int) -> None:
    """A launch has as many layouts as make 48 ranks: the groups of each, and their threads, live as long as it does."""
    print(f"MINILLM_SEED={SEED} draws these layouts again")
    rows = []
    for ranks in sorted({layout.world_size for layout in chosen}):
        layouts, most = [layout for layout in chosen if layout.world_size == ranks], 48 // ranks
        for first in range(0, len(layouts), most):
            rows += compare(layouts[first : first + most], chosen.get, steps=2, strategy=STRATEGIES[backend])
    assert len(rows) == len(chosen)
    assert [row for row in rows if not row.ok] == []


def every_second(chosen: Drawn, backend: int) -> Drawn:
    """Every second layout, or all of them where there is time."""
    return chosen if COUNT > 60 else dict(list(chosen.items())[backend::2])


@pytest.mark.drawn(2)
@backends
def test_one_layout_of_every_axis_equals_one_process(backend):
    """Half of them, on one of the two backends; `make full` has each on the other."""
    check(dict(list(one_per_axis(backend).items())[backend::2]), backend)


@pytest.mark.drawn(2)
@backends
def test_layouts_that_failed_once_equal_one_process(backend):
    """As above."""
    check(dict(list(FAILED_ONCE.items())[backend::2]), backend)


@pytest.mark.full
@backends
def test_one_layout_of_every_axis_on_the_other_backend(backend):
    check(dict(list(one_per_axis(backend).items())[1 - backend :: 2]), backend)


@pytest.mark.drawn(2)
@backends
def test_drawn_layouts_of_two_and_four_ranks_equal_one_process(backend):
    check(dict(list(draw(SEED, 6, SMALL).items())[backend::2]), backend)


@pytest.mark.full
@pytest.mark.drawn(1)
@backends
def test_drawn_layouts_equal_one_process(backend):
    check(every_second(draw(SEED + 1, COUNT, ALL), backend), backend)


@pytest.mark.full
@backends
def test_layouts_that_failed_once_on_the_other_backend(backend):
    check(dict(list(FAILED_ONCE.items())[1 - backend :: 2]), backend)


def test_every_corner_and_every_choice_is_in_the_list_by_hand():
    for backend in (0, 1):
        layouts = list(one_per_axis(backend))
        assert {layout.zero for layout in layouts} == set(range(4))
        assert {layout.schedule for layout in layouts if layout.pp > 1} == set(SCHEDULES)
        assert {layout.context for layout in layouts if layout.cp > 1} == set(CONTEXTS)
    corners = {corner for _, *both in ONE_PER_AXIS for corner in both}
    assert corners == CASES.keys() | SPLIT_CASES.keys() | CONTEXT_CASES.keys() | EXPERT_CASES.keys()


def above_one(layout: ParallelConfig) -> set[str]:
    return {name for name in ("dp", "pp", "cp", "tp", "ep") if getattr(layout, name) > 1}


def test_sixty_drawn_layouts_have_every_pair_of_axes_and_every_choice():
    chosen = draw(0, 60, ALL)
    pairs = Counter(frozenset((a, b)) for each in chosen for a in above_one(each) for b in above_one(each) if a < b)
    assert len(pairs) == 10 and min(pairs.values()) >= 2
    assert sum(len(above_one(each) - {"ep"}) == 3 for each in chosen) >= 5
    assert Counter(each.world_size for each in chosen) == {2: 10, 4: 20, 6: 10, 8: 20}
    assert {each.zero for each in chosen} == set(range(4))
    assert {each.schedule for each in chosen if each.pp > 1} == set(SCHEDULES)
    assert {each.context for each in chosen if each.cp > 1} == set(CONTEXTS)
    assert any(each.dp_replicate > 1 and each.is_hybrid for each in chosen)
    assert len({corner for corners in chosen.values() for corner in corners}) >= 15
    assert draw(0, 6, SMALL).keys() == draw(0, 6, SMALL).keys() != draw(1, 6, SMALL).keys()
