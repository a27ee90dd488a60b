"""Failures, queues and bills: formulas against simulation and against each other."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.predict import faults, model
from minillm.predict.serving import queueing


@given(st.floats(1, 100), st.floats(1e3, 1e6), st.floats(0.2, 5))
def test_no_interval_wastes_less_than_youngs(save, mtbf, factor):
    best = faults.young_interval(save, mtbf)
    assert faults.wasted_share(best, save, 60, mtbf) <= faults.wasted_share(factor * best, save, 60, mtbf) + 1e-12
    assert save / best == pytest.approx(best / 2 / mtbf)


def test_a_job_fails_as_often_as_all_its_devices():
    assert faults.job_mtbf(1e6, 1000) == 1000
    with pytest.raises(ValueError, match="devices is 0"):
        faults.job_mtbf(1e6, 0)


def test_waits_are_those_of_a_queue_replayed():
    draw = random.Random(3)
    gaps, services = ([draw.expovariate(rate) for _ in range(200)] for rate in (0.8, 1.0))
    arrived, free, expected = 0.0, 0.0, []
    for gap, service in zip(gaps, services, strict=True):
        arrived += gap
        begins = max(arrived, free)
        expected.append(begins - arrived)
        free = begins + service
    assert queueing.waits(gaps, services) == pytest.approx(expected)


def test_the_mean_and_the_tail_agree_with_a_long_simulation():
    draw = random.Random(1)
    count, arrivals, services = 400_000, 0.85, 1.0
    found = sorted(
        queueing.waits(
            (draw.expovariate(arrivals) for _ in range(count)), [draw.expovariate(services) for _ in range(count)]
        )
    )
    assert sum(found) / count == pytest.approx(queueing.mean_wait(arrivals, services), rel=0.1)
    assert found[int(0.99 * count)] == pytest.approx(queueing.wait_quantile(arrivals, services, 0.99), rel=0.1)


def test_a_load_of_one_is_refused():
    with pytest.raises(ValueError, match="grows without end"):
        queueing.mean_wait(2.0, 2.0)
    with pytest.raises(ValueError, match="share 1"):
        queueing.wait_quantile(1.0, 2.0, 1)


def test_a_bill():
    found = model.bill(1e18, 10, 1e12, 0.5, watts=700, pue=1.2, price_per_hour=3.0)
    assert found.device_hours == pytest.approx(1e18 / 0.5e12 / 3600)
    assert found.days == pytest.approx(found.device_hours / 240)
    assert found.money == pytest.approx(3 * found.device_hours)
    assert found.energy_mwh == pytest.approx(found.device_hours * 840e-6)
    with pytest.raises(ValueError, match=r"mfu 1\.5"):
        model.bill(1, 1, 1, 1.5, watts=1, pue=1, price_per_hour=0)
