"""Lab 19: the staged engine is the engine, incidents show and end for every seed, the queues are their formulas."""

import math
from statistics import fmean

import pytest

from course.kit.answers import answers_of
from course.kit.interact import render
from course.lab19_serving_fleet import experiments, incidents, pages, queues, receipts
from course.lab19_serving_fleet import figures as pictures
from course.lab19_serving_fleet.stage import Clients, SameToken, model, pace, stage
from minillm.bench.load import VirtualClock, replay
from minillm.predict.serving import queueing
from minillm.serve import LLM

ANSWERS = answers_of("19_serving_fleet")
SEEDS = (1, 2)


def test_a_stage_without_a_queue_is_a_replay_through_the_engine():
    arrivals = incidents.come(incidents.between(0, 4, 10, 3), 24, 6)
    clock = VirtualClock(pace)
    with clock.of(model()):
        llm = LLM(model(), clock=clock, max_num_seqs=8, token_budget=512, num_blocks=4096)
        outputs = replay(llm, arrivals)
    staged = stage(arrivals)
    assert isinstance(model(), SameToken)
    assert [story.ended for story in staged.stories] == pytest.approx([out.timing.ended for out in outputs])
    assert [story.first for story in staged.stories] == pytest.approx([out.timing.first_token for out in outputs])
    assert staged.computed == sum(output.computed for output in outputs) and staged.preemptions == 0


def test_one_request_alone_takes_what_its_passes_cost():
    [story] = stage(incidents.come([1.0], 40, 5)).stories
    assert story.parts == pytest.approx((0.0, pace(40), 4 * pace(1)))


def test_clients_give_up_and_try_again_as_told():
    arrivals = incidents.come([0.0, 0.0, 0.0], 200, 60)  # about 0.8 s each, one at a time
    patient = stage(arrivals, gate=1)
    assert all(story.attempts == 1 and story.ended for story in patient.stories)
    hasty = stage(arrivals, gate=1, clients=Clients(1.0, retries=2))
    assert [story.attempts for story in hasty.stories][1:] == [3, 3] and hasty.wasted >= 2
    never = stage(arrivals, gate=1, clients=Clients(1.0, retries=2, may_retry=lambda: False))
    assert [story.attempts for story in never.stories] == [1, 1, 1]
    dropped = stage(arrivals, gate=1, clients=Clients(1.0, drops_expired=True))
    assert dropped.refused == 2 and dropped.computed < never.computed


@pytest.mark.drawn(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_each_incident_shows_and_is_told_from_the_others(seed):
    for name in (*incidents.NAMES, incidents.HEALTHY):
        assert ANSWERS.diagnose(pages.page(name, seed)) == name


@pytest.mark.drawn(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_each_incident_ends_with_its_cure(seed):
    storm = incidents.retry_storm(seed=seed)
    cured = incidents.retry_storm(budget=0.1, drops_expired=True, seed=seed)
    assert incidents.in_time(storm, 20, 38) < 0.1 and incidents.in_time(cured, 20, 38) > 0.95
    unfair, fair = (incidents.neighbours(queue, seed=seed) for queue in (None, ANSWERS.FairQueue))
    assert incidents.ttft(fair, 0.99, "quiet") < incidents.ttft(unfair, 0.99, "quiet") / 5
    thrashing, reserved = (incidents.memory(reserve, seed) for reserve in (0, 12))
    assert thrashing.computed > 1.2 * thrashing.needed and reserved.computed < 1.1 * reserved.needed
    whole, pieces = (incidents.long_prompts(*options, seed=seed) for options in ((None, 2048), (16, 256)))
    assert incidents.ttft(pieces, 0.99, "short") < incidents.ttft(whole, 0.99, "short") / 4
    together, one_by_one = (incidents.cold_start_storm(at_once=count, seed=seed) for count in (None, 1))
    assert receipts.tail(one_by_one) < receipts.tail(together) / 2


def test_starts_that_share_a_disk_end_together():
    fleet = incidents.SharedDisk([], cold_start_s=10.0)
    fleet.resize(3)
    fleet.sleep(19.9)
    assert fleet.observe().ready == 1
    fleet.sleep(0.2)
    assert fleet.observe().ready == 3
    fleet.resize(4)
    fleet.sleep(10.1)
    assert fleet.observe().ready == 4


def test_littles_law_and_the_parts():
    staged = experiments.parts(12)
    inside, law = experiments.littles_law(staged)
    assert inside == pytest.approx(law, rel=0.03)
    for story in staged.stories:
        assert sum(story.parts) == pytest.approx(story.ended - story.arrival.at)


def test_a_bounded_queue_is_m_m_1_k():
    """Share refused with at most K inside: (1 - ρ) ρ^K / (1 - ρ^(K+1)); here one is served and three wait."""
    load, inside = 0.9, 4
    share = (1 - load) * load**inside / (1 - load ** (inside + 1))
    assert queues.bounded(load, 3)[1] == pytest.approx(share, rel=0.08)


def test_routing_at_random_is_as_many_single_queues():
    wait = queueing.wait_quantile(0.5, 1.0, 0.99)
    assert queues.routed(queues.at_random, load=0.5, count=40_000) == pytest.approx(wait, rel=0.12)


def test_one_queue_for_all_is_erlangs():
    waits, tail = receipts.erlang_c(10, 9.0, 1.0, 0.99)
    assert queues.central(0.9, count=60_000) == pytest.approx(tail, rel=0.15)
    assert 0 < waits < 1
    assert receipts.erlang_c(1, 0.7, 1.0, 0.99) == pytest.approx((0.7, queueing.wait_quantile(0.7, 1.0, 0.99)))


def test_waits_at_a_rate_are_read_from_ends_alone():
    """Three requests, services of 2 s, due at 0, 1 and 7."""
    from minillm.api.load.send import Call

    arrivals = incidents.come([0.0, 1.0, 7.0], 4, 1)
    calls = [Call(arrival, arrival.at, end) for arrival, end in zip(arrivals, (2.0, 4.0, 9.0), strict=True)]
    found = experiments.at_rate(calls)
    assert (found.service_s, found.idle_s, found.cv) == (2.0, 2.0, 0.0)
    assert found.wait == pytest.approx(1 / 3) == pytest.approx(found.path)
    assert found.load == pytest.approx(6 / 7) and math.isfinite(found.formula)


@pytest.mark.full
@pytest.mark.parametrize("name", ["latency_parts", "knee", "routing", "ramps", "storm"])
def test_figures_are_drawn(name):
    assert len(render(getattr(pictures, name))) > 10_000


@pytest.mark.full
def test_a_real_server_near_its_knee():
    found = experiments.knee((0.5,), 20)
    assert len(found) == 1 and found[0].service_s > 0 and found[0].wait >= 0
    assert fmean([found[0].path]) >= 0


@pytest.mark.full
def test_a_real_start_is_split():
    [started] = experiments.start()
    assert [*started.phases] == ["process", "imports", "load", "warm-up"]
    assert sum(started.phases.values()) <= started.seconds + 1
