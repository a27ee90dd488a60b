"""What all tests share: one thread, ranks that start fast, and a loopback interface that is quiet for those that count
what crosses it. No example of hypothesis is timed: a busy machine fails no test."""

import contextlib
import fcntl
import multiprocessing
import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from minillm.comm.launch import forkserver

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
torch.set_num_threads(1)  # on tiny tensors many times faster than several that contend for the cores


def _start_loaded(start=forkserver.ensure_running):
    """The server that ranks are forked from also loads what these tests have loaded, which nobody edits meanwhile."""
    ours = [name for name in sys.modules if name.partition(".")[0] in ("minillm", "course")]
    multiprocessing.set_forkserver_preload([*forkserver.PRELOAD, "pytest", "hypothesis", *ours])
    with contextlib.chdir(Path(__file__).parents[1]):  # where it finds them
        start()


forkserver.ensure_running = _start_loaded


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
