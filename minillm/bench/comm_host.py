"""The host's own part of a collective: what Python costs before a GPU has anything to do.

torch's fake process group carries out nothing and answers at once, so what is timed is what the host adds to a launch:
here the announcement on the flight recorder, the comparison with the other ranks and the handle. Both sides call the
same process group in one process. A training step of a large model launches hundreds of collectives (8 for each layer
under tensor parallelism), and the GPU idles where the host is the slower of the two.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from minillm.bench.harness import BenchRow, bench_row, seconds_per_call, side_by_side
from minillm.comm import Group
from minillm.comm.backends.native import all_gather_single, reduce_scatter_single
from minillm.comm.diagnostics.flight_recorder import FlightRecorder
from minillm.comm.world import World

ELEMENTS = 4096  # their number does not matter: nothing is moved
CALLS = 200  # in a row, for the clock
TORCH = "torch's own call, fake process group"


@dataclass(frozen=True)
class HostCall:
    """One operation, through `Group` and as torch's own call."""

    name: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]


def rows(world_size: int, repeats: int) -> list[BenchRow]:
    """For every operation of a group of world_size ranks: its Python calls, and microseconds of this thread."""
    found = []
    with fake_group(world_size) as group:
        for call in host_calls(group):
            name = f"host: {call.name}, {world_size} ranks, {python_calls(call.ours)} Python calls"
            peer = f"{TORCH}, {python_calls(call.theirs)} Python calls"
            samples = (seconds_per_call(each, CALLS, clock=time.thread_time) for each in (call.ours, call.theirs))
            found.append(bench_row(name, peer, side_by_side(lambda: True, *samples, repeats=repeats), "us", scale=1e6))
    return found


@contextmanager
def fake_group(world_size: int, device: str = "cpu") -> Iterator[Group]:
    """Rank 0 of a group whose other ranks do not exist."""
    if dist.is_initialized():
        raise ValueError("this process has a process group already: run it in a process of its own")
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    with tempfile.NamedTemporaryFile() as file:
        recorder = FlightRecorder(file.name, range(world_size))
    world = World(0, torch.device(device), recorder, range(world_size), wait_s=30.0)
    try:
        yield Group(world, dist.group.WORLD, range(world_size), "world")
    finally:
        dist.destroy_process_group()
        world.close()
        recorder.close()


def host_calls(group: Group) -> list[HostCall]:
    """Every operation of a layer that is split over ranks."""
    n, process_group = group.world_size, group.process_group
    x = torch.ones(ELEMENTS // n * n)
    whole, part, other = torch.empty(n * x.numel()), torch.empty(x.numel() // n), torch.empty_like(x)

    def exchange() -> None:
        ops = [dist.P2POp(dist.isend, x, 1, process_group), dist.P2POp(dist.irecv, other, n - 1, process_group)]
        for handle in dist.batch_isend_irecv(ops):
            handle.wait()

    return [
        HostCall("all_reduce", lambda: group.all_reduce(x), lambda: dist.all_reduce(x, group=process_group)),
        HostCall("broadcast", lambda: group.broadcast(x), lambda: dist.broadcast(x, 0, process_group)),
        HostCall(
            "all_gather", lambda: group.all_gather(x, out=whole), lambda: all_gather_single(whole, x, process_group)
        ),
        HostCall(
            "reduce_scatter",
            lambda: group.reduce_scatter(x, out=part),
            lambda: reduce_scatter_single(part, x, group=process_group),
        ),
        HostCall(
            "all_to_all",
            lambda: group.all_to_all(x),
            lambda: dist.all_to_all_single(torch.empty_like(x), x, group=process_group),
        ),
        HostCall("exchange", lambda: group.exchange(send=(x, 1), recv=(other, n - 1)), exchange),
    ]


def python_calls(call: Callable[[], Any], inside: str = "") -> int:
    """How many Python functions one call runs, once it has run before. inside: only those of files with this in their
    path."""
    call()
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and inside in frame.f_code.co_filename

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count - 1 if not inside else count  # without the caller's own lambda
