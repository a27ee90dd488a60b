"""Lab 04's predictions agree: the simulated clock with closed forms, exact bytes with the textbook's."""

from itertools import pairwise

import pytest

from course.lab04_zero import experiments as stages
from course.lab04_zero import experiments_links as links
from course.lab04_zero import experiments_torch as peers
from course.lab04_zero.experiments import Setup

GATHER, FORWARD, REDUCE = 0.02, 0.03, 0.01


def end(blocks, prefetch, gather=GATHER):
    return max(bar.end for bar in links.simulate(blocks, gather, FORWARD, REDUCE, prefetch))


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_every_block_is_gathered_computed_and_reduced_and_the_link_does_one_thing_at_a_time(prefetch):
    bars = links.simulate(5, GATHER, FORWARD, REDUCE, prefetch)
    names = [bar.name.split()[0] for bar in bars]
    assert {name: names.count(name) for name in names} == {"gather": 9, "forward": 5, "backward": 5, "reduce": 5}
    for lane in ("link", "compute"):
        ours = [bar for bar in bars if bar.lane == lane]
        assert all(after.start >= before.end - 1e-12 for before, after in pairwise(ours))


def test_without_prefetch_everything_adds_up():
    """The last block stays for backward; each reduction is followed by the next gather."""
    blocks = 5
    assert end(blocks, 0) == pytest.approx(blocks * (3 * FORWARD + REDUCE) + (2 * blocks - 1) * GATHER)


def test_prefetch_hides_gathers_behind_longer_compute():
    assert end(5, 1) == pytest.approx(GATHER + 5 * 3 * FORWARD + REDUCE)
    assert end(5, 1, gather=1.0) > end(5, 0, gather=1.0) - 1.0  # nothing hides behind a link that is the bottleneck


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("stage", stages.STAGES)
def test_exact_bytes_and_the_textbook(stage, mixed, accumulate):
    setup = Setup(stage, 4, accumulate, mixed)
    assert stages.predicted_bytes(setup) == pytest.approx(stages.textbook_bytes(setup), rel=1e-3)
    assert sum(stages.predicted_kinds(setup).values()) == pytest.approx(stages.predicted_state(setup), rel=1e-3)


def test_gloo_and_nccl_differ_by_one_reduce_scatter():
    once = 4 * stages.PSI * 3 // 4
    assert peers.fsdp2_bytes(2, 4) - peers.fsdp2_bytes(2, 4, on_gloo=False) == 2 * once
