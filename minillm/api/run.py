"""The server's process: uvicorn on one event loop. SIGTERM or Ctrl-C stops new requests and ends those that are open.

accept ──▶ event loop (HTTP) ──▶ AsyncLLM's thread (forward passes) ──▶ event loop ──▶ client
"""

import ipaddress
import socket

import uvicorn
from fastapi import FastAPI

DRAIN_S = 30.0  # for open requests after SIGTERM; then they are cut off


class DrainingServer(uvicorn.Server):
    """Tells the app first that it is shutting down, so that /ready fails and what still arrives gets 503."""

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
    except OSError as error:
        found.close()
        raise ValueError(
            f"cannot listen on {host}, port {port} ({error.strerror}): choose another with --port"
        ) from None
    found.listen(2048)
    return found


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(app: FastAPI, listening: socket.socket, *, log_level: str = "info", drain_s: float = DRAIN_S) -> None:
    """Until a signal ends it. A connection that sends no request for five seconds is closed."""
    config = uvicorn.Config(
        app,
        log_level=log_level,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=int(drain_s),
        server_header=False,
        lifespan="on",
    )
    DrainingServer(config).run(sockets=[listening])
