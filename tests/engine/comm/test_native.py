"""The backend that calls torch's own operations: what it records, and when. On a GPU the same with device times."""

import itertools
import math
import time
import types
import weakref

import pytest
import torch
import torch.distributed as dist

from minillm.comm import HangError, launch, ring_all_reduce
from minillm.comm.backends import native
from minillm.comm.diagnostics.hang_report import hang_report
from minillm.comm.launch.launcher import _check
from minillm.comm.operation import Current, Operation
from minillm.measure import Ledger, clock, ledger, span
from minillm.measure.ledger import DeviceTimes, Event
from tests.engine.comm.nccl_like import on_nccl_like


def receipts(group):
    """Values, calls and bytes of everything a group can do."""
    r, n = group.rank, group.world_size
    splits = [1 + (r + j) % 2 for j in range(n)]  # rows to rank j, and as many from it
    with ledger() as led:
        found = [
            group.all_reduce(torch.arange(4.0) + r, "avg"),
            group.all_reduce(torch.arange(6.0).view(2, 3).t() + r, "max"),
            group.broadcast(torch.tensor([r]), root=1),
            group.all_gather(torch.tensor(r)),
            group.all_gather(torch.tensor([r]), out=torch.empty(n, dtype=torch.int64), async_op=True).wait(),
            group.reduce_scatter(torch.arange(2.0 * n) + r),
            group.all_to_all(torch.arange(2 * n) + 10 * r),
            group.all_to_all(torch.full((sum(splits), 2), r), output_splits=splits, input_splits=splits),
            ring_all_reduce(torch.ones(5), group, async_op=True).wait(),
        ]
        arrived = torch.empty(2)
        group.exchange((torch.full((2,), float(r)), (r + 1) % n), (arrived, (r - 1) % n))
    return [x.tolist() for x in (*found, arrived)], led.calls, {op: led.bytes(op) for op in led.calls}


@pytest.mark.parametrize("world_size", [2, 3])
def test_both_backends_do_and_count_the_same(world_size: int) -> None:
    ours, theirs = launch(receipts, world_size), launch(on_nccl_like(receipts), world_size)
    for (values, calls, sent), (others, other_calls, other_sent) in zip(ours, theirs, strict=True):
        assert values == others and calls == other_calls
        for op in calls:  # what the ring formula says differs from what was counted by rounding and by the tree's root
            assert op == "broadcast" or abs(sent[op] - other_sent[op]) <= 24, op


def uneven(group):
    """Tokens for experts: rank r sends r + j rows to rank j."""
    r, n = group.rank, group.world_size
    to, come = [r + j for j in range(n)], [i + r for i in range(n)]
    x = torch.arange(float(3 * sum(to))).view(-1, 3) + 100 * r
    expected = x.new_empty(sum(come), 3)
    dist.all_to_all_single(expected, x, come, to, group.process_group)
    with ledger() as led:
        found = group.all_to_all(x, output_splits=come, input_splits=to)
    return torch.equal(found, expected), led.bytes() == 12 * (sum(to) - to[r])


def test_all_to_all_with_splits_as_torch_does_it() -> None:
    assert launch(uneven, 3) == [(True, True)] * 3


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (([1, 1], [1, 1]), r"input_splits \[1, 1\] make 2 rows, but x has 4"),
        (([1], [2, 2]), r"output_splits \[1\] must be the rows, 0 or more, of each of 2 ranks"),
        (([1, 1], [5, -1]), r"input_splits \[5, -1\] must be"),
    ],
)
def test_splits_that_do_not_fit(splits, message) -> None:
    def program(group):
        with pytest.raises(ValueError, match=message):
            group.all_to_all(torch.ones(4), output_splits=splits[0], input_splits=splits[1])

    launch(program, 2)


def seen_in_flight(group):
    """What the flight recorder says of a rank that has launched an all-reduce and now computes."""
    recorder, rank = group.world.recorder, group.rank
    reports = []
    if rank == 0:
        work = group.all_reduce(torch.ones(3), async_op=True)
        reports = [hang_report(recorder), recorder.signs(0)[1], work.done()]
        dist.barrier()  # of torch: nobody writes it down
    else:
        dist.barrier()
        work = group.all_reduce(torch.ones(3), async_op=True)
    work.wait()
    (posted,) = [posted for posted in recorder.posted(rank) if posted.op == "all_reduce"]
    return reports, posted.waiting


