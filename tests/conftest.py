"""What all tests share: one thread, and a loopback interface that is quiet for those that count what crosses it."""

import fcntl
import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # on tiny tensors many times faster than several that contend for the cores


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Where tests run side by side (pytest -n 2), one marked `wire` waits for the others and they wait for it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    folder = Path(item.config.rootpath, ".pytest_cache")
    folder.mkdir(exist_ok=True)
    with (folder / "loopback.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if item.get_closest_marker("wire") else fcntl.LOCK_SH)
        return (yield)
