"""How many spawned replicas there are: started until the number fits, replaced when they die, drained before they end.

want(n) ──▶ too few: start ──▶ fleet ──▶ ready
            too many: the one with the fewest open requests is drained, then gets SIGTERM
restart ──▶ one by one: a new one is ready, then the old one is drained and ends
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from minillm.api.router.fleet import Fleet, Replica
from minillm.api.router.processes import Processes, ReplicaProcess

MOST = 256  # replicas of one machine
LONGEST_WAIT_S = 30.0  # between two starts of which the first failed
log = logging.getLogger("uvicorn.error")


class Spawned:
    """wanted: how many there shall be. drain_s: for open requests of a replica that leaves. on_failure: is told why the
    options are wrong, if they are: no replica will ever start then."""

    def __init__(
        self,
        fleet: Fleet,
        processes: Processes,
        count: int,
        *,
        drain_s: float = 30.0,
        on_failure: Callable[[str], None] = lambda why: None,
    ):
        self.fleet, self.processes, self.drain_s, self.on_failure = fleet, processes, drain_s, on_failure
        self.wanted = count
        self.running: dict[str, ReplicaProcess] = {}  # by URL
        self.retiring: set[str] = set()
        self._starting = self._failures = 0
        self._changed, self._restarting = asyncio.Event(), asyncio.Lock()
        self._tasks: set[asyncio.Task] = set()

    def begin(self) -> None:
        self.want(self.wanted)
        self._spawn_task(self._keep())

    def want(self, count: int) -> None:
        """Starts or ends what is needed, while requests go on."""
        if not 0 <= count <= MOST:
            raise ValueError(f"{count} replicas cannot be spawned: use 0 to {MOST}")
        self.wanted = count
        self._changed.set()

    async def resize(self, count: int) -> None:
        """`want`, and waits until so many are ready and no others are left."""
        self.want(count)
        while len(self._ready()) != count or len(self.running) != count:
            await asyncio.sleep(0.05)

    async def restart(self) -> int:
        """Replaces each that runs now; returns how many. RuntimeError if a new one does not start."""
        async with self._restarting:
            old = list(self.running.values())
            try:
                for each in old:
                    new = await self._start()
                    while new.state != "ready":
                        if new.url not in self.running:
                            raise RuntimeError(f"the new replica {new.url} ended before it was ready: others go on")
                        await asyncio.sleep(0.05)
                    if each.url in self.running:
                        await self._retire(each)
            finally:
                self._changed.set()  # for what died or was asked for meanwhile
            return len(old)

    async def close(self) -> None:
        """Ends all of them. They had their time to drain: the router has closed its connections before."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self.processes.stop(each) for each in self.running.values()))
        self.running.clear()

    async def _keep(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._restarting.locked():  # there is one more meanwhile
                self._spawn_task(self._again())
                continue
            for _ in range(self.wanted - len(self.running) - self._starting):
                self._starting += 1
                self._spawn_task(self._try_start())
            order = sorted(self.running.values(), key=lambda each: self.fleet.of(each.url).outstanding)
            for each in order[: max(0, len(self.running) - self.wanted)]:
                self._spawn_task(self._retire(each))
                await asyncio.sleep(0)  # it takes itself out of `running` first

    async def _again(self) -> None:
        async with self._restarting:
            self._changed.set()

    async def _try_start(self) -> None:
        try:
            if self._failures:
                await asyncio.sleep(min(LONGEST_WAIT_S, 0.5 * 2 ** min(self._failures, 9)))
            await self._start()
        except ValueError as error:
            self.on_failure(str(error))
        except (RuntimeError, OSError) as error:
            self._failures += 1
            log.error("%s", error)
            self._changed.set()
        finally:
            self._starting -= 1

    async def _start(self) -> Replica:
        process = await self.processes.start()
        self.running[process.url] = process
        self._spawn_task(self._notice_end(process))
        return self.fleet.add(process.url)

    async def _notice_end(self, process: ReplicaProcess) -> None:
        status = await process.process.wait()
        if self.running.get(process.url) is not process:
            return  # it was retired
        del self.running[process.url]
        was_ready = self.fleet.of(process.url).health.seen
        self.fleet.remove(process.url)
        if status == 2 and not was_ready and not self._ready():  # it has refused its options, and so will the next one
            self.on_failure(process.log[-1] if process.log else "a replica refuses its options")
            return
        self._failures = 0 if was_ready else self._failures + 1
        log.error("the replica %s ended with status %s: another one starts", process.url, status)
        self._changed.set()

    async def _retire(self, process: ReplicaProcess) -> None:
        self.running.pop(process.url, None)
        self.retiring.add(process.url)
        try:
            await self.fleet.drain(process.url, self.drain_s)
        finally:
            self.retiring.discard(process.url)
            self.fleet.remove(process.url)
            await self.processes.stop(process)

    def _ready(self) -> list[str]:
        return [url for url in self.running if self.fleet.replicas[url].state == "ready"]

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
