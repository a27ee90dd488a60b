"""The ledger: what lands in which ledger, and that it travels."""

import pickle
import threading
import time

import pytest
import torch

from minillm.comm import launch
from minillm.measure import Event, Ledger, Span, ledger, span


def event(op: str = "all_reduce", group: str = "world", num_bytes: int = 8, messages: int = 2) -> Event:
    return Event(op, group, num_bytes, messages, (2,), "float32", 1.0, 2.0, waited=0.5)


def test_sums_and_selections() -> None:
    led = Ledger([event(), event(group="tp"), event("send", num_bytes=100, messages=1)])
    assert led.bytes() == 116 and led.messages == 5 and led.waited == 1.5
    assert led.bytes("all_reduce") == 16 and led.bytes(group="tp") == 8 and led.bytes("send", "tp") == 0
    assert led.calls == {"all_reduce": 2, "send": 1} and led.calls["broadcast"] == 0
    assert [e.group for e in led.select("all_reduce")] == ["world", "tp"]


def test_spans_go_to_every_open_ledger_and_to_no_closed_one() -> None:
    with ledger() as outer:
        with span("before", "input"):
            pass
        with ledger() as inner, span("inside"):
            time.sleep(0.002)
        with span("after", kind="optimizer"):
            pass
    with span("too late"):
        pass
    assert [s.name for s in outer.spans] == ["before", "inside", "after"]
    assert [s.name for s in inner.spans] == ["inside"]
    assert inner.spans[0].kind == "compute" and inner.spans[0].seconds >= 0.002
    assert outer.spans[2].kind == "optimizer"


def test_a_span_and_a_ledger_end_with_an_error() -> None:
    with pytest.raises(KeyError), ledger() as led, span("fails"):
        raise KeyError
    assert [s.name for s in led.spans] == ["fails"]
    with span("later"):
        pass
    assert len(led.spans) == 1


def test_equal_ledgers_are_not_mixed_up() -> None:
    """Two empty ledgers are equal; closing one must not close the other."""
    with ledger() as outer:
        with ledger() as inner:
            assert outer == inner and outer is not inner
        with span("x"):
            pass
    assert len(outer.spans) == 1 and not inner.spans


def test_threads_write_into_the_same_ledger() -> None:
    def work() -> None:
        for _ in range(200):
            with span("work"):
                pass

    with ledger() as led:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(led.spans) == 1600


def test_pickling() -> None:
    led = Ledger([event()], [Span("forward", "compute", 1.0, 3.0)])
    again = pickle.loads(pickle.dumps(led))
    assert again == led and again.bytes() == 8 and again.spans[0].seconds == 2.0


def program(group):
    """Blocking, asynchronous, inside one another, and half outside a ledger."""
    x, pair = torch.ones(1000), group.subgroup([0, 1], "pair")
    before = group.all_reduce(x.clone(), async_op=True)
    with ledger() as led:
        before.wait()  # was started outside
        group.all_reduce(x)
        with ledger() as inner:
            late = pair.all_gather(x, async_op=True)
        group.barrier()
        late.wait()
        group.run("mine", x, lambda: group.all_reduce(group.broadcast(x)))
        after = group.broadcast(x, root=1, async_op=True)
    after.wait()
    start = time.monotonic()
    group.barrier()
    return led, inner, start


def test_what_ranks_record() -> None:
    for rank, (led, inner, end) in enumerate(launch(program, 2)):
        assert led.calls == {"all_reduce": 1, "all_gather": 1, "barrier": 1, "mine": 1, "broadcast": 1}
        assert inner.calls == {"all_gather": 1}
        assert led.bytes("all_reduce") == 4000 and led.messages == 2 + 1 + (2 + (rank == 0)) + (rank == 1)
        assert led.bytes(group="pair") == inner.bytes() == 4000  # counted though it ended after the inner ledger
        assert led.bytes("mine") == 4000 + 4000 * (rank == 0) and led.bytes("barrier") == 0
        assert led.bytes("broadcast") == 4000 * (rank == 1)  # waited for after the ledger was closed
        for e in led.events:
            assert 0 < e.start <= e.end <= end and 0 <= e.waited <= end - e.start + 1
            assert e.dtype == "float32" and not e.emulated and e.shape in ((1000,), (0,))


def slow_partner(group):
    """Rank 1 comes 0.3 s after rank 0 has begun. Seconds that it waited for the first operation, and for the second
    after one wait and after two."""
    if group.rank == 1:
        while not (posted := group.world.recorder.posted(0)) or posted[-1].op != "all_reduce":
            time.sleep(0.01)
        time.sleep(0.3)
    with ledger() as led:
        group.all_reduce(torch.ones(1))
        handle = group.all_reduce(torch.ones(1), async_op=True)
        handle.wait()
        once = led.events[1].waited
        handle.wait()
    return led.events[0].waited, once, led.events[1].waited


def test_waiting_is_counted_where_it_happens() -> None:
    early, late = launch(slow_partner, 2)
    assert early[0] >= 0.299
    assert 0 < early[1] == early[2] and 0 < late[1] == late[2]
