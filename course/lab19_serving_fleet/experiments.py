"""Lab 19's measurements on real things: a server on this machine under load, a stall seen by two generators, a start.

measured   the committed draft model behind minillm's own HTTP server, requests by `minillm.api.load`
stage.py   a real engine on a simulated clock      queues.py, incidents.py: simulated fleets
"""

import asyncio
import contextlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from statistics import fmean

import httpx
import torch
import uvicorn

from course.lab19_serving_fleet.stage import Staged, stage
from course.shared.measuring import one_thread
from minillm.api.app import create_app
from minillm.api.load.drive import closed_loop, open_loop
from minillm.api.load.plan import Lengths, Plan
from minillm.api.load.send import Call, OverHttp, Sender, http_client
from minillm.api.load.virtual_time import run_virtual
from minillm.api.run import bind, uvicorn_config
from minillm.data import Tokenizer
from minillm.model import load_hf
from minillm.model.generate import folder_of
from minillm.predict.serving import queueing
from minillm.serve import LLM

PATIENCE_S = 60.0


# Where the seconds go: a real engine, simulated clock.


@cache
def parts(rate: float, count: int = 240) -> Staged:
    """Requests of 64 prompt and 16 answer tokens, 8 at once."""
    return stage(Plan(count, Lengths((64, 64), (16, 16)), vocab_size=61, seed=3).at(rate))


def littles_law(staged: Staged, scrape_s: float = 0.1) -> tuple[float, float]:
    """(requests inside, as scraped every `scrape_s`, on average; arrivals per second times mean seconds inside)."""
    spans = [(story.arrival.at, story.ended) for story in staged.stories]
    first, last = spans[0][0], max(end for _, end in spans)
    scrapes = [first + scrape_s * n for n in range(int((last - first) / scrape_s))]
    inside = fmean(sum(start <= at < end for start, end in spans) for at in scrapes)
    return inside, len(spans) / (last - first) * fmean(end - start for start, end in spans)


# A server on this machine.


@contextlib.contextmanager
def served(**engine) -> Iterator[str]:
    """The URL of a server with the draft model, in a thread of this process."""
    folder = folder_of("draft")
    llm = LLM(load_hf(folder, dtype=torch.float32), tokenizer=Tokenizer.load(folder), **engine)
    listening = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn_config(create_app({"draft": llm}), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        listening.close()


def wait_for(fits: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not fits():
        if time.monotonic() > end:
            raise RuntimeError(f"not ready after {PATIENCE_S:g} s: is this machine very busy?")
        time.sleep(0.01)


@dataclass(frozen=True)
class AtRate:
    """A server that takes one request at a time, at one rate. load: rate times service. service_s: on average; idle_s:
    of the requests that found the server idle, on average (None if none did). wait: mean seconds in the queue,
    measured. path: by Lindley's recursion from the arrivals that were sent and the services in any order. formula: the
    long run's mean, by Pollaczek and Khinchine."""

    load: float
    service_s: float
    idle_s: float | None
    cv: float
    wait: float
    path: float
    formula: float


def in_thread(coroutine) -> list:
    """Runs it in another thread: a notebook has an event loop of its own."""
    found: list = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(coroutine)))
    thread.start()
    thread.join()
    return found[0]


@cache
@one_thread()
def knee(loads: tuple[float, ...] = (0.4, 0.65, 0.85), count: int = 60) -> list[AtRate]:
    """Over HTTP, with the draft model. loads: aimed at, by the services of the run before, at first of one that is not
    reported: under load a service is shorter than that of a request alone, which includes the way over HTTP."""
    plan = Plan(count, Lengths((16, 16), (8, 8)), seed=19)
    with served(max_num_seqs=1) as url:

        async def sent(rate: float, drive=open_loop, requests: int = count) -> list[Call]:
            async with http_client(url) as client:
                return await drive(plan.at(rate)[:requests], OverHttp(client, "draft"))

        alone = fmean(call.ended - call.begun for call in in_thread(sent(1e6, closed_loop, 20))[5:])
        found = [at_rate(in_thread(sent(0.6 / alone)))]
        for load in loads:
            found.append(at_rate(in_thread(sent(load / found[-1].service_s))))
        return found[1:]