def test_a_launched_operation_stays_announced_until_it_is_seen_to_be_done() -> None:
    ((report, wait, done), waiting), (_, other) = launch(on_nccl_like(seen_in_flight), 2)
    row = report.splitlines()[2]
    assert "all_reduce (launched)" in row and row.endswith("rank 1")
    assert wait is None  # a rank that computes meanwhile does not hang
    assert not done and not waiting and not other


def stuck(group):
    if group.rank == 0:
        group.all_reduce(torch.ones(3), async_op=True).wait()
    while True:
        time.sleep(0.01)


def test_a_hang_shows_the_rank_that_waits_for_a_launched_operation() -> None:
    with pytest.raises(HangError) as caught:
        launch(on_nccl_like(stuck), 2, timeout=3)
    first, second = caught.value.table.splitlines()[2:]
    assert "all_reduce (launched)" in first and first.endswith("rank 1") and "in no operation" in second


def body_with_a_work(group):
    """A body that ends with an operation that it has only launched, as a hook of DDP may."""
    x = torch.full((3,), 1.0 + group.rank)
    work = group.run("mine", x, lambda: group.all_reduce(x.mul_(2), async_op=True), async_op=True)
    first = work.wait().tolist(), work.wait() is x, work.done()
    return first, group.run("mine", x, lambda: group.all_reduce(x, async_op=True)).tolist()


def test_a_body_may_return_a_work() -> None:
    expected = [(([6.0] * 3, True, True), [12.0] * 3)] * 2
    assert launch(body_with_a_work, 2) == launch(on_nccl_like(body_with_a_work), 2) == expected


class Behind:
    """A torch work whose device is never seen to be done, as on a GPU that is far behind its host."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return False


@pytest.fixture
def far_behind(monkeypatch):
    """A backend on such a device, operations for it, the sequence numbers withdrawn, and what torch got to work on."""
    used, withdrawn = [], []

    def launch(*tensors, **_):
        used.extend(weakref.ref(x) for x in tensors if isinstance(x, torch.Tensor))
        return Behind()

    monkeypatch.setattr(dist, "all_reduce", launch)
    monkeypatch.setattr(native, "reduce_scatter_single", launch)
    check = types.SimpleNamespace(announce=lambda *_: None, withdraw=lambda _, sequence: withdrawn.append(sequence))
    pg = types.SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    numbers = itertools.count(1)

    def operation(ordinal=2):
        return Operation(check, Current(), ordinal, next(numbers), b"", event=None, launches=True)

    return native.NativeBackend(pg, torch.device("cpu")), operation, withdrawn, used


def test_memory_is_let_go_of_at_the_wait_however_far_the_device_is_behind(far_behind) -> None:
    backend, operation, withdrawn, used = far_behind
    works = [backend.reduce_scatter(operation(), torch.ones(4), (2,), "sum", None, True) for _ in range(3)]
    assert len(used) == 6 and all(ref() is not None for ref in used)
    results = [work.wait() for work in works]
    assert [ref() is None for ref in used] == [False, True] * 3  # the results are the caller's
    del results, works
    assert all(ref() is None for ref in used[:-2])
    assert withdrawn == [1, 2]  # the latest one stays announced: nobody has seen it done
    backend.all_reduce(operation(), torch.ones(2, 3).t(), "sum", async_op=False)
    assert withdrawn == [1, 2] and used[-1]() is None  # the fourth took the place of the third on the recorder
    backend.all_reduce(operation(ordinal=3), torch.ones(4), "sum", async_op=False)
    assert withdrawn == [1, 2, 4]  # the fifth has another place
    backend.all_reduce(operation(), torch.ones(4), "sum", async_op=True)  # its memory stays, though its Work has gone
    assert used[-1]() is not None


@pytest.mark.parametrize("waits, is_kept", [("side", True), ("compute", False)])
def test_only_a_wait_on_the_launching_stream_lets_go_of_memory(waits, is_kept, far_behind, monkeypatch) -> None:
    backend, operation, _, used = far_behind

    def switch_to(stream: str) -> None:
        monkeypatch.setattr(backend, "current_stream", lambda: stream)

    switch_to("compute")
    work = backend.all_reduce(operation(), torch.ones(3), "sum", async_op=True)
    switch_to(waits)
    work.wait()
    del work
    switch_to("compute")
    backend.all_reduce(operation(), torch.ones(3), "sum", async_op=True)
    assert (used[0]() is not None) == is_kept


def test_a_wait_on_the_launching_stream_lets_go_after_one_elsewhere(far_behind, monkeypatch) -> None:
    """As in hybrid sharding: the second all-reduce waits for the reduce-scatter on a side stream."""
    backend, operation, _, used = far_behind
    stream = "compute"
    monkeypatch.setattr(backend, "current_stream", lambda: stream)
    work = backend.reduce_scatter(operation(), torch.ones(4), (2,), "sum", None, True)
    backend.all_reduce(operation(), torch.ones(3), "sum", async_op=True)
    flat, stream = used[1], "side"
    work.wait()
    assert flat() is not None
    stream = "compute"
    work.wait()
    assert flat() is None


class Waiting:
    """A stream that notes which streams it has waited for."""

    def __init__(self) -> None:
        self.waited_for: list[Waiting] = []

    def wait_stream(self, stream: "Waiting") -> None:
        self.waited_for.append(stream)


def test_every_stream_that_waits_is_held_up(far_behind, monkeypatch) -> None:
    """Also one that asks after another has: torch's own Work makes each of them wait."""
    backend, operation, *_ = far_behind
    compute, side, third = Waiting(), Waiting(), Waiting()
    current, waits = compute, []
    monkeypatch.setattr(backend, "current_stream", lambda: current)
    monkeypatch.setattr(Behind, "wait", lambda _: waits.append(current))
    work = backend.all_reduce(operation(), torch.ones(3), "sum", async_op=True)
    for current in (side, third, compute, side):  # noqa: B007 (the backend reads it)
        work.wait()
    assert waits == [side, third, compute]
    assert side.waited_for == [compute]  # whose wait has let go of the operation
    compute.waited_for = side.waited_for = third.waited_for = []
    current = compute
    work = backend.all_reduce(operation(), torch.ones(3), "sum", async_op=True)
    for current in (compute, third, compute):  # noqa: B007
        work.wait()
    assert third.waited_for == [compute]


