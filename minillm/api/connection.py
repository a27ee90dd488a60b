"""Between the engine's streams and a connection: what ends when a client goes away, and what a failure becomes."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

from minillm.api.answers import REASONS
from minillm.api.limits import Admission, ApiError, shutting_down
from minillm.api.metrics import Metrics
from minillm.serve.async_engine import EngineStopped, Stream
from minillm.serve.requests.output import Output

Result = TypeVar("Result")
log = logging.getLogger("uvicorn.error")
UNBUFFERED = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # for proxies that would keep events back


class OpenRequest:
    """A request from its admission to its end, which comes once: its place is free again, its streams are closed, its
    status, tokens and times are counted. ApiError if it is not admitted. status: what it ends with."""

    def __init__(self, admission: Admission, metrics: Metrics, tenant: str):
        self._admission, self._metrics, self.tenant = admission, metrics, tenant
        self.model, self.status, self._ended = "", "500", False
        self._taken = 0
        self.streams: list[Stream] = []
        try:
            admission.enter(tenant)
        except ApiError as error:
            metrics.requests.labels("", tenant, str(error.status)).inc()
            raise

    def take(self, tokens: int) -> None:
        """What it may use of the tenant's rate. ApiError if that has not so many now."""
        self._admission.take(self.tenant, tokens)
        self._taken = tokens

    def end(self) -> None:
        if self._ended:
            return
        self._ended = True
        used = sum(tokens_of(stream.output) for stream in self.streams)
        self._admission.put_back(self.tenant, max(0, self._taken - used))
        for stream in self.streams:
            stream.close()
            self._metrics.done(self.tenant, stream.output)
        self._metrics.requests.labels(self.model, self.tenant, self.status).inc()
        self._admission.leave(self.tenant)


@contextmanager
def ends_if_it_raises(opened: Any) -> Iterator[None]:
    """Ends the request if what is done within raises, with the status of an `ApiError`."""
    try:
        yield
    except BaseException as error:
        opened.status = str(error.status) if isinstance(error, ApiError) else opened.status
        opened.end()
        raise


class ClosingResponse(StreamingResponse):
    """A stream that ends the request however it ends itself, also if it was never begun, or if the client does not
    read it within `timeout_s`."""

    def __init__(self, chunks: AsyncIterator[bytes], opened: OpenRequest, timeout_s: float):
        super().__init__(chunks, media_type="text/event-stream", headers=UNBUFFERED)
        self._opened, self._timeout_s = opened, timeout_s

    async def __call__(self, *given: Any) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await super().__call__(*given)
        except TimeoutError:
            pass  # uvicorn closes a connection whose response is not complete
        finally:
            await self.body_iterator.aclose()
            self._opened.end()


async def body_of(request: Request, seconds: float) -> bytes:
    """ApiError if it does not come in time, or if the client goes away first."""
    try:
        async with asyncio.timeout(seconds):
            return await request.body()
    except TimeoutError:
        what = f"the body did not arrive within {seconds:g} seconds"
        raise ApiError(408, what, code="timeout") from None
    except ClientDisconnect:
        raise client_left() from None


async def pump(place: int, stream: Stream, queue: asyncio.Queue) -> None:
    """Deltas of one prompt, then None or what it failed with."""
    try:
        async for delta in stream:
            queue.put_nowait((place, delta))
        queue.put_nowait((place, None))
    except RuntimeError as error:
        queue.put_nowait((place, error))


async def drained(streams: list[Stream]) -> list[Output]:
    """What all streams give."""

    async def drain(stream: Stream) -> Output:
        try:
            async for _ in stream:
                pass
        except RuntimeError as error:
            raise failure(error) from error
        return stream.output

    return await asyncio.gather(*map(drain, streams))


async def while_connected(request: Request, work: Coroutine[Any, Any, Result], admission: Admission) -> Result:
    """What `work` returns; ApiError if the client goes away first or the server ends, which cancels it."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answers, leaving, cut_off = asyncio.create_task(work), asyncio.create_task(gone()), asyncio.Event()
    ending = asyncio.create_task(cut_off.wait())
    try:
        with admission.until_cut_off(cut_off.set):
            await asyncio.wait((answers, leaving, ending), return_when=asyncio.FIRST_COMPLETED)
        if not answers.done():
            raise client_left() if leaving.done() else shutting_down()
        return answers.result()
    finally:
        for task in (leaving, ending, answers):
            task.cancel()


def tokens_of(output: Output) -> int:
    """Of the prompt, once, and of all answers."""
    return len(output.prompt) + sum(len(answer.tokens) for answer in output.answers)


def failure(error: RuntimeError) -> ApiError:
    """Of a request: `engine_failure` if all others fail with it, which ejects this replica from a router. The client
    does not get the error's words, which may name folders of this machine: they stand in the log."""
    log.error("%s", error)
    if isinstance(error, EngineStopped):
        return ApiError(500, "the engine stopped; its log has more", "server_error", code="engine_failure")
    return ApiError(500, "this request failed; the server's log has more", "server_error", code="request_failed")


def check_ending(reason: str | None) -> None:
    """ApiError if a sample was cut off."""
    if reason == "timeout":
        raise ApiError(504, "the request took longer than this server allows", "server_error", code="timeout")
    if reason not in REASONS:
        what = f"an answer was {reason or 'not ended'}"
        raise ApiError(500, what, "server_error", code="request_failed")


def client_left() -> ApiError:
    return ApiError(499, "the client went away", "server_error", code="client_closed_request")
