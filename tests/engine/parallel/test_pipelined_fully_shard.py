"""FullyShard under a pipeline: what it sends, holds and refuses. Its gradients: see test_oracle_split.py."""

import pytest
import torch

from minillm.comm import launch
from minillm.equivalence import SPLIT_CASES, compare
from minillm.equivalence.oracle import _backward, _sgd
from minillm.measure import ledger
from minillm.predict.training import sharding as predict
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.hybrid import Hybrid

CASE = SPLIT_CASES["plain"]


def one_step(group, layout):
    """(bytes sent over dp, predicted, calls, groups unsharded now and at most, elements of slices and of the part)."""
    torch.set_num_threads(1)
    strategy = Hybrid(group, layout)
    model = strategy.build(CASE.config, seed=0, dtype=torch.float64)
    strategy.wrap(model)
    sharded = strategy.module
    strategy.updater(sharded, lambda named: _sgd(named, lr=0.1))
    sizes = [[sum(flat.numel for flat in each.flats) for each in sharded.groups_of(part)] for part in model.parts]
    how = {"itemsize": 8, "reshard": layout.reshard}
    predicted = predict.pipelined_fully_shard_bytes(sizes, layout.dp, layout.accumulate, **how)
    held = predict.pipelined_gathered(sizes, layout.dp, **how)
    with ledger() as led:
        _backward(strategy, sharded, CASE.batch, layout.accumulate)
    over_dp = [event for event in led.events if event.group == "dp" and event.op in ("all_gather", "reduce_scatter")]
    calls = {op: sum(event.op == op for event in over_dp) for op in ("all_gather", "reduce_scatter")}
    stats = sharded.unshard_stats
    slices = sum(p.numel() for _, p in sharded.named_parameters())
    whole = sum(param.full.numel() for param in sharded.params.values())
    with pytest.raises(ValueError, match="a pipeline's parts run by `Pipeline`"):
        sharded(CASE.batch.tokens)
    sent = sum(event.bytes for event in over_dp)
    assert stats.peak_bytes == held
    return sent, predicted, calls, [len(part) for part in sizes], (stats.groups, stats.peak_groups), slices, whole


@pytest.mark.parametrize(
    ("schedule", "reshard"), [("1f1b", True), ("zero_bubble", True), ("1f1b", False), ("interleaved", False)]
)
def test_bytes_and_memory_are_as_predicted(schedule, reshard):
    layout = ParallelConfig(dp=2, pp=2, zero=3, accumulate=4, schedule=schedule, reshard=reshard)
    ranks = launch(one_step, 4, layout)
    for sent, predicted, calls, groups, (now, most), _, _ in ranks:
        assert sent == predicted
        gathers = 2 * 4 if reshard else 1
        assert calls == {"all_gather": gathers * sum(groups), "reduce_scatter": sum(groups)}
        assert now == [] and most == (max(groups) if reshard else sum(groups))  # of one part for an action, or of all
    assert sum(rank[5] for rank in ranks) == sum(rank[6] for rank in ranks) / 2  # each number on one rank of two


def test_weights_that_are_kept_are_those_of_the_step():
    """Five steps, of which each gathers what the one before has changed."""
    rows = compare(ParallelConfig(dp=2, pp=2, zero=3, accumulate=2, reshard=False), {"plain": CASE})
    assert all(row.ok for row in rows), rows


@pytest.mark.parametrize("layout", [{"dp": 2, "zero": 3}, {"pp": 2, "zero": 2, "dp": 2}])
def test_only_a_pipeline_s_gathered_weights_can_be_kept(layout):
    with pytest.raises(ValueError, match="reshard False keeps gathered weights through a pipeline's step"):
        ParallelConfig(**layout, accumulate=2, reshard=False)
