"""The simulator against one that ticks, and charts printed and read back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import cases, part, parts, products, wants

from minillm.measure.ledger import Ledger, Span
from minillm.parallel.pipeline_parallel.schedule.schedules import (
    Action,
    Durations,
    gpipe,
    observed,
    one_f_one_b,
    parse_chart,
    pipedream,
    simulate,
    violations,
    zero_bubble,
)
from minillm.predict.training import pipeline

HANDBOOK = """\
Stage 0: F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
Stage 1:    F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
Stage 2:       F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
Stage 3:          F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
         |--warmup--|---------------steady state--------------|--cooldown--|
"""
RIGHT = """\
rank 0: F0 F1 F2 F3 .. .. .. B0 F4 B1 F5 B2 F6 B3 F7 B4 .. B5 .. B6 .. B7
rank 1: .. F0 F1 F2 .. .. B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 .. B6 .. B7 ..
rank 2: .. .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 .. B7 .. ..
rank 3: .. .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 .. .. .."""


def ticking(schedule, durations):
    """Start times by (rank, place in its order), found by looking at every rank at every tick of a clock."""
    last, done_at, starts = parts(schedule) - 1, {}, {}
    orders = [schedule.actions(rank) for rank in range(schedule.ranks)]
    at, free, now = [0] * len(orders), [0] * len(orders), 0
    while any(at[rank] < len(order) for rank, order in enumerate(orders)):
        assert now < 10_000
        again = True
        while again:  # what takes no time may let others start at the same tick
            again = False
            for rank, order in enumerate(orders):
                if at[rank] == len(order) or free[rank] > now:
                    continue
                action = order[at[rank]]
                place = part(schedule, rank, action.chunk)
                needed = [done_at.get(want) for want in wants(action.kind, action.microbatch, place, last)]
                if any(n is None or n[0] + (durations.message if n[1] != rank else 0) > now for n in needed):
                    continue
                starts[rank, at[rank]] = now
                free[rank] = now + durations.of(action.kind, place)
                for product in products(action.kind):
                    done_at[product, action.microbatch, place] = free[rank], rank
                at[rank] += 1
                again = True
        now += 1
    return starts, max(free)


@st.composite
def timed(draw):
    schedule = draw(cases())
    some = st.one_of(
        st.integers(0, 4), st.lists(st.integers(0, 4), min_size=schedule.num_parts, max_size=schedule.num_parts)
    )
    forward, weight, wait = (
        draw(some.filter(lambda value: value != 0 and value != [0] * schedule.num_parts)),
        draw(some),
        draw(some),
    )
    total = [Durations(W=weight, B=9).of("W", p) + Durations(W=wait, B=9).of("W", p) for p in range(schedule.num_parts)]
    return schedule, Durations(F=forward, B=total, W=weight, message=draw(st.integers(0, 3)), U=draw(st.integers(0, 1)))


@settings(max_examples=60)
@given(timed())
def test_simulator_against_one_that_ticks(case):
    schedule, durations = case
    timeline = simulate(schedule, durations)
    starts, makespan = ticking(schedule, durations)
    found = {(rank, k): bar.start for rank, bars in enumerate(timeline.bars) for k, bar in enumerate(bars)}
    assert found == starts
    assert timeline.makespan == makespan - timeline.start
    assert violations(timeline) == []


@settings(max_examples=25)
@given(timed())
def test_nothing_waits_without_a_reason(case):
    """Every action starts the moment its rank is free or something it needs arrives: no schedule could be earlier."""
    schedule, durations = case
    timeline = simulate(schedule, durations)
    bar_of = {(rank, bar.action): bar for rank, bars in enumerate(timeline.bars) for bar in bars}
    for rank, bars in enumerate(timeline.bars):
        for before, bar in zip([None, *bars], bars, strict=False):
            edges = schedule.edges[next(e for e in schedule.tasks if e == (rank, bar.action))]
            arrivals = [bar_of[edge.source].end + durations.message * edge.crosses for edge in edges]
            assert bar.start == max([before.end if before else 0, *arrivals])


times = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), min_size=1, max_size=5)


@settings(max_examples=25)
@given(times, st.integers(1, 12))
def test_uneven_stages(stages, microbatches):
    """P45: the slowest stage sets the pace; 1F1B loses less than GPipe if another stage is slowest on the way back."""
    forward, backward = (list(column) for column in zip(*stages, strict=True))
    durations = Durations(F=forward, B=backward, W=0)
    filled, turns = (simulate(make(len(stages), microbatches), durations).makespan for make in (gpipe, one_f_one_b))
    assert filled == pipeline.uneven_makespan(forward, backward, microbatches)
    both = [f + b for f, b in stages]  # stage s begins after the stages before it, and they end after stage s
    floor = max(sum(both[:s]) + microbatches * both[s] for s in range(len(both)))
    assert floor <= turns <= filled


def test_messages_cost_time_only_where_somebody_waits():
    free, slow = (simulate(gpipe(3, 8), Durations(message=m)) for m in (0, 0.5))
    assert slow.makespan == free.makespan + 4 * 0.5  # twice down, twice back: the others hide behind computation


def test_the_handbooks_1f1b_chart_breaks_every_backward_message():
    """P49, E000-25: 24 of 24 gradients arrive after they are used; the orders are right, the times impossible."""
    chart = parse_chart(HANDBOOK)
    assert chart.makespan == 19 and chart.schedule.orders == one_f_one_b(4, 8).orders
    broken = violations(chart)
    across = [edge for edge in chart.schedule.messages if edge.target.action.kind == "B"]
    assert len(across) == 24 and set(broken) == set(across)
    assert str(broken[0]) == "B0 from rank 1 to rank 0"


def test_the_right_chart():
    timeline = simulate(one_f_one_b(4, 8), Durations(F=1, B=1, W=0))
    assert timeline.makespan == 22 and str(timeline) == RIGHT
    assert violations(parse_chart(RIGHT)) == [] and parse_chart(RIGHT).bars == timeline.bars


@settings(max_examples=30)
@given(cases(["gpipe", "1f1b", "zero_bubble", "interleaved"]), st.integers(1, 3), st.integers(1, 3))
def test_charts_read_back(schedule, forward, half):
    timeline = simulate(schedule, Durations(F=forward, B=2 * half, W=half))
    again = parse_chart(timeline.chart(slot=1), chunks=schedule.num_parts // schedule.ranks)
    assert again.bars == timeline.bars and again.schedule.routes == schedule.routes


def test_charts_of_any_durations_have_a_readable_width():
    for durations in (Durations(F=0.1, B=0.25, W=0.1), Durations(F=0.0137, B=0.0291, W=0.01), Durations(F=1, B=1, W=0)):
        lines = str(simulate(zero_bubble(3, 6), durations)).splitlines()
        assert len(lines) == 3 and len({len(line) for line in lines}) == 1 and len(lines[0]) < 700
    assert str(simulate(gpipe(1, 1), Durations(F=0.5, B=1, W=0))) == "rank 0: F0 B0 --"
    assert str(simulate(pipedream(1, 1))) == "rank 0: F0 B0 --"  # the update takes no time here


def test_observed_reads_ledgers():
    spans = [Span("F0", "compute", 10.0, 11.0), Span("step", "compute", 9.0, 20.0), Span("B0", "compute", 13.0, 15.0)]
    later = [Span("F0", "compute", 11.5, 12.0), Span("B0", "compute", 12.0, 13.0)]
    timeline = observed(one_f_one_b(2, 1), [Ledger(spans=spans), Ledger(spans=later)])
    assert timeline.makespan == 5.0 and timeline.idle == [2.0, 3.5] and timeline.idle_share == 5.5 / 10
    assert violations(timeline) == [] and timeline.bars[0][1].action == Action("B", 0)
    late = [Span("F0", "compute", 10.5, 12.0), Span("B0", "compute", 12.0, 14.0)]
    broken = violations(observed(one_f_one_b(2, 1), [Ledger(spans=spans), Ledger(spans=late)]))
    assert [str(edge) for edge in broken] == ["B0 from rank 1 to rank 0", "F0 from rank 0 to rank 1"]


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: simulate(gpipe(2, 2), Durations(F=-1)), "F=-1: a duration cannot be negative"),
        (lambda: simulate(gpipe(2, 2), Durations(W=3)), "W=3 is longer than B=2"),
        (lambda: simulate(gpipe(2, 2), Durations(F=[1, 2, 3])), "one for each of the 2 parts"),
        (lambda: simulate(gpipe(2, 2), Durations(message=[1, 2])), "message=.*give one number"),
        (lambda: simulate(gpipe(2, 2), Durations(F=0, B=0, W=0)), "F=0 and B=0: let something take time"),
        (lambda: parse_chart("nothing here"), "no actions"),
        (
            lambda: parse_chart("rank 0: F0 B0.1"),
            "column 0 of the chart holds 'F0 B0': put each action in 5 characters",
        ),
        (lambda: violations(parse_chart("rank 0: F0   B0.1")), "B0.1 on rank 0 is not on the route of microbatch 0"),
        (lambda: observed(gpipe(2, 2), [Ledger(), Ledger()]), r"\[0, 0\] actions, a step of gpipe has \[4, 4\]"),
    ],
)
def test_bad_input_is_one_clear_sentence(call, says):
    with pytest.raises(ValueError, match=says) as error:
        call()
    assert "\n" not in str(error.value)
