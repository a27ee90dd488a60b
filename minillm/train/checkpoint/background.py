"""What is done while training goes on: one thing after another, in a thread of its own."""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue


class Background:
    """A thread that stays for the next save: to start one costs training a switch to it. It ends with its owner."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], None], threading.Event] | None] = SimpleQueue()
        threading.Thread(target=_work_off, args=[self._queue], name="checkpoint", daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def begin(self, write: Callable[[], None]) -> threading.Event:
        """Set when `write` is over."""
        done = threading.Event()
        self._queue.put((write, done))
        return done


def _work_off(queue: SimpleQueue) -> None:
    while job := queue.get():
        write, done = job
        try:
            write()
        finally:
            done.set()
        del job, write, done  # and with them the pieces
