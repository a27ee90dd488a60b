"""`python -m minillm route --spawn` as processes: replicas that are killed, replaced, restarted, and end with it."""

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import httpx
import psutil
import pytest

from minillm.__main__ import run
from tests.engine.api.running import PATIENCE_S, until

COMMAND = [sys.executable, "-m", "minillm", "route", "--port=0", "--check=0.2"]
BATCH = 8  # sequences that a replica computes at once; the others wait and have no token
ASKED = {"model": "draft", "prompt": "def ", "temperature": 1, "ignore_eos": True}
ASKED |= {"stream": True, "stream_options": {"include_usage": True}}


@dataclass
class Route:
    url: str
    process: subprocess.Popen
    log: list[str]

    def replicas(self, state: str = "ready") -> list[str]:
        return [each["url"] for each in httpx.get(f"{self.url}/replicas").json() if each["state"] == state]

    def process_of(self, replica: str) -> psutil.Process:
        """The one that listens there."""
        port = int(replica.rpartition(":")[2])
        children = psutil.Process(self.process.pid).children()
        return next(each for each in children if any(at.laddr.port == port for at in listening(each)))

    def idle(self) -> None:
        """Waits until neither the router nor a replica has anything open or holds a block."""

        def nothing() -> bool:
            router = values(self.url, "minillm_router_outstanding")
            names = ("minillm_waiting_requests", "minillm_running_sequences", "minillm_kv_blocks_used")
            return not router + sum(values(url, name) for url in self.replicas() for name in names)

        until(nothing, "something is still open")


def listening(process: psutil.Process) -> list:
    return [each for each in process.net_connections() if each.status == psutil.CONN_LISTEN]


def values(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


@contextmanager
def routing(count: int, *options: str) -> Iterator[Route]:
    """With `count` replicas that are ready; no process is left at its end."""
    command = [*COMMAND, f"--spawn={count}", *options, "--", "--model=draft", f"--max-num-seqs={BATCH}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    children = []
    try:
        url = re.search(r"http://127.0.0.1:\d+", process.stderr.readline())[0]
        found = Route(url, process, [])
        threading.Thread(target=lambda: found.log.extend(process.stderr), daemon=True).start()
        until(lambda: reachable(url) and len(found.replicas()) == count, "the replicas did not start")
        yield found
        if process.poll() is not None or psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE:
            return
        children = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S * 2)
        assert not any(child.is_running() for child in children), "a replica has outlived its router"
        assert not any("Traceback" in line for line in found.log), "".join(found.log)
    finally:
        for each in children:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.kill()
        process.wait()


def reachable(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def crowd(url: str, count: int, meanwhile=lambda: None, leave: float = 0.0, seed: int = 1, tokens: int = 40):
    """Endings of so many concurrent streams: "[DONE]", "left" or the code of an error; `meanwhile` runs in a thread."""
    draw = random.Random(seed)

    async def one(client: httpx.AsyncClient) -> str:
        leaves, most = draw.random() < leave, draw.randint(tokens // 2, tokens)
        async with client.stream("POST", "/v1/completions", json=ASKED | {"max_tokens": most}) as answer:
            if answer.status_code != 200:
                return json.loads(await answer.aread())["error"]["code"]
            usage = None
            async for line in answer.aiter_lines():
                if not line:
                    continue
                content = line.removeprefix("data: ")
                if content == "[DONE]":
                    assert usage["completion_tokens"] == most
                    return content
                told = json.loads(content)
                if "error" in told:
                    return told["error"]["code"]
                usage = told["usage"]
                if leaves and draw.random() < 0.1:
                    return "left"
        return "broke off without a word"

    async def all_of_them():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S * 5, limits=limits) as client:
            endings = asyncio.gather(*(one(client) for _ in range(count)))
            await asyncio.to_thread(meanwhile)
            return await endings

    return asyncio.run(all_of_them())


@pytest.mark.full
def test_a_fleet_under_a_crowd_a_kill_a_restart_and_its_end():
    with routing(2) as route:
        endings = crowd(route.url, 240, leave=0.3)
        assert set(endings) == {"[DONE]", "left"} and endings.count("left") > 20
        route.idle()

        victim = route.replicas()[0]
        first_tokens = values(victim, "minillm_ttft_seconds_count")

        def kill():
            until(lambda: values(victim, "minillm_ttft_seconds_count") > first_tokens, "the victim has no first token")
            route.process_of(victim).kill()

        endings = crowd(route.url, 200, kill, seed=2)
        assert set(endings) <= {"[DONE]", "replica_lost"}  # none is lost if no token had come through when it died
        lost = endings.count("replica_lost")
        assert lost == values_of_total(route.url, "minillm_router_lost_streams_total")
        assert lost <= BATCH, "only what the victim was computing is lost"
        until(lambda: len(route.replicas()) == 2 and victim not in route.replicas(), "nobody took its place")
        route.idle()

        before = route.replicas()
        restarted = threading.Thread(target=httpx.post, args=[f"{route.url}/replicas/restart"], kwargs={"timeout": 120})
        restarted.start()
        while restarted.is_alive():
            assert set(crowd(route.url, 8, seed=3, tokens=20)) == {"[DONE]"}
        assert len(route.replicas()) == 2 and not set(before) & set(route.replicas())
        route.idle()


def values_of_total(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


@pytest.mark.full
def test_the_number_of_replicas_changes_and_they_end_with_a_router_that_is_killed():
    with routing(1) as route:
        (child,) = psutil.Process(route.process.pid).children()
        assert httpx.post(f"{route.url}/replicas/count", json={"count": 0}).json() == {"wanted": 0}
        until(lambda: has_ended(child), "it was to end")
        assert httpx.post(f"{route.url}/replicas/count", json={"count": 1}).json() == {"wanted": 1}
        until(lambda: len(route.replicas()) == 1)
        (child,) = psutil.Process(route.process.pid).children()
        route.process.kill()
        until(lambda: has_ended(child), "it has outlived its router")


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.full
def test_options_that_serve_refuses_end_the_router_with_its_words():
    command = [*COMMAND, "--spawn=1", "--", "--dtype=int3"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S * 5)
    assert process.returncode == 2
    assert process.stderr.splitlines()[-1].startswith("minillm: a replica ended with status 2: minillm: --dtype int3")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give either --replicas URL,URL or --spawn N"),
        (["--replicas", "http://a", "--spawn", "1"], "give either"),
        (["--replicas", "nonsense"], "'nonsense' is not a server's URL"),
        (["--replicas", "http://a:1,http://a:1/"], "names a server twice"),
        (["--spawn", "1", "--policy", "magic"], "--policy magic is unknown"),
        (["--spawn", "1", "--host", "0.0.0.0"], "give a key with --api-key"),
        (["--spawn", "1", "--admin-key", "long-enough"], "give --api-key"),
        (["--spawn", "1", "--api-key", "long-enough", "--admin-key", "long-enough"], "has the same key"),
        (["--spawn", "1", "--", "--port", "5"], "--port of the replicas is chosen here"),
        (["--replicas", "http://a:1", "--", "--k", "5"], "only for --spawn"),
    ],
)
def test_bad_options_are_one_sentence(arguments, said, capsys):
    assert run(["route", "--port", "0", *arguments]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1, told
