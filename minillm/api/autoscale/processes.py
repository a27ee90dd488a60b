"""A fleet of real processes: `python -m minillm serve`, added to a router when ready and drained before they end.

    want ──▶ too few: from the pool, else start ──▶ /ready ──▶ pool ──▶ POST /replicas
             too many: DELETE /replicas drains it ──▶ SIGTERM

Replicas that the router has from elsewhere count, and are left alone. The processes end with this one, however it ends.
"""

import asyncio
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample as Metric

from minillm.api.autoscale.policies import Sample
from minillm.api.router.processes import Processes, ReplicaProcess

POLL_S = 0.1  # between the checks of a replica that starts
DRAIN_S = 30.0
TIMEOUT_S = 10.0  # of a question to router or replica


@dataclass(frozen=True)
class StartTime:
    """Seconds from when a process was asked for until it was ready, and of each phase, as its own /metrics say."""

    url: str
    seconds: float
    phases: dict[str, float]


class ProcessFleet:
    """router: its URL. pool: replicas that are ready and get no requests. key: of an operator, where the router has
    keys; replica_key: with which replicas show their metrics. starts: what each start took."""

    def __init__(
        self,
        router: str,
        processes: Processes,
        *,
        pool: int = 0,
        key: str | None = None,
        replica_key: str | None = None,
    ):
        self.router, self.processes, self.pool_size = router.rstrip("/"), processes, pool
        self._headers, self._replica_headers = _bearer(key), _bearer(replica_key)
        self.starts: list[StartTime] = []
        self.failure: str | None = None
        self._want, self._starting = 0, 0
        self._serving: list[ReplicaProcess] = []
        self._pool: deque[ReplicaProcess] = deque()
        self._leaving: set[asyncio.Task] = set()  # whatever has to end before this does
        self._being_started: set[asyncio.Task] = set()  # of these, what need not be waited for
        self._answered: tuple[float, float] | None = None  # (time, requests that had come)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="minillm fleet", daemon=True)
        self._thread.start()
        self._client, self._balancing = self._run(self._open())

    def observe(self) -> Sample:
        """RuntimeError if the router does not answer, or no replica will ever start."""
        if self.failure is not None:
            raise RuntimeError(self.failure)
        return self._run(self._observe())

    def resize(self, count: int) -> None:
        self._run(self._resize(count))

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        """Drains and ends what was started here."""
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self):
        return httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False), asyncio.Lock()

    async def _observe(self) -> Sample:
        now = time.monotonic()
        replicas = await self._replicas()
        came = await self._metric(self.router, "minillm_router_requests_total", self._headers)
        came += sum(each["outstanding"] for each in replicas)
        before, self._answered = self._answered, (now, came)
        rate = max(0.0, (came - before[1]) / (now - before[0])) if before and now > before[0] else 0.0
        ready = [each for each in replicas if each["state"] == "ready"]
        queues = [await self._metric(each["url"], "minillm_waiting_requests", self._replica_headers) for each in ready]
        waiting, open_now = int(sum(queues)), sum(each["outstanding"] for each in replicas)
        starting = sum(each["state"] == "starting" for each in replicas) + max(0, self._want - len(self._serving))
        return Sample(now, rate, waiting, max(0, open_now - waiting), len(ready), starting)

    async def _replicas(self) -> list[dict]:
        try:
            answer = await self._client.get(f"{self.router}/replicas", headers=self._headers)
            answer.raise_for_status()
            return answer.json()
        except httpx.HTTPError as error:
            raise RuntimeError(f"the router {self.router} does not answer ({error or type(error).__name__})") from None

    async def _metric(self, url: str, name: str, headers: dict[str, str]) -> float:
        return sum(each.value for each in await self._samples(url, name, headers))

    async def _samples(self, url: str, name: str, headers: dict[str, str]) -> list[Metric]:
        """Of a metric; none where it cannot be had: a replica may be on its way out, or no server of minillm's."""
        with suppress(httpx.HTTPError, ValueError):
            answer = await self._client.get(f"{url}/metrics", headers=headers)
            families = text_string_to_metric_families(answer.text) if answer.status_code == 200 else ()
            return [each for family in families for each in family.samples if each.name == name]
        return []

    async def _resize(self, count: int) -> None:
        own = {each.url for each in self._serving}
        others = sum(
            each["url"] not in own and each["state"] not in ("draining", "ejected") for each in await self._replicas()
        )
        self._want = max(0, count - others)
        await self._balance()

    async def _balance(self) -> None:
        async with self._balancing:
            await self._drop_dead()
            while len(self._serving) < self._want and self._pool and self.failure is None:
                await self._hand_over(self._pool.popleft())
            while len(self._serving) > self._want:
                self._spawn(self._retire(self._serving.pop()))
            while len(self._pool) > self.pool_size:
                self._spawn(self.processes.stop(self._pool.pop()))
            missing = self._want + self.pool_size - len(self._serving) - len(self._pool) - self._starting
            for _ in range(missing):
                self._starting += 1
                task = self._spawn(self._start())
                self._being_started.add(task)
                task.add_done_callback(self._being_started.discard)

    async def _drop_dead(self) -> None:
        """Forgets replicas whose process has ended, here and at the router."""
        for process in [each for each in self._serving if each.process.returncode is not None]:
            self._serving.remove(process)
            await self._withdraw(process.url, 0.0)
        for process in [each for each in self._pool if each.process.returncode is not None]:
            self._pool.remove(process)

    async def _hand_over(self, process: ReplicaProcess) -> None:
        """Tells the router of a replica that is ready; one that it does not take ends."""
        try:
            answer = await self._client.post(
                f"{self.router}/replicas", json={"url": process.url}, headers=self._headers
            )
            refusal = "" if answer.status_code == 201 else f"status {answer.status_code}"
        except httpx.HTTPError as error:
            refusal = str(error) or type(error).__name__
        if not refusal:
            self._serving.append(process)
            return
        self.failure = f"the router {self.router} takes no replica ({refusal})"
        await self._retire(process)  # it may have it, if only its answer was lost

    async def _start(self) -> None:
        try:
            process = await self.processes.start()
        except (ValueError, RuntimeError, OSError) as error:
            self.failure, self._starting = f"no replica starts: {error}", self._starting - 1
            return
        try:
            while not await self._is_ready(process.url):
                if process.process.returncode is not None:
                    self.failure = f"no replica starts: {process.url} ended with status {process.process.returncode}"
                    return
                await asyncio.sleep(POLL_S)
            seconds = time.monotonic() - process.started
            phases = await self._samples(process.url, "minillm_start_seconds", self._replica_headers)
            split = {each.labels["phase"]: each.value for each in phases}
            self.starts.append(StartTime(process.url, seconds, split))
            self._pool.append(process)
        except BaseException:
            await self.processes.stop(process)
            raise
        finally:
            self._starting -= 1
        await self._balance()

    async def _is_ready(self, url: str) -> bool:
        with suppress(httpx.HTTPError):
            return (await self._client.get(f"{url}/ready")).status_code == 200
        return False

    async def _retire(self, process: ReplicaProcess) -> None:
        try:
            await self._withdraw(process.url, DRAIN_S)
        finally:
            await self.processes.stop(process)

    async def _withdraw(self, url: str, wait_s: float) -> None:
        question = {"url": url, "wait_s": wait_s}
        with suppress(httpx.HTTPError):
            await self._client.delete(
                f"{self.router}/replicas", params=question, headers=self._headers, timeout=wait_s + TIMEOUT_S
            )

    def _spawn(self, work) -> asyncio.Task:
        task = asyncio.ensure_future(work)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return task

    async def _close(self) -> None:
        self._want = self.pool_size = 0
        for task in self._being_started:
            task.cancel()
        await self._balance()
        while self._leaving:
            await asyncio.gather(*self._leaving, return_exceptions=True)
        await self._client.aclose()


def _bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}
