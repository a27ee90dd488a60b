"""What the schedules cost, against closed forms: idle time, activations in flight, messages, weight versions."""

import inspect
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import cases

from minillm.parallel.pipeline_parallel.schedule import schedules
from minillm.parallel.pipeline_parallel.schedule.schedules import (
    Action,
    Durations,
    Schedule,
    check,
    dualpipe,
    gpipe,
    interleaved,
    one_f_one_b,
    peak_bytes,
    peak_in_flight,
    pipedream,
    simulate,
    weight_versions,
    zero_bubble,
    zero_bubble_v,
)
from minillm.predict.training import pipeline

UNIT = Durations(F=1, B=2, W=0)


def test_orders_by_hand():
    assert str(gpipe(2, 3)) == "rank 0: F0 F1 F2 B0 B1 B2\nrank 1: F0 F1 F2 B0 B1 B2"
    assert str(one_f_one_b(3, 3)) == ("rank 0: F0 F1 F2 B0 B1 B2\nrank 1: F0 F1 B0 F2 B1 B2\nrank 2: F0 B0 F1 B1 F2 B2")
    assert str(interleaved(2, 2)) == (
        "rank 0: F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1\nrank 1: F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1"
    )
    assert str(zero_bubble(2, 3)) == ("rank 0: F0 F1 I0 W0 F2 I1 W1 I2 W2\nrank 1: F0 I0 F1 I1 W0 F2 I2 W1 W2")
    assert str(pipedream(2, 2)) == "rank 0: F0 F1 B0 U0 B1 U1\nrank 1: F0 B0 U0 F1 B1 U1"


@settings(max_examples=40)
@given(cases())
def test_every_schedule_can_be_run(schedule):
    report = check(schedule)
    assert report.messages == len(schedule.messages)
    assert all(1 <= peak <= max(schedule.microbatches, 1) for peak in report.peak_in_flight)


@settings(max_examples=30)
@given(stages=st.integers(1, 8), microbatches=st.integers(1, 16), forward=st.integers(1, 5), backward=st.integers(1, 9))
def test_gpipe_and_1f1b_idle_alike(stages, microbatches, forward, backward):
    """P38, P40, P42: the same bubble, exactly; what differs is what is held."""
    filled, turns = gpipe(stages, microbatches), one_f_one_b(stages, microbatches)
    for schedule in (filled, turns):
        timeline = simulate(schedule, Durations(F=forward, B=backward, W=0))
        assert timeline.idle_share == pipeline.idle_share(stages, microbatches)
        assert set(timeline.idle) == {(stages - 1) * (forward + backward)}
        assert timeline.makespan == pipeline.makespan(stages, microbatches, forward, backward)
        assert check(schedule).messages == pipeline.sends(stages, microbatches)
    assert peak_in_flight(filled) == [pipeline.in_flight_gpipe(microbatches)] * stages
    assert peak_in_flight(turns) == [pipeline.in_flight_1f1b(stages, s, microbatches) for s in range(stages)]


@settings(max_examples=30)
@given(stages=st.integers(1, 6), rounds=st.integers(1, 4), chunks=st.integers(1, 4))
def test_interleaved(stages, rounds, chunks):
    """P43: chunks divide the bubble; the price is more in flight, and chunks times the messages."""
    microbatches = rounds * stages
    schedule = interleaved(stages, microbatches, chunks)
    timeline = simulate(schedule, UNIT)
    assert timeline.idle_share == pipeline.idle_share(stages, microbatches, chunks)
    assert timeline.makespan == pytest.approx(chunks * pipeline.makespan(stages, microbatches, 1, 2, chunks))
    assert check(schedule).messages == pipeline.sends(stages, microbatches, chunks)
    held = [pipeline.in_flight_interleaved(stages, chunks, microbatches, s) for s in range(stages)]
    assert peak_in_flight(schedule) == pytest.approx(held)


def test_interleaved_costs_more_memory_than_1f1b():
    """E003-46: 5.5 microbatches in flight against 4, 112 messages against 48; idle 16 % of the time instead of 27 %."""
    report = check(interleaved(4, 8, 2))
    assert (report.peak_in_flight[0], report.messages) == (5.5, 112) == (4 * (1 + 3 / 8), 2 * 8 * 7)
    assert check(one_f_one_b(4, 8)).messages == 48
    assert round(simulate(interleaved(4, 8, 2)).idle_share, 3) == 0.158


@settings(max_examples=40)
@given(
    stages=st.integers(1, 6),
    more=st.integers(0, 8),
    durations=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9)),
)
def test_zero_bubble(stages, more, durations):
    """P44: what is left of the bubble, for any durations; the memory of 1F1B's first stage."""
    forward, wait, weight = durations
    schedule = zero_bubble(stages, stages + more)
    timeline = simulate(schedule, Durations(F=forward, B=wait + weight, W=weight))
    assert set(timeline.idle) == {pipeline.zero_bubble_idle(stages, forward, wait + weight, weight)}
    assert peak_in_flight(schedule) == [pipeline.in_flight_zero_bubble(stages, stages + more)] * stages
    assert check(schedule).messages == pipeline.sends(stages, stages + more)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_third_of_the_bubble(stages, microbatches):
    """F = I = W: 3 slots against 9 with 4 stages, 7 against 21 with 8; at most half of 1F1B's idle share."""
    microbatches *= stages
    split, whole = (simulate(make(stages, microbatches)) for make in (zero_bubble, one_f_one_b))
    assert (split.idle[0], whole.idle[0]) == (stages - 1, 3 * (stages - 1))
    assert split.idle_share <= whole.idle_share / 2


