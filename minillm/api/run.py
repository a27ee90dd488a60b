"""The server's process: uvicorn on one event loop. SIGTERM or Ctrl-C stops new requests and ends those that are open.

accept ──▶ event loop (HTTP) ──▶ AsyncLLM's thread (forward passes) ──▶ event loop ──▶ client
"""

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from minillm.api.entry import new_request_id
from minillm.api.limits import ApiError

DRAIN_S = 30.0  # for open requests after SIGTERM; then they are told that they are cut off
TELL_S = 5.0  # for that
UNREAD_LOOKS = 5  # while it drains, one a second
AGAIN_S = 1.0  # a second Ctrl-C cuts off what is open; torchrun repeats at once what its terminal has sent already
FIRST_REQUEST_S = 10.0  # for the headers of a connection's first request


class DrainingServer(uvicorn.Server):
    """Tells the app first that it is shutting down, so that /ready fails and what still arrives gets 503.

    is_over: asked ten times a second; it ends as by a signal once this is true. takes_signals: False where another
    process takes them for this one, although its terminal sends them to both. drain_s: for what is open; the rest is
    answered with 503, or with an error event if it has begun.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        is_over: Callable[[], bool],
        drain_s: float = DRAIN_S,
        takes_signals: bool = True,
    ) -> None:
        super().__init__(config)
        self.is_over, self.takes_signals, self.drain_s = is_over, takes_signals, drain_s
        self._asked = -math.inf  # when a signal came

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:
        return super().capture_signals() if self.takes_signals else contextlib.nullcontext()

    async def on_tick(self, counter: int) -> bool:
        if not self.should_exit and self.is_over():
            self.config.app.state.api.admission.draining = True
            self.should_exit = True
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: object) -> None:
        self.config.app.state.api.admission.draining = True
        now = time.monotonic()
        if now - self._asked > AGAIN_S:
            super().handle_exit(sig, frame)
        self._asked = now

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Clients that read nothing are not waited for."""
        cutting = [asyncio.create_task(self._cut_off_unread()), asyncio.create_task(self._cut_off_rest())]
        try:
            await super().shutdown(sockets)
        finally:
            for each in cutting:
                each.cancel()

    async def _cut_off_rest(self) -> None:
        await asyncio.sleep(self.drain_s)
        self.config.app.state.api.admission.cut_off()

    async def _cut_off_unread(self) -> None:
        """Closes connections that have bytes to send, of which for `UNREAD_LOOKS` seconds none could be sent."""
        unread: dict[asyncio.Protocol, tuple[int, int]] = {}  # bytes to send, and looks since they changed
        while True:
            before, unread = unread, {}
            for connection in list(self.server_state.connections):
                size = connection.transport.get_write_buffer_size()
                last, looks = before.get(connection, (0, 0))
                unread[connection] = (size, looks + 1 if size and size == last else 0)
                if unread[connection][1] >= UNREAD_LOOKS:
                    connection.transport.abort()
            await asyncio.sleep(1.0)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. ValueError, in one sentence, if there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except (OSError, UnicodeError) as error:
        found.close()
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot listen on {host}, port {port} ({reason}): choose another with --port") from None
    found.listen(2048)
    return found


def url_of(host: str, listening: socket.socket) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"


def with_deadline(protocol: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
    """uvicorn's protocol, which by itself waits forever for the first request of a connection."""

    class FirstRequestDeadline(protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self.first_request_due = self.loop.call_later(FIRST_REQUEST_S, self.close_if_silent)

        def connection_lost(self, exc: Exception | None) -> None:
            self.first_request_due.cancel()  # which would hold the connection
            super().connection_lost(exc)

        def close_if_silent(self) -> None:
            if self.cycle is None:  # no request's headers have come
                self.transport.close()

        def send_400_response(self, msg: str) -> None:
            """What was sent is not HTTP. uvicorn's own answer has neither an id nor OpenAI's shape."""
            if self.cycle is None or self.cycle.response_complete:  # else this would stand within another answer
                request_id = new_request_id()
                body = json.dumps(ApiError(400, msg, code="not_http").body(request_id)).encode()
                head = ("HTTP/1.1 400 Bad Request", "content-type: application/json", f"x-request-id: {request_id}",
                        f"content-length: {len(body)}", "connection: close", "", "")  # fmt: skip
                self.transport.write("\r\n".join(head).encode() + body)
            self.transport.close()

    return FirstRequestDeadline


def uvicorn_config(app: FastAPI, log_level: str = "info", drain_s: float = DRAIN_S) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        log_level=log_level,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=math.ceil(drain_s + TELL_S),
        server_header=False,
        lifespan="on",
    )
    config.load()
    config.http_protocol_class = with_deadline(config.http_protocol_class)
    return config


def serve(
    app: FastAPI,
    listening: socket.socket,
    *,
    log_level: str = "info",
    drain_s: float = DRAIN_S,
    is_over: Callable[[], bool] = lambda: False,
    takes_signals: bool = True,
    until_stdin_closes: bool = False,
) -> None:
    """Serves until a signal or `is_over` ends it. A connection that sends nothing is closed: before its first request
    after `FIRST_REQUEST_S`, between requests after five seconds. is_over, takes_signals: see `DrainingServer`.
    until_stdin_closes: also until the parent ends that holds the other end of standard input, as if it had sent
    SIGTERM."""
    if until_stdin_closes:
        end_with_stdin()
    config = uvicorn_config(app, log_level, drain_s)
    DrainingServer(config, is_over, drain_s, takes_signals).run(sockets=[listening])


def end_with_stdin() -> None:
    """From here on this process gets a SIGTERM when standard input closes, as it does when its parent ends."""

    def wait() -> None:
        with contextlib.suppress(OSError):  # there is none
            while os.read(0, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="minillm stdin", daemon=True).start()
