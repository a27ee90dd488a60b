"""`python -m minillm serve` as a process under a thousand streams at once: bad clients cost neither memory nor threads.

Of each round's streams some are read to their end, some left at any time, some read slowly; malformed bodies and bytes
that are no HTTP come between them, 540 in three rounds. All requests are open before the first is complete: the last
byte of every body is held back until the last connection stands. With MINILLM_PROOF=all there are thirteen rounds.
"""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import httpx
import psutil
import pytest

from tests.engine.api.running import PATIENCE_S, until
from tests.engine.api.test_clients import LONG, malformed

COMMAND = [sys.executable, "-m", "minillm", "serve", "--model=draft", "--speculate=none", "--port=0"]
OPTIONS = ["--max-open=4000", "--max-open-per-tenant=4000", "--max-num-seqs=64", "--token-budget=512"]
STREAMS, MALFORMED, LAST, WARM_UP = 1000, 180, 300, 1
ROUNDS = 12 if os.environ.get("MINILLM_PROOF") == "all" else 2
GROWTH = 1.05  # of the memory after the warm-up


@dataclass
class Server:
    url: str
    process: subprocess.Popen
    log: list[str] = field(default_factory=list)

    def value(self, *names: str) -> float:
        """The sum of these metrics."""
        lines = httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S).text.splitlines()
        wanted = tuple(f"{name}{{" for name in names)
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(wanted))

    def open(self) -> int:
        """Requests that wait and sequences that run."""
        return int(self.value("minillm_waiting_requests", "minillm_running_sequences"))

    def resources(self) -> dict[str, int]:
        found = psutil.Process(self.process.pid)
        return {"rss": found.memory_info().rss, "threads": found.num_threads()}

    def sockets(self) -> int:
        """The one it listens on, and connections."""
        return len(psutil.Process(self.process.pid).net_connections())


@contextmanager
def serving() -> Iterator[Server]:
    process = subprocess.Popen([*COMMAND, *OPTIONS], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        found = Server(re.search(r"http://127.0.0.1:\d+", process.stderr.readline())[0], process)
        threading.Thread(target=lambda: found.log.extend(process.stderr), daemon=True).start()
        until(lambda: is_ready(found.url), "the server did not start")
        yield found
    finally:
        process.kill()
        process.wait()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


class Crowd:
    """Clients of one round. All have sent their requests but for the last byte when `everybody` is set."""

    def __init__(self, url: str, streams: int, bad: int, seed: int, tokens: tuple[int, int] = (4, 24)):
        self.host, self.port = url.removeprefix("http://").split(":")
        self.draw, self.tokens = random.Random(seed), tokens
        self.streams, self.bad = streams, bad
        self.everybody, self.connected = asyncio.Event(), 0
        self.seen = Counter()

    async def run(self, meanwhile=lambda: None) -> Counter:
        """How often each ending was seen. meanwhile: called in a thread once all requests were sent."""
        clients = [self.stream() for _ in range(self.streams)] + [self.bad_client() for _ in range(self.bad)]
        self.draw.shuffle(clients)
        tasks = [asyncio.create_task(each) for each in clients]
        while self.connected < len(clients) and not any(each.done() for each in tasks):
            await asyncio.sleep(0.01)
        self.everybody.set()
        await asyncio.to_thread(meanwhile)
        self.seen.update(await asyncio.gather(*tasks))
        return self.seen

    async def send(self, content: bytes, kept: int = 1) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """kept: bytes at the end that are sent when everybody has come."""
        reader, writer = await asyncio.open_connection(self.host, int(self.port), limit=1 << 16)
        place = len(content) - kept
        writer.write(content[:place])
        await writer.drain()
        self.connected += 1
        await self.everybody.wait()
        writer.write(content[place:])
        return reader, writer

    async def stream(self) -> str:
        leaves, slow = self.draw.random() < 0.4, self.draw.random() < 0.2
        asked = LONG | {"stream": True, "max_tokens": self.draw.randint(*self.tokens), "n": 1}
        patience = self.draw.randint(0, asked["max_tokens"]) if leaves else 10**9
        pause, came = (0.02 if slow else 0.0), b""
        reader, writer = await self.send(post(json.dumps(asked).encode()))
        try:
            while came.count(b"\n\n") < patience:
                piece = await reader.read(200 if slow else 1 << 16)
                if not piece:
                    return ending(came)
                came += piece
                if slow:
                    await asyncio.sleep(pause)
            return "left"
        finally:
            writer.close()

    async def bad_client(self) -> str:
        if self.draw.random() < 0.8:
            reader, writer = await self.send(post(malformed(self.draw)))
        else:  # answered at once, and what came after that would reset the connection
            noise = bytes(self.draw.randrange(256) for _ in range(self.draw.randint(5, 200)))
            reader, writer = await self.send(noise + b"\r\n\r\n", kept=0)
        try:
            came = b""
            with suppress(ConnectionError):
                while piece := await reader.read(1 << 16):
                    came += piece
            return "malformed: " + ending(came)
        finally:
            writer.close()


def post(body: bytes) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def ending(came: bytes) -> str:
    """What an answer ended with. AssertionError for one without a request's id."""
    head = came.partition(b"\r\n\r\n")[0].decode("latin-1")
    assert "x-request-id: req-" in head, came[:300]
    status = head.split()[1]
    if b'"error":' in came:
        found = json.JSONDecoder().raw_decode(came[came.rindex(b'{"error":') :].decode())[0]["error"]
        assert found["request_id"] in head
        return f"{status} {found['code']}"
    assert status == "200" and (b"text/event-stream" not in came or b"data: [DONE]" in came), came[-300:]
    return "200"


@pytest.mark.full
def test_a_thousand_streams_with_bad_clients_leave_nothing_behind():
    with serving() as server:
        after: list[dict[str, int]] = []
        peaks, seen = [], Counter()
        for number in range(WARM_UP + ROUNDS):
            crowd = Crowd(server.url, STREAMS, MALFORMED, seed=number)
            seen += asyncio.run(crowd.run(lambda: peaks.append(server.open())))
            until(lambda: server.open() + server.value("minillm_kv_blocks_used") == 0, "something is held by nobody")
            after.append(server.resources())
        print(after, dict(seen), peaks)
        warm, last = after[WARM_UP - 1], after[-1]
        assert seen["200"] + seen["left"] == STREAMS * (WARM_UP + ROUNDS), seen
        assert seen["left"] > 100 and not [each for each in seen if each.startswith("malformed: 5")]
        assert last["rss"] <= GROWTH * warm["rss"], after
        assert last["threads"] <= warm["threads"], after
        until(lambda: server.sockets() == 1, "connections are held by nobody")
        assert not any("Traceback" in line for line in server.log), "".join(server.log)

        before = server.value("minillm_requests_total")

        def end() -> None:
            """Once all have come in: a connection that was not accepted yet is closed with the port."""
            until(lambda: server.open() + server.value("minillm_requests_total") - before >= LAST)
            server.process.send_signal(signal.SIGTERM)

        seen = asyncio.run(Crowd(server.url, LAST, 0, seed=99, tokens=(40, 80)).run(end))
        print(dict(seen))
        assert set(seen) <= {"200", "left", "503 draining", "200 draining"} and seen.total() == LAST, seen
        server.process.wait(PATIENCE_S * 2)
        assert not any("Traceback" in line for line in server.log), "".join(server.log)
