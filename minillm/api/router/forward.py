"""A request on its way to a replica and back.

    choose ──▶ send ──▶ first event ──▶ the client gets chunks as they come ──▶ the end
       ▲         │ failed: it had no token yet, so it is sent to another replica while the budget allows
       └─────────┘                        │ broke off: the client has tokens of it and is told; nothing is sent again

Two replicas would sample different answers: a stream that has begun is never continued elsewhere. An answer that is
not streamed is kept until it is whole, and so can be asked for again up to its last byte.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass

import httpx

from minillm.api.answers import event
from minillm.api.limits import ApiError, shutting_down
from minillm.api.router.budget import RetryBudget
from minillm.api.router.fleet import Fleet, Replica
from minillm.api.router.metrics import RouterMetrics

STOPS = {"draining", "engine_failure"}  # codes of errors of a replica that ends; it is ejected
ELSEWHERE = STOPS | {"overloaded"}  # codes of errors that another replica may not have
PASSED = ("content-type", "retry-after", "cache-control")  # headers of answers
SENT = (b"content-type", b"authorization", b"accept")  # headers of requests


@dataclass(frozen=True)
class Asked:
    """A request as it came. key: what requests with a common prefix share, see `prefix.py`. id: of the request, in all
    logs and answers."""

    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    id: str
    key: bytes = b""


@dataclass(frozen=True)
class Whole:
    """An answer that is not streamed."""

    status: int
    headers: dict[str, str]
    body: bytes


class AttemptFailed(Exception):
    """Another replica may do better. outcome: see `RouterMetrics`. answer: the replica's own, if it gave one."""

    def __init__(self, outcome: str, answer: Whole | None = None):
        super().__init__(outcome)
        self.outcome, self.answer = outcome, answer


class Forwarder:
    """attempts: of a request, at most. silent_s: between two chunks of a stream; then its replica is taken for lost."""

    def __init__(self, fleet: Fleet, budget: RetryBudget, metrics: RouterMetrics, attempts: int, silent_s: float):
        self.fleet, self.budget, self.metrics = fleet, budget, metrics
        self.attempts, self.silent_s = attempts, silent_s

    async def send(self, asked: Asked) -> "Whole | Passing":
        """The answer, or its first event with the others to come. ApiError 503 or 502 if no replica gave one."""
        self.budget.deposit()
        tried: list[Replica] = []
        replica = self.fleet.choose(asked.key)
        if replica is None:
            raise ApiError(503, "no replica is ready: try again later", "server_error", code="no_replica")
        while True:
            try:
                return await self._attempt(replica, asked)
            except AttemptFailed as failed:
                if failed.outcome == "lost":
                    await self.fleet.look(replica)
                tried.append(replica)
                replica = self._another(asked, tried, failed.outcome)
                if replica is None and failed.answer is not None:
                    return failed.answer
                if replica is None:
                    what = f"no token came before the replica was lost ({failed.outcome}): try again"
                    raise ApiError(502, what, "server_error", code="replica_lost") from failed

    def _another(self, asked: Asked, tried: list[Replica], outcome: str) -> Replica | None:
        """The next replica to try; None if there is none, or if the budget has no retry left. One that is gone computes
        nothing any more: what it had moves, which adds nothing to the load and costs no budget."""
        if len(tried) >= self.attempts:
            return None
        replica = self.fleet.choose(asked.key, without=tried)
        if replica is not None and tried[-1].health.ready and not self.budget.withdraw():
            self.metrics.starved.inc()
            return None
        if replica is not None:
            self.metrics.retries.labels(outcome).inc()
        return replica

    async def _attempt(self, replica: Replica, asked: Asked) -> "Whole | Passing":
        replica.begin()
        outcome, answer = "cancelled", None
        try:
            answer = await self._unless_ejected(replica, self._begin(replica, asked))
            outcome = str(answer.status)
            return answer
        except AttemptFailed as failed:
            outcome = failed.outcome
            raise
        except httpx.ConnectError as error:
            replica.eject()
            outcome = "refused"
            raise AttemptFailed(outcome) from error
        except httpx.HTTPError as error:
            replica.observe(False)
            outcome = "lost"
            raise AttemptFailed(outcome) from error
        finally:
            self.metrics.attempts.labels(replica.url, outcome).inc()
            if not isinstance(answer, Passing):
                replica.end()

    async def _begin(self, replica: Replica, asked: Asked) -> "Whole | Passing":
        client = self.fleet.client
        headers = [*asked.headers, (b"x-request-id", asked.id.encode()), (b"accept-encoding", b"identity")]
        request = client.build_request(asked.method, replica.url + asked.path, headers=headers, content=asked.body)
        response = await client.send(request, stream=True)
        try:
            passed = {name: response.headers[name] for name in PASSED if name in response.headers}
            if not passed.get("content-type", "").startswith("text/event-stream"):
                answer = Whole(response.status_code, passed, await response.aread())
                await response.aclose()
                if answer.status >= 500:
                    check_elsewhere(replica, answer.body, answer)
                return answer
            events = complete_events(response.aiter_raw())
            first = await anext(events, b"")
            if not first:
                raise AttemptFailed("lost")
            check_elsewhere(replica, first.partition(b"\n")[0].removeprefix(b"data: "), Whole(200, passed, first))
            return Passing(self, replica, response, passed, first, events, asked.id)
        except BaseException:
            await response.aclose()
            raise

    async def _unless_ejected(self, replica: Replica, work: Coroutine) -> "Whole | Passing":
        """What `work` returns; AttemptFailed if its replica is ejected first. Cancelled, it leaves nothing open."""
        working, watching = asyncio.create_task(work), asyncio.create_task(replica.ejected.wait())
        try:
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
        except asyncio.CancelledError:
            await dropped(working)
            raise
        finally:
            watching.cancel()
        await dropped(working)
        raise AttemptFailed("ejected")


