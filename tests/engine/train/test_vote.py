"""Ranks ask each other now and then whether to stop, and all of them stop at the same step."""

from minillm.comm import launch
from minillm.measure import ledger
from minillm.train.parallel_config import ParallelConfig
from minillm.train.run import VOTE_AT_LEAST_EVERY, _Vote
from minillm.train.strategies.hybrid import Hybrid
from minillm.train.strategies.single_device import SingleDevice


def stopped_at(group, seconds):
    """Rank 1 is asked after its 12th step. The step at which this rank stops, and how often it asked the others."""
    done = 0
    vote = _Vote(Hybrid(group, ParallelConfig(dp=group.world_size)), lambda: group.rank == 1 and done >= 12)
    with ledger() as led:
        stop = vote.to_stop()
        while not stop:
            done += 1
            stop = vote.to_stop(seconds[group.rank])
    return done, led.calls["all_reduce"]


def test_short_steps_pass_without_a_vote_and_the_slowest_rank_says_how_many():
    assert launch(stopped_at, 2, (0.01, 0.1)) == [(16, 5)] * 2  # a vote at 0, 1, 6, 11 and 16
    assert launch(stopped_at, 2, (1e-9, 1e-9)) == [(1 + VOTE_AT_LEAST_EVERY, 3)] * 2
    assert launch(stopped_at, 2, (3.0, 0.1)) == [(12, 13)] * 2


def test_one_process_looks_after_every_step():
    asked = [False]
    vote = _Vote(SingleDevice(), lambda: asked[0])
    assert not any(vote.to_stop(1e-9) for _ in range(5))
    asked[0] = True
    assert vote.to_stop(1e-9)
