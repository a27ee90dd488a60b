"""Decisions, the controller and the simulated fleet against formulas; a day; what a cold start costs."""

import math
import random
from statistics import fmean

import pytest

from minillm.api.autoscale.controller import Controller, Scaling
from minillm.api.autoscale.policies import Predictive, Reactive, Sample
from minillm.api.autoscale.simulated import DAY_S, Job, SimulatedFleet, day, varying
from minillm.predict.serving.queueing import backlog, mean_wait, mean_wait_any_service, waits


def sample(at=0.0, rate=0.0, waiting=0, running=0, ready=1, starting=0):
    return Sample(at, rate, waiting, running, ready, starting)


def poisson_jobs(count, rate, service, seed=0):
    rng, at = random.Random(seed), 0.0
    for _ in range(count):
        at += rng.expovariate(rate)
        yield Job(at, service(rng))


# The queue


def test_one_replica_of_one_slot_is_lindleys_queue():
    jobs = list(poisson_jobs(2000, 0.9, lambda rng: rng.expovariate(1.0)))
    gaps = [b.at - a for a, b in zip([0.0, *(job.at for job in jobs)], jobs, strict=False)]
    expected = waits(gaps, [job.service_s for job in jobs])
    assert SimulatedFleet(jobs).finish().waits == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("cv", [0.0, 1.0, 2.0])
def test_mean_waits_are_pollaczek_khinchines(cv):
    draw = (lambda rng: 1.0) if cv == 0 else (lambda rng: rng.gammavariate(cv**-2, cv**2))
    found = fmean(SimulatedFleet(poisson_jobs(60_000, 0.6, draw, seed=7)).finish().waits)
    assert found == pytest.approx(mean_wait_any_service(0.6, 1.0, cv), rel=0.06)


def test_pollaczek_khinchine_holds_mm1_as_a_case():
    assert mean_wait_any_service(0.7, 1.0, 1.0) == pytest.approx(mean_wait(0.7, 1.0))
    with pytest.raises(ValueError, match="grows without end"):
        mean_wait_any_service(1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="use more than 0"):
        mean_wait_any_service(0.5, 0.0, 1.0)


def test_two_servers_share_one_queue():
    """Erlang C for two servers at 70 % load: the mean wait of M/M/2."""
    found = SimulatedFleet(poisson_jobs(60_000, 1.4, lambda rng: rng.expovariate(1.0), seed=3), begin=2).finish()
    offered, load = 1.4, 0.7
    c = (offered**2 / 2 / (1 - load)) / (1 + offered + offered**2 / 2 / (1 - load))
    assert fmean(found.waits) == pytest.approx(c / (2 - offered), rel=0.06)


# Cold starts


def test_the_queue_while_a_replica_starts_is_the_backlog_of_the_formula():
    """2 requests per second come, one is served; the second replica needs 60 s."""
    jobs = [Job(0.5 * n, 1.0) for n in range(200)]
    fleet = SimulatedFleet(jobs, cold_start_s=60.0)
    fleet.resize(2)
    fleet.sleep(59.9)
    assert len(fleet.queue) == pytest.approx(backlog(2.0, 1.0, 60.0), abs=2)
    fleet.sleep(0.2)
    assert fleet.observe().ready == 2 and fleet.outcome.longest == len(fleet.queue) + 1
    warm = SimulatedFleet(jobs, cold_start_s=60.0, pool=1)
    warm.resize(2)
    assert warm.observe().ready == 2
    warm.finish()
    assert warm.outcome.longest <= 2 and warm.outcome.cold_starts == 1  # the pool's next one


def test_a_replica_that_leaves_ends_what_it_began_and_takes_no_more():
    fleet = SimulatedFleet([Job(0.0, 10.0), Job(0.0, 10.0), Job(1.0, 10.0)], begin=2)
    fleet.sleep(0.5)
    fleet.resize(1)
    assert (fleet.observe().replicas, fleet.running) == (1, 2)
    outcome = fleet.finish()
    assert outcome.waits == [0.0, 0.0, pytest.approx(9.0)]
    assert outcome.replica_s == pytest.approx(0.5 * 2 + 9.5 * 2 + 10.0)


def test_replicas_that_are_starting_are_given_up_first():
    fleet = SimulatedFleet([], cold_start_s=5.0)
    fleet.resize(3)
    fleet.resize(1)
    fleet.finish()
    assert fleet.observe() == sample(at=5.0)


