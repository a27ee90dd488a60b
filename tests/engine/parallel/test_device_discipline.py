"""A step of each form on a device that is not the CPU: nothing is on the wrong device, and the host reads no value."""

import subprocess
import sys

import pytest

PROGRAM = "tests.engine.parallel.device_program"
TWO = [
    *(f"dp=2, zero={zero}, accumulate={number}" for zero in (0, 1, 2, 3) for number in (1, 2)),
    "tp=2",
    "tp=2, sequence=True",
    *(f"cp=2, pad=True, context='{name}'" for name in ("ring", "zigzag", "ulysses", "gather")),
    *(f"pp=2, accumulate=4, schedule='{name}'" for name in ("gpipe", "1f1b", "interleaved", "zero_bubble_v")),
]
FOUR = [
    *(f"dp=2, tp=2, sequence=True, zero={zero}" for zero in (0, 1, 2, 3)),
    *(f"dp=2, pp=2, accumulate=2, zero={zero}" for zero in (0, 1, 2, 3)),
    "tp=2, pp=2, accumulate=2, schedule='dualpipe'",
    "dp=4, dp_replicate=2, zero=3",
    "dp=4, dp_replicate=2, zero=2",
]


def run(fault: str, layouts: list[str]) -> subprocess.CompletedProcess:
    """In a process of its own: a device can be registered once, and torch keeps it."""
    command = [sys.executable, "-m", PROGRAM, fault, *layouts]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.full
@pytest.mark.parametrize("layouts", [TWO, FOUR], ids=["2 ranks", "4 ranks"])
def test_a_step_stays_on_its_device_and_reads_nothing(layouts):
    done = run("none", layouts)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == len(layouts) and all(line.endswith(": gpu") for line in lines)


@pytest.mark.full
@pytest.mark.parametrize(("fault", "name"), [("mix", "FakeTensorDeviceMismatchError"), ("read", "DataDependent")])
def test_a_planted_fault_is_found(fault, name):
    assert name in run(fault, ["dp=2"]).stderr
