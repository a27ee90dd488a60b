"""An event loop whose clock jumps to the next timer instead of waiting: an hour of `asyncio.sleep` in no time.

    calls = run_virtual(open_loop(arrivals, stub))      # exact to the float, the same on every machine

For programs without sockets or threads: nothing outside the loop may be waited for.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


def run_virtual(program: Coroutine) -> Any:
    """The coroutine's result. RuntimeError if it waits for something that no timer will bring."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(program)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only when nothing is left to do at this time, and then at once."""

    def __init__(self):
        self.now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now


class _Jumping(selectors.SelectSelector):
    """The loop asks it to wait until the next timer is due."""

    def __init__(self, loop: VirtualLoop):
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> list:
        if timeout is None:
            raise RuntimeError("nothing is due in virtual time: the program waits for something outside of it.")
        self.loop.now += max(0.0, timeout)
        return super().select(0)
