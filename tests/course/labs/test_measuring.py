"""What the labs measure on ranks: the slowest of them counts for time, the quietest run for bytes on the wire."""

import contextlib
import time
from types import SimpleNamespace

import pytest

from course.shared import measuring


class TwoRanks:
    """A group whose other rank takes a second longer. calls: in which order the ranks met and worked."""

    world_size = 2

    def __init__(self):
        self.calls = []

    def barrier(self):
        self.calls.append("barrier")

    def gather_objects(self, value):
        self.calls.append("gather")
        return [value, value + 1.0]

    def work(self):
        self.calls.append("work")


def test_time_is_the_slowest_ranks_from_when_all_begin(monkeypatch):
    group, now = TwoRanks(), iter((10.0, 10.5))
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    seconds, led = measuring.timed(group, group.work)
    assert seconds == pytest.approx(1.5) and led.bytes() == 0
    assert group.calls == ["barrier", "work", "gather"]


def test_the_run_that_others_disturbed_least_counts_per_rank(monkeypatch):
    group, seen = TwoRanks(), iter((100, 40, 70))
    wire = contextlib.contextmanager(lambda: iter([SimpleNamespace(sent=next(seen))]))
    monkeypatch.setattr(measuring.measure, "wire", wire)
    assert measuring.on_the_wire(group, group.work) == 20
    assert group.calls == ["barrier", "barrier", "work", "barrier"] * 3
