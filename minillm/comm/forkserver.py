"""The process that ranks are forked from: it has loaded torch once, but not minillm, so that edits are seen."""

import functools
import multiprocessing
import signal
import threading
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

    Only this moment is deaf here too; loading torch takes seconds, but `start` of the first rank waits for that.
    """
    if start_context().get_start_method() != "forkserver":
        return
    if threading.current_thread() is not threading.main_thread():  # which alone may set what a signal does
        ensure_running()
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ensure_running()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
