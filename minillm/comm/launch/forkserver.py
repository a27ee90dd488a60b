"""The process that ranks are forked from: it has loaded torch once, but not minillm, so that edits are seen."""

import functools
import multiprocessing
import signal
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext
from multiprocessing.forkserver import ensure_running

# torch._dynamo, because making any torch.optim optimizer loads it: seconds, once per rank.
PRELOAD = ["torch", "torch._dynamo", "torch.distributed", "numpy", "cloudpickle", "psutil"]


@functools.cache
def start_context() -> BaseContext:
    """How ranks are started: from a fork server, or by `spawn` where there is none."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    multiprocessing.set_forkserver_preload(PRELOAD)
    return multiprocessing.get_context("forkserver")


def start_server() -> None:
    """Start the fork server, if it does not run, deaf to Ctrl-C as all that it forks: no traceback of its imports.

    It inherits that SIGINT is blocked. Here it is so for a moment only, and a Ctrl-C then is late, not lost.
    """
    if start_context().get_start_method() != "forkserver":
        return
    resource_tracker.ensure_running()  # which the server's start does too, and which unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
