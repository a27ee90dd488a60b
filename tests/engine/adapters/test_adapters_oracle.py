"""Adapters in any layout equal those of one process, which knows no layers: there each weight is W + scale · B A.

With QLoRA W is what the whole layers' codes stand for; with dropout one process has layers, too, and the same masks.
"""

from dataclasses import replace

import pytest

from minillm.adapters import LoraConfig, adapters
from minillm.adapters.parallel import LoraRowParallel
from minillm.equivalence import CASES, CONTEXT_CASES, EXPERT_CASES, SPLIT_CASES, Case, ParallelConfig, compare
from minillm.equivalence.cases import Batch
from minillm.model import ModelConfig
from minillm.train.strategies.hybrid import Hybrid, make_strategy
from tests.engine.comm.nccl_like import make_nccl_like_strategy

ALL = LoraConfig(3, ("all",), alpha=5, zero_start=False)
SOME = LoraConfig(2, ("q", "self_attn.v_proj", "*.mlp.down"), rslora=True, zero_start=False)
DROPPED = replace(ALL, dropout=0.4)
# Groups of 64 for four ranks, which share two kv heads; a gate of more scales than share one of their own.
CODES = ModelConfig(37, 64, 320, 2, 4, 2, head_dim=64, max_seq_len=16, init_std=0.3, tie_embeddings=True, qkv_bias=True)


def with_adapters(case: Case, lora: LoraConfig) -> Case:
    return replace(case, lora=lora, frozen=())


def cases(layout: ParallelConfig) -> dict[str, Case]:
    if layout.ep > 1:
        return {"shared": with_adapters(EXPERT_CASES["shared"], DROPPED)}
    if layout.cp > 1:
        return {
            "documents": with_adapters(CONTEXT_CASES["documents"], ALL),
            "padded, dropout": with_adapters(CONTEXT_CASES["padded"], DROPPED),
        }
    cases = SPLIT_CASES if layout.is_hybrid else CASES
    return {
        "all": with_adapters(cases["tied"], ALL),
        "some": with_adapters(cases["unequal"], SOME),
        "clipped": with_adapters(cases["clipped"], ALL),
        "dropout": with_adapters(cases["tied"], DROPPED),
    }


def cases_in_codes(layout: ParallelConfig) -> dict[str, Case]:
    config = replace(CODES, intermediate_size=512) if layout.tp > 1 else CODES
    batch = Batch.random(config, 5, 4, seed=3)
    return {
        "all": Case(config, batch, lora=ALL, qlora=True),
        "some, dropout": Case(config, batch, lora=replace(SOME, dropout=0.3), qlora=True),
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
backends = pytest.mark.parametrize("strategy", [make_strategy, make_nccl_like_strategy], ids=["gloo", "nccl_like"])


@pytest.mark.full
@pytest.mark.drawn(3)
@backends
@pytest.mark.parametrize("layouts", [TWO, FOUR], ids=["two ranks", "four"])
def test_adapters_in_any_layout_equal_one_process(layouts, strategy):
    rows = compare(layouts, cases, steps=2, strategy=strategy)
    assert [row for row in rows if not row.ok] == []


@pytest.mark.full
@pytest.mark.drawn(3)
@backends
@pytest.mark.parametrize("layouts", [TWO, FOUR], ids=["two ranks", "four"])
def test_so_do_adapters_beside_codes(layouts, strategy):
    layouts = [layout for layout in layouts if layout.ep == 1]  # experts are not quantized
    rows = compare(layouts, cases_in_codes, steps=2, strategy=strategy)
    assert [row for row in rows if not row.ok] == []


class OwnMasks(Hybrid):
    """Ranks that drop the inputs of row layers by numbers of their own: right on the first one only."""

    def build(self, *given, **how):
        model = super().build(*given, **how)
        for layer in adapters(model).values():
            if isinstance(layer, LoraRowParallel):
                layer.key += self.group.rank
        return model


def test_masks_that_do_not_fit_together_are_found():
    case = with_adapters(SPLIT_CASES["plain"], DROPPED)
    [row] = compare(ParallelConfig(tp=2), {"dropout": case}, steps=1, strategy=OwnMasks)
    assert not row.ok and row.worst_gradient > 1e-3
