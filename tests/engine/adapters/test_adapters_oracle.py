"""Adapters in any layout equal those of one process, which knows no layers: there each weight is W + scale · B A."""

from dataclasses import replace

import pytest

from minillm.adapters import LoraConfig
from minillm.equivalence import CASES, CONTEXT_CASES, EXPERT_CASES, SPLIT_CASES, Case, ParallelConfig, compare
from minillm.train.strategies.hybrid import make_strategy
from tests.engine.comm.nccl_like import make_nccl_like_strategy

ALL = LoraConfig(3, ("all",), alpha=5, zero_start=False)
SOME = LoraConfig(2, ("q", "self_attn.v_proj", "*.mlp.down"), rslora=True, zero_start=False)


def with_adapters(case: Case, lora: LoraConfig) -> Case:
    return replace(case, lora=lora, frozen=())


def cases(layout: ParallelConfig) -> dict[str, Case]:
    if layout.ep > 1:
        return {"shared": with_adapters(EXPERT_CASES["shared"], ALL)}
    if layout.cp > 1:
        return {"documents": with_adapters(CONTEXT_CASES["documents"], ALL)}
    cases = SPLIT_CASES if layout.is_hybrid else CASES
    return {
        "all": with_adapters(cases["tied"], ALL),
        "some": with_adapters(cases["unequal"], SOME),
        "clipped": with_adapters(cases["clipped"], ALL),
    }


TWO = [
    *(ParallelConfig(dp=2, zero=zero, accumulate=2) for zero in range(4)),
    ParallelConfig(tp=2),
    ParallelConfig(tp=2, sequence=True),
    ParallelConfig(pp=2, accumulate=3),
    ParallelConfig(cp=2, pad=True),
]
FOUR = [
    ParallelConfig(dp=2, tp=2, zero=1, sequence=True),
    ParallelConfig(dp=2, tp=2, zero=3),
    ParallelConfig(dp=2, pp=2, zero=2, accumulate=2),
    ParallelConfig(dp=2, pp=2, zero=3, accumulate=2),
    ParallelConfig(tp=4, sequence=True),  # four ranks share two kv heads
    ParallelConfig(tp=2, pp=2, accumulate=3, schedule="zero_bubble"),
    ParallelConfig(dp=2, ep=2, tp=2),
    ParallelConfig(dp=4, zero=2, dp_replicate=2),
]
BACKENDS = [make_strategy, pytest.param(make_nccl_like_strategy, marks=pytest.mark.full)]
backends = pytest.mark.parametrize("strategy", BACKENDS, ids=["gloo", "nccl_like"])


@backends
@pytest.mark.parametrize("layouts", [TWO, pytest.param(FOUR, marks=pytest.mark.full)], ids=["two ranks", "four"])
def test_adapters_in_any_layout_equal_one_process(layouts, strategy):
    rows = compare(layouts, cases, steps=2, strategy=strategy)
    assert [row for row in rows if not row.ok] == []
