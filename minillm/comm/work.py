"""What `async_op=True` returns."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from minillm.measure.ledger import Event


class Work:
    """Something under way. `wait()` returns its result; `done()` says whether waiting would return at once.

    events: the ledger's entries that the time spent in `wait` counts for.
    """

    def __init__(
        self, wait: Callable[[], Any], done: Callable[[], bool] = lambda: True, events: Sequence[Event] = ()
    ) -> None:
        self._wait, self._done, self._events = wait, done, events
        self._result: Any = None
        self._waited = False

    def done(self) -> bool:
        return self._waited or self._done()

    def wait(self) -> Any:
        if not self._waited:
            start = time.monotonic()
            self._result = self._wait()
            self._waited = True
            for event in self._events:
                event.waited += time.monotonic() - start
        return self._result
