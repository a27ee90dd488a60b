"""The checker: possible schedules pass, and each way to break one is rejected by the name of what is broken."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from schedule_cases import cases, part, parts, products, wants

from minillm.parallel.pipeline_parallel.schedule.schedules import (
    SCHEDULES,
    Action,
    Durations,
    Edge,
    Place,
    ScheduleError,
    batches,
    check,
    gpipe,
    interleaved,
    messages_as_used,
    one_f_one_b,
    pipedream,
    simulate,
    with_messages,
    zero_bubble,
)


def reorder(schedule, rank, *steps):
    """Another order for one rank: actions, messages, or words such as "F0 B0"."""
    steps = [s for step in steps for s in (map(Action.parse, step.split()) if isinstance(step, str) else [step])]
    return replace(schedule, orders=(*schedule.orders[:rank], tuple(steps), *schedule.orders[rank + 1 :]))


def possible(schedule) -> bool:
    """Whether every rank can play its order to the end: cross off whatever can be next until nothing can."""
    orders, made = [schedule.actions(rank) for rank in range(schedule.ranks)], set()
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            if order:
                kind, m, at = order[0].kind, order[0].microbatch, part(schedule, rank, order[0].chunk)
                if wants(kind, m, at, parts(schedule) - 1) <= made:
                    made |= {(product, m, at) for product in products(kind)}
                    del order[0]
                    moved = True
    return not any(orders)


@settings(max_examples=60, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(cases(), st.data())
def test_two_actions_swapped(schedule, data):
    """The checker says of every swap what an independent one says."""
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    order = list(schedule.orders[rank])
    assume(len(order) > 1)
    one, other = data.draw(st.integers(0, len(order) - 1)), data.draw(st.integers(0, len(order) - 1))
    assume(one != other)
    order[one], order[other] = order[other], order[one]
    swapped = reorder(schedule, rank, *order)
    if possible(swapped):
        check(swapped)
    else:
        with pytest.raises(ScheduleError, match=r"which it needs|wait for each other") as error:
            check(swapped)
        with pytest.raises(ScheduleError, match=r"which it needs|wait for each other"):
            simulate(swapped)
        assert "\n" not in str(error.value)


@settings(max_examples=40)
@given(cases(), st.data())
def test_an_action_left_out_or_done_twice(schedule, data):
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    order = schedule.orders[rank]
    assume(order)
    at = data.draw(st.integers(0, len(order) - 1))
    action = order[at]
    if action.kind != "U":
        with pytest.raises(ScheduleError, match=f"{action} is missing from the order of rank {rank}"):
            check(reorder(schedule, rank, *order[:at], *order[at + 1 :]))
    with pytest.raises(ScheduleError, match=f"rank {rank} does {action} and {action}, but once is enough"):
        check(reorder(schedule, rank, *order, action))


@pytest.mark.parametrize(
    "schedule, rank, order, says",
    [
        (gpipe(2, 2), 1, "B0 F0 F1 B1", "rank 1 does B0 before F0, which it needs"),
        (gpipe(2, 2), 0, "F0 F1 B0", "B1 is missing from the order of rank 0"),
        (gpipe(2, 2), 0, "F0 F1 B0 B1 F1", "rank 0 does F1 and F1, but once is enough"),
        (gpipe(2, 2), 0, "F0 F1 B0 B1 W1", "rank 0 does B1 and W1, but once is enough"),
        (gpipe(2, 2), 0, "F0 F1 F2 B0 B1", "F2 on rank 0 is not on the route of microbatch 2"),
        (gpipe(2, 2), 0, "F0 F1 F1.1 B0 B1", "F1.1 on rank 0 is not on the route of microbatch 1"),
        (zero_bubble(2, 1), 1, "F0 W0 I0", "rank 1 does W0 before I0, which it needs"),
        (zero_bubble(2, 1), 1, "F0 I0", "W0 is missing from the order of rank 1"),
        (pipedream(2, 1), 1, "F0 U0 B0", "rank 1 does U0 before B0, which it needs"),
        (
            gpipe(2, 2),
            0,
            "F0 B0 F1 B1",
            "wait for each other: rank 0 cannot do B0 before B0 on rank 1, rank 1 cannot do F1 before F1 on rank 0",
        ),
    ],
)
def test_the_broken_dependency_is_named(schedule, rank, order, says):
    with pytest.raises(ScheduleError, match=re.escape(says)):
        check(reorder(schedule, rank, order))


@pytest.mark.parametrize(
    "routes, says",
    [
        ((), "gpipe has no microbatches"),
        (((Place(0, 0), Place(1, 0)), (Place(0, 0),)), "route of microbatch 1 visits 1 places, that of microbatch 0 v"),
        (((Place(0, 0),), (Place(0, 0),)), r"the routes visit chunks \[\] of rank 1"),
        (
            ((Place(0, 0), Place(1, 0)), (Place(1, 0), Place(0, 0))),
            "chunk 0 of rank 1 is part 1 and part 0 of the model",
        ),
        (((Place(0, 0), Place(0, 0)),) * 2, "chunk 0 of rank 0 is part 0 and part 1 of the model"),
        (((Place(0, 0), Place(1, 1)),) * 2, r"the routes visit chunks \[1\] of rank 1"),
        (((Place(0, 0), Place(1, 0), Place(2, 0)),) * 2, "a route visits rank 2, but there are orders for 2 ranks"),
    ],
)
def test_routes_lead_through_the_whole_model(routes, says):
    with pytest.raises(ScheduleError, match=says) as error:
        check(replace(gpipe(2, 2), routes=routes))
    assert "\n" not in str(error.value)


def test_slow_is_not_wrong():
    slow = reorder(one_f_one_b(2, 2), 0, "F0 B0 F1 B1")
    assert check(slow).peak_in_flight == (1, 1)
    assert simulate(slow).makespan > simulate(one_f_one_b(2, 2)).makespan


# Messages.


@settings(max_examples=40)
@given(cases(), st.booleans(), st.booleans(), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2))
def test_messages_never_deadlock(schedule, early, batched, forward, wait, message):
    """Whatever durations the order of messages was made from, and whether they go in batches or one by one."""
    durations = Durations(F=forward, B=wait + 1, W=1, message=message)
    full = with_messages(schedule, durations, early)
    check(full, batched)
    for rank, order in enumerate(full.orders):
        assert [step for step in order if isinstance(step, Action)] == list(schedule.orders[rank])
        steps = list(batches(order))
        assert not any(isinstance(a, list) and isinstance(b, list) for a, b in pairwise(steps))
        assert [s for step in steps for s in (step if isinstance(step, list) else [step])] == list(order)
    sent = [
        edge
        for rank, order in enumerate(full.orders)
        for edge in order
        if isinstance(edge, Edge) and edge[0][0] == rank
    ]
    assert sorted(map(str, sent)) == sorted(map(str, schedule.messages)) and all(edge.crosses for edge in sent)


def test_what_one_would_write_first_deadlocks():
    """1F1B with blocking sends: a forward is offered upstairs while a gradient is offered downstairs."""
    check(messages_as_used(gpipe(4, 8)), batched=False)
    with pytest.raises(ScheduleError, match="rank 2 waits to send F1 to rank 3, rank 3 waits to send B0 to rank 2"):
        check(messages_as_used(one_f_one_b(4, 8)), batched=False)
    check(messages_as_used(one_f_one_b(4, 8)))  # Megatron's cure: the send and the receive that follows it at once
    with pytest.raises(ScheduleError, match="deadlock, if sends wait for their receives: rank 0 waits to send"):
        check(messages_as_used(interleaved(4, 8)))
    for make in SCHEDULES.values():
        check(with_messages(make(4, 8)), batched=False)


def test_early_receives_stand_before_the_action_that_runs_meanwhile():
    """Rank 0's F1 is under way on rank 0 while rank 1 computes F0: asked for before F0, or after it."""
    names = [[str(step) for step in with_messages(gpipe(2, 2), early=early).orders[1]] for early in (False, True)]
    message = "F1 from rank 0 to rank 1"
    assert [order.index(message) - order.index("F0") for order in names] == [1, 1]
    slow = Durations(F=[1, 5], B=2, W=1)
    names = [[str(step) for step in with_messages(gpipe(2, 3), slow, early).orders[1]] for early in (False, True)]
    assert names[0][:3] == ["F0 from rank 0 to rank 1", "F0", "F1 from rank 0 to rank 1"]
    assert names[1][:4] == [*(f"F{m} from rank 0 to rank 1" for m in range(3)), "F0"]


