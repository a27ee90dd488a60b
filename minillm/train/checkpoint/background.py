"""A thread in which saves are written while training goes on, one after the other."""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue


class Background:
    """A thread that stays for the next save, since starting one makes training wait. It ends with its owner."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], None], threading.Event] | None] = SimpleQueue()
        threading.Thread(target=_work_off, args=[self._queue], name="checkpoint", daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def begin(self, write: Callable[[], None]) -> threading.Event:
        """Starts `write` in the thread. Returns an event that is set once it has ended."""
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
