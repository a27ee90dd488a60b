"""Layouts drawn at random over every axis, schedule and number of microbatches: each gives one process's gradients."""

import os

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from minillm.equivalence import SPLIT_CASES, compare
from minillm.parallel.pipeline_parallel.schedules import SCHEDULES
from minillm.train.parallel_config import ParallelConfig

AT_ONCE = 5  # layouts that one launch of ranks compares
LAUNCHES = 40 if os.environ.get("MINILLM_PROOF") == "all" else 4
SHAPES = [(dp, pp, tp) for dp in (1, 2, 4) for pp in (1, 2, 4) for tp in (1, 2, 4) if dp * pp * tp == 4]


@st.composite
def layouts(draw) -> ParallelConfig:
    dp, pp, tp = draw(st.sampled_from(SHAPES))
    zero = draw(st.integers(0, 3))
    replicate = draw(st.sampled_from([r for r in (1, 2, 4) if dp % r == 0])) if zero else 1
    microbatches = draw(st.integers(1, 6))
    schedule = draw(st.sampled_from(list(SCHEDULES))) if pp > 1 else "1f1b"
    if schedule == "interleaved":
        microbatches = pp * draw(st.integers(1, 2))
    if schedule == "dualpipe":
        microbatches = max(2, microbatches)
    return ParallelConfig(dp, zero, microbatches, tp, tp > 1 and draw(st.booleans()), pp, schedule, replicate)


@pytest.mark.slow
@settings(max_examples=LAUNCHES, deadline=None, phases=[Phase.explicit, Phase.generate], derandomize=True,
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(st.lists(layouts(), min_size=AT_ONCE, max_size=AT_ONCE, unique=True), st.sampled_from(list(SPLIT_CASES)))
def test_any_layout_equals_one_process(chosen, corner):
    rows = compare(chosen, {corner: SPLIT_CASES[corner]}, steps=2)
    off = [row for row in rows if not row.ok]
    assert len(rows) == AT_ONCE and not off, off
