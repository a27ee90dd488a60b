"""Memory that collectives keep for partial sums: used again by the stream that used it, and by no other."""

import pytest
import torch

from minillm.comm import operands
from minillm.comm.operands import Scratch


@pytest.fixture
def current(monkeypatch):
    """current["stream"]: the number of the current stream, as on a GPU."""
    found = {"stream": 0}
    monkeypatch.setattr(operands, "stream_of", lambda x: found["stream"])
    return found


def test_memory_is_used_again():
    scratch, x = Scratch(), torch.ones(10)
    first = scratch.take(x)
    scratch.give([first])
    assert scratch.take(x) is first and scratch.take(x) is not first


def test_what_a_side_stream_may_still_use_is_not_given_to_another(current):
    """The host gives it back when it has queued the last addition, of which the device may not even have begun."""
    scratch, x = Scratch(), torch.ones(10)
    current["stream"] = 7
    of_side = scratch.take(x)
    scratch.give([of_side])
    current["stream"] = 0
    of_compute = scratch.take(x)
    assert of_compute is not of_side
    scratch.give([of_compute])
    assert scratch.take(x) is of_compute
    current["stream"] = 7
    assert scratch.take(x) is of_side