# Policies


@pytest.mark.parametrize(
    ("now", "desired"),
    [
        (sample(waiting=12, running=4, ready=2), 4),
        (sample(waiting=0, running=4, ready=2), 1),
        (sample(waiting=0, running=8, ready=2), 2),
        (sample(waiting=1, running=7, ready=2, starting=2), 2),
        (sample(running=0, ready=0, starting=0, waiting=9), 3),
        (sample(waiting=4, running=4, ready=2), 2),
        (sample(waiting=5, running=12, ready=4), 4),  # 6 % above its target: nothing changes
    ],
)
def test_reactive_is_kubernetes_formula(now, desired):
    assert Reactive(4.0).desired([now]) == desired


def test_predictive_plans_for_when_the_replica_will_be_ready():
    rising = [sample(at=15.0 * n, rate=1.0 + 0.15 * n) for n in range(21)]  # 0.01 per second and second, now 4
    policy = Predictive(capacity=1.0, utilization=0.5, ahead_s=120.0)
    assert policy.line(rising) == pytest.approx(4.0 + 0.01 * 120.0)
    assert policy.desired(rising) == math.ceil(5.2 / 0.5)
    assert policy.desired([sample(rate=4.0, waiting=60)]) == 10  # and its queue is gone within a minute


def test_predictive_knows_what_came_a_season_before():
    def rate(at):
        return 5.0 if 500 <= at % 1000 < 700 else 1.0

    history = [sample(at=float(at), rate=rate(at)) for at in range(0, 1401, 10)]
    blind, knowing = (Predictive(1.0, 1.0, 100.0, window_s=50.0, season_s=season) for season in (None, 1000.0))
    assert blind.desired(history) == 1 and knowing.desired(history) >= 3
    assert knowing.seasonal(history[:50]) == 0.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Reactive(0.0),
        lambda: Predictive(capacity=0.0),
        lambda: Predictive(capacity=1.0, ahead_s=-1.0),
        lambda: Scaling(0, 2),
        lambda: Scaling(3, 2),
        lambda: Scaling(interval_s=0.0),
    ],
)
def test_settings_that_make_no_sense_are_refused(make):
    with pytest.raises(ValueError):
        make()


# The controller


class Wanting:
    def __init__(self, counts):
        self.counts = iter(counts)

    def desired(self, history):
        return next(self.counts)


def test_growing_is_at_once_and_shrinking_waits_for_the_cool_down():
    controller = Controller(Wanting([2, 9, 4, 3, 3, 3, 3]), Scaling(1, 6, 10.0, 20.0))
    count, found = 1, []
    for step in range(7):
        count = controller.decide(sample(at=10.0 * step, ready=count))
        found.append(count)
    assert found == [2, 6, 6, 6, 4, 3, 3]


def test_a_day_under_both_policies_follows_the_load():
    rng = random.Random(2)
    jobs = [Job(at, rng.expovariate(1 / 4)) for at in varying(day(1.0), 1.8, DAY_S, seed=1)]
    found = {}
    for name, policy in (("reactive", Reactive(2.8)), ("predictive", Predictive(1.0, ahead_s=195.0))):
        fleet = SimulatedFleet(jobs, slots=4, cold_start_s=180.0)
        Controller(policy, Scaling(1, 10)).run(fleet, DAY_S)
        outcome = found[name] = fleet.finish()
        assert len(outcome.waits) == len(jobs)
        counts = {each.at / 3600: each.ready for each in outcome.samples}
        assert max(counts.values()) >= 3 and min(counts[at] for at in counts if 2 < at < 4) == 1
        fixed = SimulatedFleet(jobs, slots=4, begin=max(counts.values()))
        assert outcome.replica_s < 0.75 * fixed.finish().replica_s
    assert found["predictive"].replica_s != found["reactive"].replica_s


def test_thinned_arrivals_have_the_rate_of_each_hour():
    times = list(varying(day(0.5, swing=0.5), 0.75, DAY_S, seed=4))
    afternoon = sum(14 * 3600 <= at < 16 * 3600 for at in times) / 7200
    night = sum(2 * 3600 <= at < 4 * 3600 for at in times) / 7200
    assert afternoon == pytest.approx(0.75, rel=0.1) and night == pytest.approx(0.25, rel=0.15)
