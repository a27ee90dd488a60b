"""The server's process: uvicorn on one event loop. SIGTERM or Ctrl-C stops new requests and ends those that are open.

accept ──▶ event loop (HTTP) ──▶ AsyncLLM's thread (forward passes) ──▶ event loop ──▶ client
"""

import asyncio
import ipaddress
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

DRAIN_S = 30.0  # for open requests after SIGTERM; then they are cut off
FIRST_REQUEST_S = 10.0  # for the headers of a connection's first request


class DrainingServer(uvicorn.Server):
    """Tells the app first that it is shutting down, so that /ready fails and what still arrives gets 503.

    is_over: asked ten times a second; it ends as by a signal once this is true.
    """

    def __init__(self, config: uvicorn.Config, is_over: Callable[[], bool]) -> None:
        super().__init__(config)
        self.is_over = is_over

    async def on_tick(self, counter: int) -> bool:
        if not self.should_exit and self.is_over():
            self.config.app.state.api.admission.draining = True
            self.should_exit = True
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: object) -> None:
        self.config.app.state.api.admission.draining = True
        super().handle_exit(sig, frame)


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


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def with_deadline(protocol: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
    """uvicorn's protocol, which by itself waits forever for the first request of a connection."""

    class FirstRequestDeadline(protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self.loop.call_later(FIRST_REQUEST_S, self.close_if_silent)

        def close_if_silent(self) -> None:
            if self.cycle is None:  # no request's headers have come
                self.transport.close()

    return FirstRequestDeadline


def uvicorn_config(app: FastAPI, log_level: str = "info", drain_s: float = DRAIN_S) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        log_level=log_level,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=int(drain_s),
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
) -> None:
    """Serves until a signal or `is_over` ends it. A connection that sends nothing is closed: before its first request
    after `FIRST_REQUEST_S`, between requests after five seconds."""
    DrainingServer(uvicorn_config(app, log_level, drain_s), is_over).run(sockets=[listening])