def test_broken_messages_are_named():
    full = with_messages(one_f_one_b(2, 2))
    order = list(full.orders[0])
    first = next(step for step in order if isinstance(step, Edge))
    after = [step for step in order if step != first]
    with pytest.raises(ScheduleError, match="rank 0 never sends F0 from rank 0 to rank 1"):
        check(reorder(full, 0, *after))
    with pytest.raises(ScheduleError, match="rank 0 sends F0 from rank 0 to rank 1 before it has made it"):
        check(reorder(full, 0, first, *after))
    with pytest.raises(ScheduleError, match="rank 0 has the message F0 from rank 0 to rank 1 2 times"):
        check(reorder(full, 0, *order, first))
    other = list(full.orders[1])
    with pytest.raises(ScheduleError, match="rank 1 receives F0 from rank 0 to rank 1 after F0, which needs it"):
        check(reorder(full, 1, *(step for step in other if step != first), first))
    messages = [step for step in order if isinstance(step, Edge) and step.source.rank == 0]
    late = [step for step in order if step not in messages]
    with pytest.raises(ScheduleError, match="message 1 from rank 0 to rank 1 is F1 where it is sent, but F0 where"):
        check(reorder(full, 0, late[0], late[1], *reversed(messages), *late[2:]))


def test_a_place_for_each_message_needs_time():
    with pytest.raises(ValueError, match="let F, B and B - W last longer than 0"):
        with_messages(zero_bubble(2, 2), Durations(F=1, B=1, W=1))
    check(with_messages(pipedream(3, 4)))  # an update may take none


def test_simulate_says_who_makes_nothing():
    with pytest.raises(ScheduleError, match="B0 on rank 0 needs F0 on rank 0, which is in no order"):
        simulate(reorder(gpipe(2, 1), 0, "B0"))