def at_rate(calls: list[Call]) -> AtRate:
    """Of a queue that is first come, first served: a service begins when the one before has ended."""
    due, ended = [call.arrival.at for call in calls], [call.ended for call in calls]
    begun = [max(at, before) for at, before in zip(due, [0.0, *ended], strict=False)]
    services = [end - begin for end, begin in zip(ended, begun, strict=True)]
    mean, rate = fmean(services), len(calls) / due[-1]
    cv = fmean((each - mean) ** 2 for each in services) ** 0.5 / mean
    gaps = [b - a for a, b in zip([0.0, *due], due, strict=False)]
    load = rate * mean
    formula = queueing.mean_wait_any_service(rate, mean, cv) if load < 1 else float("inf")
    wait = fmean(begin - at for begin, at in zip(begun, due, strict=True))
    idle = [each for each, begin, at in zip(services, begun, due, strict=True) if begin == at]
    orders = [random.Random(seed).sample(services, len(services)) for seed in range(100)]
    path = fmean(fmean(queueing.waits(gaps, order)) for order in orders)
    return AtRate(load, mean, fmean(idle) if idle else None, cv, wait, path, formula)


# A stall, seen by two generators: simulated, in virtual time.


def stalling(service_s: float = 0.01, start: float = 20.0, end: float = 30.0) -> Sender:
    """A server that answers at once, but stands still for ten seconds."""

    async def send(arrival, began: float) -> Call:
        loop = asyncio.get_running_loop()
        sent = loop.time() - began
        await asyncio.sleep(max(0.0, end - sent) if start <= sent < end else 0.0)
        await asyncio.sleep(service_s)
        ended = loop.time() - began
        return Call(arrival, sent, ended, ended, ended, 1)

    return send


@cache
def two_generators() -> dict[str, list[Call]]:
    """A minute of ten requests per second, evenly: each when it is due, and one after the other's answer."""
    coming = Plan(600, cv=0.0).at(10.0)

    def both() -> dict[str, list[Call]]:
        return {
            "open": run_virtual(open_loop(coming, stalling())),
            "closed": run_virtual(closed_loop(coming, stalling())),
        }

    found: dict[str, list[Call]] = {}
    thread = threading.Thread(target=lambda: found.update(both()))  # beside a notebook's own event loop
    thread.start()
    thread.join()
    return found


# The start of a replica: measured.


@dataclass(frozen=True)
class Started:
    """seconds: from the request for a process until /ready. phases: as the server's own /metrics splits them."""

    seconds: float
    phases: dict[str, float]


@cache
def start(together: int = 1) -> list[Started]:
    """So many processes of `python -m minillm serve`, started at once."""
    command = [sys.executable, "-m", "minillm", "serve", "--model", "draft", "--speculate", "none", "--port", "0"]
    began = time.monotonic()
    processes = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(together)
    ]
    try:
        urls = [_url(process) for process in processes]
        found: dict[str, Started] = {}

        def all_ready() -> bool:
            for url in urls:
                if url not in found and _is_ready(url):
                    found[url] = Started(time.monotonic() - began, _phases(url))
            return len(found) == len(urls)

        wait_for(all_ready)
        return list(found.values())
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(PATIENCE_S)
            process.stderr.close()


def _url(process: subprocess.Popen) -> str:
    for line in process.stderr:
        if "http://" in line:
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return line[line.index("http://") : line.index("/v1")]
    raise RuntimeError("python -m minillm serve ended before it listened: run it by itself to see why")


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _phases(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics", timeout=5, trust_env=False).text.splitlines()
    found = [line for line in lines if line.startswith("minillm_start_seconds{")]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in found}
