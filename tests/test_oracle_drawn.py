"""The oracle on layouts that hypothesis draws: 8 ranks, every axis with every other, one corner each.

Six layouts share a launch, each with meshes of its own. Of the 60 layouts every second one runs on the CPU's backend,
the others under the rules of NCCL. MINILLM_PROOF=all draws 500 for each.
"""

import functools
import os
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.equivalence import Case, ParallelConfig, cases_of, compare
from minillm.parallel.context_parallel import CONTEXTS
from minillm.parallel.pipeline_parallel.schedules import SCHEDULES
from minillm.train.parallel_config import AXES as ORDER
from minillm.train.strategies.sharded import make_strategy
from tests.comm.nccl_like import nccl_like_group, unwaited

RANKS = 8
COUNT = 500 if os.environ.get("MINILLM_PROOF") == "all" else 60
AXES = ("dp_replicate", "dp", "pp", "cp", "tp")


@st.composite
def settings_of(draw: st.DrawFn) -> dict[str, object]:
    """Fields of a ParallelConfig of 8 ranks; not all of them fit together."""
    sizes = dict.fromkeys(AXES, 1)
    different, any_three = st.permutations(AXES), st.lists(st.sampled_from(AXES), min_size=3, max_size=3)
    for axis in draw(different | any_three)[:3]:
        sizes[axis] *= 2
    shard, replicate = sizes.pop("dp"), sizes.pop("dp_replicate")
    return {
        **sizes,
        "dp": shard * replicate,
        "dp_replicate": replicate,
        "zero": draw(st.integers(1 if replicate > 1 else 0, 3)),
        "accumulate": draw(st.sampled_from([1, 2, 3, 4, 8])),
        "schedule": draw(st.sampled_from(sorted(SCHEDULES))) if sizes["pp"] > 1 else "1f1b",
        "context": draw(st.sampled_from(CONTEXTS)) if sizes["cp"] > 1 else "zigzag",
        "sequence": draw(st.booleans()) and sizes["tp"] > 1,
        "pad": sizes["cp"] > 1,
        "axis_order": tuple(draw(st.permutations(ORDER))),
    }


@functools.cache
def drawn(count: int) -> dict[ParallelConfig, str]:
    """`count` layouts, each with the name of a corner it is put to. Those of one mesh stand together."""
    found: dict[tuple, dict[str, object]] = {}

    @settings(max_examples=10 * count, derandomize=True, database=None)
    @given(settings_of())
    def collect(fields: dict[str, object]) -> None:
        found[tuple(fields.values())] = fields

    collect()
    picks, chosen = random.Random(0), {}
    for fields in picks.sample(list(found.values()), len(found)):
        try:
            layout = ParallelConfig(**fields)
            name = picks.choice(sorted(cases_of(layout)))
            one = cases_of(layout)[name]
            layout.check(one.config, one.batch.tokens.shape[1])
        except ValueError:
            continue
        chosen[layout] = name
        if len(chosen) == count:
            break
    return dict(sorted(chosen.items(), key=lambda pair: (*pair[0].axes.values(), pair[0].dp_replicate)))


def case(layout: ParallelConfig, count: int = COUNT) -> dict[str, Case]:
    name = drawn(count)[layout]
    return {name: cases_of(layout)[name]}


def above_one(layout: ParallelConfig) -> Iterator[str]:
    yield from (axis for axis, size in layout.axes.items() if size > 1)


def test_every_pair_of_axes_and_every_choice_is_among_them():
    chosen = list(drawn(60))
    pairs = Counter(frozenset((a, b)) for each in chosen for a in above_one(each) for b in above_one(each) if a != b)
    assert len(pairs) == 6 and min(pairs.values()) >= 3
    assert sum(len(set(above_one(each))) == 3 for each in chosen) >= 10
    assert {each.zero for each in chosen} == set(range(4))
    assert {each.schedule for each in chosen if each.pp > 1} == set(SCHEDULES)
    assert {each.context for each in chosen if each.cp > 1} == set(CONTEXTS)
    assert any(each.dp_replicate > 1 and each.is_hybrid for each in chosen)
    assert len({each.axis_order for each in chosen}) >= 10


def check(layouts: list[ParallelConfig], **how) -> None:
    parts = (layouts[start : start + 6] for start in range(0, len(layouts), 6))
    rows = [row for part in parts for row in compare(part, case, steps=2, **how)]
    assert len(rows) == len(layouts)
    assert max(max(row.worst_gradient, row.worst_weight, row.grad_norm) for row in rows) <= 1e-10
    assert [row for row in rows if not row.identical] == []


def share(which: int) -> list[ParallelConfig]:
    """Every second layout, or all of them where there is time."""
    return list(drawn(COUNT)) if COUNT > 60 else list(drawn(COUNT))[which::2]


@pytest.mark.slow
def test_gradients_are_those_of_one_process():
    check(share(0))


@functools.lru_cache(1)
def _group(group):
    return nccl_like_group(group)


def _strategy(group, layout):
    """On the backend that keeps NCCL's rules; what an earlier layout did not wait for is an error now."""
    assert not unwaited(), unwaited()
    return make_strategy(_group(group), layout)


@pytest.mark.slow
def test_gradients_are_those_of_one_process_under_the_rules_of_nccl():
    check(share(1), strategy=_strategy)