class DeviceClock:
    """A CUDA that has a clock and nothing else: the host queues in no time, and the device gets there 2 s later."""

    def __init__(self) -> None:
        self.now, self.ahead, self.synchronized = time.monotonic(), 2.0, 0

    def event(self, enable_timing: bool) -> types.SimpleNamespace:
        event = types.SimpleNamespace(at=math.nan)
        event.record = lambda: setattr(event, "at", self.now + self.ahead)
        event.synchronize = lambda: setattr(self, "synchronized", self.synchronized + 1)
        event.elapsed_time = lambda later: 1e3 * (later.at - event.at)
        return event


@pytest.fixture
def device(monkeypatch):
    device = DeviceClock()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(clock, "_anchors", {})
    return device


def test_times_on_a_device_are_its_own_and_nothing_waits_before_they_are_read(device) -> None:
    with ledger() as led:
        waited = device.synchronized  # when the two clocks were paired
        with span("forward"):
            device.ahead += 5  # five seconds of work are queued in no time
        event = Event("all_reduce", "world", 8, 1, (2,), "float32", 0.0, 0.0)
        event.device = DeviceTimes(clock.moment(), clock.moment(), [(clock.moment(), clock.moment())])
        led.record(event)
    assert device.synchronized == waited
    (measured,) = led.spans
    assert measured.seconds == pytest.approx(5) and device.synchronized > waited
    assert led.events[0].end == led.events[0].start and led.events[0].waited == 0
    assert isinstance(Ledger(led.events, led.spans).spans[0].start, float)


def test_no_more_than_64_processes_are_started_here_but_torchrun_may() -> None:
    with pytest.raises(ValueError, match="nproc=65 must be a whole number from 1 to 64"):
        launch(print, 65)
    _check(print, 65, 60, None, None, most_ranks=math.inf)
