"""Between the engine's streams and a connection: what ends when a client goes away, and what a failure becomes."""

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse

from minillm.api.limits import ApiError
from minillm.serve.async_engine import Stream
from minillm.serve.requests.output import Output


class ClosingResponse(StreamingResponse):
    """Calls `closes` when the response has ended, however it ended, also if it was never begun."""

    def __init__(self, *args: Any, closes: Callable[[], None], **options: Any):
        super().__init__(*args, **options)
        self._closes = closes

    async def __call__(self, *given: Any) -> None:
        try:
            await super().__call__(*given)
        finally:
            await self.body_iterator.aclose()
            self._closes()


async def pump(place: int, stream: Stream, queue: asyncio.Queue) -> None:
    """Deltas of one prompt, then None or what it failed with."""
    try:
        async for delta in stream:
            queue.put_nowait((place, delta))
        queue.put_nowait((place, None))
    except RuntimeError as error:
        queue.put_nowait((place, error))


async def while_connected(request: Request, streams: list[Stream]) -> list[Output]:
    """What all streams give; all are cancelled if the client goes away first."""

    async def drain(stream: Stream) -> Output:
        try:
            async for _ in stream:
                pass
        except RuntimeError as error:
            raise failure(str(error)) from error
        return stream.output

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answers = asyncio.ensure_future(asyncio.gather(*map(drain, streams)))
    leaving = asyncio.ensure_future(gone())
    try:
        await asyncio.wait((answers, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answers.done():
            raise ApiError(499, "the client went away", "server_error", code="client_closed_request")
        return list(answers.result())
    finally:
        leaving.cancel()
        answers.cancel()
        for stream in streams:
            stream.close()


def failure(error: str | None) -> ApiError:
    if error is None:
        return ApiError(504, "the request took longer than this server allows", "server_error", code="timeout")
    return ApiError(500, error, "server_error", code="engine_failure")


def once(action: Callable[[], None]) -> Callable[[], None]:
    done: list[bool] = []

    def run() -> None:
        if not done:
            done.append(True)
            action()

    return run
