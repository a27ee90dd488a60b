"""A router in front of replicas whose every byte a test says: they refuse, break off, hang or end as they are told."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.engine.api.running import PATIENCE_S, listening, until

from minillm.api.limits import Keys, Limits  # isort: skip
from minillm.api.router.app import Router, RouterOptions, create_router

QUICK = {"check_s": 0.02, "check_timeout_s": 5.0}
EVENT = b'data: {"choices":[{"index":0,"text":"%d"}]}\n\n'
DONE = b"data: [DONE]\n\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

Script = Callable[["Replica", asyncio.StreamReader, asyncio.StreamWriter], object]


@dataclass
class Replica:
    """script: what it does with a POST. ready: what /ready says. asked: heads and bodies of its POSTs."""

    script: Script
    ready: bool = True
    asked: list[tuple[str, dict]] = field(default_factory=list)
    gone: int = 0  # clients that left before the script was over
    url: str = ""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    server: asyncio.Server | None = None
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    def die(self) -> None:
        """As if its process was killed: nobody listens, and every connection is reset."""

        def end() -> None:
            self.server.close()
            for writer in self.writers:
                writer.transport.abort()

        self.loop.call_soon_threadsafe(end)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if head.startswith("GET"):
                    status = "200 OK" if self.ready or "/ready" not in head else "503 Service Unavailable"
                    writer.write(f"HTTP/1.1 {status}\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{{}}".encode())
                    break
                lengths = [line for line in head.lower().split("\r\n") if line.startswith("content-length: ")]
                body = await reader.readexactly(int(lengths[0].split()[1]))
                self.asked.append((head, json.loads(body)))
                await self.script(self, reader, writer)
        writer.close()


def whole(content: dict, status: str = "200 OK") -> Script:
    async def script(replica, reader, writer):
        body = json.dumps(content).encode()
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()

    return script


def failing(code: str, status: str) -> Script:
    return whole({"error": {"message": "no", "type": "server_error", "param": None, "code": code}}, status)


def chunk(content: bytes) -> bytes:
    return f"{len(content):x}\r\n".encode() + content + b"\r\n"


def stream(count: int, breaks_after: int | None = None, pause: float = 0.0, begins: bytes = b"") -> Script:
    """count events; the connection is cut off after so many of them, in the middle of the next."""

    async def script(replica, reader, writer):
        writer.write(STREAM + (chunk(begins) if begins else b""))
        for number in range(count):
            if number == breaks_after:
                writer.write(chunk(EVENT[:20]))
                await writer.drain()
                writer.transport.abort()
                raise ConnectionError
            writer.write(chunk(EVENT % number))
            await writer.drain()
            if pause:
                try:
                    async with asyncio.timeout(pause):
                        if not await reader.read(1):
                            replica.gone += 1
                            raise ConnectionError
                except TimeoutError:
                    pass
        writer.write(chunk(DONE) + b"0\r\n\r\n")
        await writer.drain()

    return script


def cut_off() -> Script:
    """As of a process that was killed."""

    async def script(replica, reader, writer):
        writer.transport.abort()
        raise ConnectionError

    return script


def silent() -> Script:
    """Takes the request and says nothing until its client goes away."""

    async def script(replica, reader, writer):
        await reader.read(1)
        replica.gone += 1
        raise ConnectionError

    return script


@contextlib.contextmanager
def replicas(*scripts: Script) -> Iterator[list[Replica]]:
    made = [Replica(script) for script in scripts]
    loop = asyncio.new_event_loop()

    async def begin():
        for each in made:
            each.server = await asyncio.start_server(each.serve, "127.0.0.1", 0)
            each.url = f"http://127.0.0.1:{each.server.sockets[0].getsockname()[1]}"

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(begin(), loop).result(PATIENCE_S)
    for each in made:
        each.loop = loop
    try:
        yield made
    finally:
        asyncio.run_coroutine_threadsafe(_end(made), loop).result(PATIENCE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
        loop.close()


async def _end(made: list[Replica]) -> None:
    for each in made:
        each.server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@dataclass
class Routed:
    url: str
    router: Router

    def state(self, url: str) -> str:
        return self.router.fleet.replicas[url].state

    def idle(self) -> None:
        """Waits until the router holds no request."""
        until(lambda: self.router.admission.open.total() == 0, "a request still counts as open")
        until(lambda: all(each.outstanding == 0 for each in self.router.fleet.replicas.values()), "one is outstanding")


@contextlib.contextmanager
def routed(urls: list[str], limits: Limits | None = None, keys: Keys | None = None, **options) -> Iterator[Routed]:
    """options: of the router. All replicas are ready when it is given out."""
    app = create_router(urls, RouterOptions(**QUICK | {"policy": "round-robin"} | options), limits, keys)
    with listening(app) as (url, _):
        found = Routed(url, app.state.api)
        until(lambda: all(each.state == "ready" for each in found.router.fleet.replicas.values()), "not all are ready")
        yield found
        found.idle()
