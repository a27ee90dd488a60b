"""What the scheduler costs the host: Python calls for each sequence of a step, counted. Most sequences decode, and for
those there is nothing to do: no block is filled, given back or needed."""

from minillm.bench.comm_host import python_calls
from minillm.bench.scheduler import ANSWER, Steady

BEFORE = 20  # when each token looked for drafts and for blocks before a window that were not there
MOST = 5.5


def test_python_calls_for_each_sequence_of_a_step():
    steady = Steady(64)
    calls = python_calls(lambda: [steady.step() for _ in range(ANSWER)], inside="minillm/serve/schedule")
    assert calls / (64 * ANSWER) <= MOST
