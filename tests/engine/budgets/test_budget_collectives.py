"""What a collective costs the host: Python calls, counted, on torch's fake process group.

`before` is what the operation took when every part of the recorder's entry had a function of its own; `most` is what it
may take now, and only ever less. In microseconds: `python -m minillm bench comm --host` (target: 15 beside torch's 5).
"""

import pytest

from minillm.bench.comm_host import fake_group, host_calls, python_calls
from minillm.measure import ledger

BEFORE = {"all_reduce": 49, "broadcast": 49, "all_gather": 51, "reduce_scatter": 52, "all_to_all": 55, "exchange": 73}
MOST = {"all_reduce": 22, "broadcast": 22, "all_gather": 23, "reduce_scatter": 25, "all_to_all": 24, "exchange": 38}


@pytest.fixture(params=[2, 8])
def calls(request):
    with fake_group(request.param) as group:
        yield {call.name: call.ours for call in host_calls(group)}


@pytest.mark.parametrize("name", MOST)
def test_python_calls_of_an_operation(calls, name):
    found = python_calls(calls[name], inside="minillm/comm") + python_calls(calls[name], inside="minillm/measure")
    assert found <= MOST[name] <= BEFORE[name]


def test_an_operation_costs_no_more_among_more_ranks():
    found = []
    for world_size in (2, 8):
        with fake_group(world_size) as group:
            found.append({call.name: python_calls(call.ours, inside="minillm") for call in host_calls(group)})
    assert found[0] == found[1]


@pytest.mark.parametrize("name", MOST)
def test_without_a_ledger_nothing_is_recorded(calls, name):
    """One look at whether a ledger is open is all that is left of it."""
    assert python_calls(calls[name], inside="minillm/measure") == 1
    with ledger() as led:
        calls[name]()
    assert len(led.events) == 1
