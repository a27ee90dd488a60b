"""Loading the next batches while the current one is computed, in the order they are due.

    depth 2, 1 worker     worker    | make 0 | make 1 | make 2 |        | make 3 | ...
                          consumer  | (wait) | step 0    | step 1    | step 2    | ...

A step then costs max(load / workers, compute) instead of load + compute; `waited_s` and `worked_s` say which of the
two it was. Workers are threads: they overlap with whatever releases Python's lock (torch kernels, disk, numpy copies,
`tokenizers`), which is all a token dataset does. Heavy pure-Python preprocessing would want processes.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Iterates `make(0), make(1), ...` (`total` of them, else for ever), up to `depth` made ahead by `workers` threads.

    The order does not depend on `workers`; 0 makes each on demand. An exception in `make` is raised where its item was
    due, and ends the iteration. Use as a context manager, or `close()`; `make` must not depend on the calls before.
    """

    def __init__(
        self,
        make: Callable[[int], T],
        total: int | None = None,
        workers: int = 1,
        depth: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ):
        if workers < 0:
            raise ValueError(f"workers {workers} must not be negative: 0 loads on demand")
        if workers and depth < workers:
            raise ValueError(f"depth {depth} leaves some of {workers} workers idle: use at least {workers}")
        self._make, self._clock = make, clock
        self._due = count() if total is None else iter(range(total))
        self._pending: deque[Future[tuple[T, float]]] = deque()
        self._pool = ThreadPoolExecutor(workers, "minillm-prefetch") if workers else None
        self.items = 0
        self.waited_s = 0.0  # the consumer, for an item to be ready
        self.worked_s = 0.0  # all workers, making the items handed out so far
        self._submit(depth)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        began = self._clock()
        try:
            if self._pool is None:
                item, seconds = self._timed(next(self._due))
            elif self._pending:
                item, seconds = self._pending.popleft().result()
                self._submit(1)
            else:
                raise StopIteration
        except BaseException:
            self.close()
            raise
        self.waited_s += self._clock() - began
        self.worked_s += seconds
        self.items += 1
        return item

    def close(self) -> None:
        """Drops what was made ahead and waits for the threads to end. Harmless when called twice."""
        self._due = iter(())
        self._pending.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Prefetcher[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, items: int) -> None:
        if self._pool is not None:
            self._pending.extend(self._pool.submit(self._timed, index) for index in islice(self._due, items))

    def _timed(self, index: int) -> tuple[T, float]:
        began = self._clock()
        item = self._make(index)
        return item, self._clock() - began