async def dropped(working: asyncio.Task) -> None:
    """Ends an attempt nobody waits for, and closes its connection if it has one."""
    working.cancel()
    await asyncio.wait((working,))
    if not working.cancelled() and working.exception() is None and isinstance(working.result(), Passing):
        await working.result().disconnect()


class Passing:
    """The events of a stream as they come, and at its end, whichever it is, the end of its request at the replica.

    status, headers: of the answer. An error that ends it here has the same shape as the server's own.
    """

    def __init__(
        self,
        forwarder: Forwarder,
        replica: Replica,
        response: httpx.Response,
        headers: dict[str, str],
        first: bytes,
        events: AsyncIterator[bytes],
        request_id: str,
    ):
        self.status, self.headers, self.broken = response.status_code, headers, False
        self._forwarder, self._replica, self._response, self._id = forwarder, replica, response, request_id
        self._first, self._events, self._closed = first, events, False
        self._is_cut_off = False
        self._waiting: asyncio.Timeout | None = None  # for an event of the replica

    def __aiter__(self) -> "Passing":
        return self

    async def __anext__(self) -> bytes:
        if self._first:
            first, self._first = self._first, b""
            return first
        if self.broken or self._closed:
            raise StopAsyncIteration
        try:
            async with asyncio.timeout(0 if self._is_cut_off else self._forwarder.silent_s) as self._waiting:
                return await anext(self._events)
        except (httpx.HTTPError, TimeoutError):
            self.broken = True
            if self._is_cut_off:
                return event(shutting_down().body(self._id))
            self._replica.observe(False)
            self._forwarder.metrics.lost.inc()
            what = "the replica that wrote this answer was lost: what came so far is not all of it"
            return event(ApiError(502, what, "server_error", code="replica_lost").body(self._id))
        finally:
            self._waiting = None

    def cut_off(self) -> None:
        """The next event is the last: an error, since this router ends."""
        self._is_cut_off = True
        if self._waiting is not None:
            self._waiting.reschedule(0)

    async def aclose(self) -> None:
        """Closes the replica's connection, on which it cancels what has not ended."""
        if not self._closed:
            self._closed = True
            self._replica.end()
            await self.disconnect()

    async def disconnect(self) -> None:
        await self._response.aclose()


async def complete_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes, cut where events end: nobody gets half an event of a replica that is lost."""
    rest = b""
    async for chunk in chunks:
        rest += chunk
        ends = [rest.rindex(mark) + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if mark in rest]
        if ends:
            yield rest[: max(ends)]
            rest = rest[max(ends) :]
    if rest:
        yield rest


def check_elsewhere(replica: Replica, body: bytes, answer: Whole) -> None:
    """AttemptFailed if the body is an error that another replica may not have; one that stops gets nothing more."""
    code = error_code(body)
    if code in ELSEWHERE:
        if code in STOPS:
            replica.eject()
        raise AttemptFailed(code, answer)


def error_code(body: bytes) -> str | None:
    """Of an error in OpenAI's shape."""
    if b'"error"' not in body:
        return None
    try:
        error = json.loads(body).get("error")
        return error.get("code") if isinstance(error, dict) else None
    except (ValueError, AttributeError):
        return None