@pytest.mark.parametrize("stages", range(1, 7))
def test_zb_v_never_waits(stages):
    schedule = zero_bubble_v(stages, 3 * stages)
    timeline = simulate(schedule)
    assert set(timeline.idle) == {pipeline.zero_bubble_v_idle(stages, 1)}
    for bars in timeline.bars:
        assert all(one.end == other.start for one, other in pairwise(bars))
    assert peak_in_flight(schedule) == [pipeline.in_flight_zero_bubble(stages, 3 * stages)] * stages
    assert check(schedule).messages == 4 * 3 * stages * (stages - 1)


@pytest.mark.parametrize("stages", [2, 4, 6, 8])
def test_dualpipe(stages):
    """P48: twice the parameters, one microbatch more in flight than 1F1B's first stage, a fraction of its bubble."""
    schedule = dualpipe(stages, 4 * stages)
    assert set(simulate(schedule).idle) == {pipeline.dualpipe_idle(stages, 1, 2, 1)}
    assert set(simulate(schedule, Durations(F=11, B=20, W=9)).idle) == {pipeline.dualpipe_idle(stages, 11, 20, 9)}
    assert peak_in_flight(schedule) == [pipeline.in_flight_dualpipe(stages)] * stages
    assert check(schedule).messages == pipeline.sends(stages, 4 * stages)
    held = [{schedule.part_of[place] for place in schedule.part_of if place.rank == rank} for rank in range(stages)]
    assert held == [{rank, stages - 1 - rank} for rank in range(stages)]
    assert sum(map(len, held)) / stages == pipeline.parameter_copies("dualpipe") == 2


@settings(max_examples=30)
@given(stages=st.integers(1, 7), microbatches=st.integers(1, 20))
def test_pipedream_keeps_versions_and_is_late(stages, microbatches):
    """P47: n - s versions, n - 1 - s updates late; every synchronous schedule has one version and no delay."""
    for stage, found in enumerate(weight_versions(pipedream(stages, microbatches))):
        behind = pipeline.staleness(stages, stage)
        assert found.late == tuple(min(microbatch, behind) for microbatch in range(microbatches))
        if microbatches >= 2 * stages:
            assert found.held == pipeline.weight_versions(stages, stage)
    assert {found.held for found in weight_versions(one_f_one_b(stages, microbatches))} == {1}
    assert not any(any(found.late) for found in weight_versions(one_f_one_b(stages, microbatches)))


def test_weights_are_kept_for_the_input_gradient_only():
    for order, held in (("F0 F1 I0 I1 W0 U0 W1 U1", 1), ("F0 F1 I0 W0 U0 I1 W1 U1", 2)):
        split = Schedule("split", (tuple(map(Action.parse, order.split())),), gpipe(1, 2).routes)
        assert weight_versions(split)[0].held == held and check(split)


def test_peak_bytes():
    """One number for all parts, or one for each."""
    assert peak_bytes(one_f_one_b(3, 8), [100, 10, 1]) == [300, 20, 1]
    timeline = simulate(one_f_one_b(3, 8))
    assert (timeline.peak_in_flight, timeline.peak_bytes(10)) == ([3, 2, 1], [30, 20, 10])
    schedule = zero_bubble(3, 8)
    assert peak_bytes(schedule, 8) == [24, 24, 24]


@settings(max_examples=40)
@given(cases())
def test_surplus_microbatches_leave_no_trace(schedule):
    """No microbatch but 0 .. M-1, and they follow each other in ascending order."""
    for rank in range(schedule.ranks):
        actions = schedule.actions(rank)
        for kind, chunk in {(a.kind, a.chunk) for a in actions if a.kind in "FBIU"}:
            done = [a.microbatch for a in actions if a.kind in ("BI" if kind in "BI" else kind) and a.chunk == chunk]
            assert done == sorted(set(done)) and set(done) <= set(range(schedule.microbatches))


def test_short_enough_to_read():
    for make in (gpipe, one_f_one_b):
        assert len(inspect.getsource(make).splitlines()) <= 35
    assert all(len(inspect.getsource(make).splitlines()) <= 60 for make in schedules.SCHEDULES.values())


def test_schedules_are_values():
    assert one_f_one_b(3, 5) == one_f_one_b(3, 5) != gpipe(3, 5)
    assert isinstance(gpipe(1, 1), Schedule) and gpipe(1, 1).messages == []
    for action in (Action("F", 3), Action("W", 12, 2)):
        assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: gpipe(0, 4), "stages is 0"),
        (lambda: one_f_one_b(2, 0), "microbatches is 0"),
        (lambda: interleaved(4, 6), "interleaved needs a multiple of 4 microbatches for 4 stages, not 6"),
        (lambda: interleaved(2, 4, chunks=0), "chunks is 0"),
        (lambda: zero_bubble(-1, 4), "stages is -1"),
        (lambda: zero_bubble_v(2, 0), "microbatches is 0"),
        (lambda: dualpipe(3, 8), "even number of stages, since they work in mirrored pairs, not 3"),
        (lambda: dualpipe(4, 1), "a microbatch for each of its two directions, not 1"),
        (lambda: pipedream(0, 1), "stages is 0"),
        (lambda: gpipe(2.5, 4), "stages is 2.5: give a whole number"),
        (lambda: one_f_one_b(2, 4.0), "microbatches is 4.0: give a whole number"),
        (lambda: Action("X", 0), "not 'X'"),
        (lambda: Action.parse("F"), "'F' is not an action"),
    ],
)
def test_bad_input_is_one_clear_sentence(call, says):
    with pytest.raises(ValueError, match=says) as error:
        call()
    assert "\n" not in str(error.value)
