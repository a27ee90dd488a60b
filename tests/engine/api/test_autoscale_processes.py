"""A fleet of processes behind a real router: grown from the pool, drained before it ends, measured while it starts."""

import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import httpx
import psutil
import pytest

from minillm.__main__ import run
from tests.engine.api.router.scripted import replicas, routed, silent, whole
from tests.engine.api.running import PATIENCE_S, until

from minillm.api.autoscale.controller import Controller, Scaling  # isort: skip
from minillm.api.autoscale.policies import Reactive
from minillm.api.autoscale.processes import ProcessFleet


class Scripted:
    """In place of `Processes`: hands out servers of this process, each once."""

    def __init__(self, made):
        self.left, self.started, self.stopped, self.fails = list(made), [], [], None

    async def start(self):
        if self.fails:
            raise ValueError(self.fails)
        process = SimpleNamespace(returncode=None)
        self.started.append(process)
        return SimpleNamespace(url=self.left.pop(0).url, started=time.monotonic(), process=process)

    async def stop(self, replica):
        self.stopped.append(replica.url)


@pytest.fixture
def five():
    with replicas(*[whole({})] * 4, silent()) as made:
        yield made


def test_it_grows_takes_from_the_pool_first_and_shrinks(five):
    base, processes = five[0], Scripted(five[1:])
    with routed([base.url]) as router:
        fleet = ProcessFleet(router.url, processes, pool=1)
        try:
            fleet.resize(1)
            until(lambda: len(fleet.starts) == 1, "the pool is not filled")
            assert (fleet.observe().ready, fleet.observe().starting) == (1, 0)
            assert five[1].url not in router.router.fleet.replicas  # warm, and not asked for anything

            fleet.resize(2)
            until(lambda: fleet.observe().ready == 2, "the replica of the pool does not serve")
            until(lambda: len(fleet.starts) == 2, "the pool is not filled again")
            assert five[1].url in router.router.fleet.replicas and five[2].url not in router.router.fleet.replicas

            fleet.resize(1)
            until(lambda: processes.stopped == [five[1].url], "it did not end")
            assert [*router.router.fleet.replicas] == [base.url]
        finally:
            fleet.close()
        assert sorted(processes.stopped) == sorted([five[1].url, five[2].url])


def test_a_replica_that_died_is_replaced(five):
    base, processes = five[0], Scripted(five[1:])
    with routed([base.url]) as router:
        fleet = ProcessFleet(router.url, processes)
        try:
            fleet.resize(2)
            until(lambda: fleet.observe().ready == 2, "no replica serves")
            processes.started[0].returncode = -9
            fleet.resize(2)
            until(lambda: five[2].url in router.router.fleet.replicas, "no other one starts")
            assert five[1].url not in router.router.fleet.replicas
        finally:
            fleet.close()


def test_a_replica_ends_only_when_its_requests_have(five):
    busy, processes = five[4], Scripted([five[4]])
    with routed([five[0].url]) as router:
        fleet = ProcessFleet(router.url, processes)
        try:
            fleet.resize(2)
            until(lambda: fleet.observe().ready == 2)
            client = threading.Thread(target=_ask, args=(router.url, 4), daemon=True)
            client.start()
            until(lambda: fleet.observe().running >= 1, "nothing is open")
            fleet.resize(1)
            until(lambda: router.router.fleet.replicas.get(busy.url) is None or router.state(busy.url) == "draining")
            assert processes.stopped == []
            busy.die()
            until(lambda: processes.stopped == [busy.url])
            client.join(PATIENCE_S)
        finally:
            fleet.close()


def _ask(url: str, count: int) -> None:
    for _ in range(count):
        httpx.post(f"{url}/v1/completions", json={"model": "draft", "prompt": "a"}, timeout=PATIENCE_S)


def test_the_controller_drives_it_as_it_drives_a_simulation(five):
    """Nothing is asked for: from the three that are wanted at the least it does not move."""
    processes = Scripted(five[1:4])
    with routed([five[0].url]) as router:
        fleet = ProcessFleet(router.url, processes)
        fleet.sleep = lambda seconds: time.sleep(0.05)
        said = []
        try:
            until(lambda: fleet.observe().ready == 1)
            controller = Controller(Reactive(4.0), Scaling(3, 4, 0.2, 0.0))
            controller.run(fleet, 1.0, lambda sample, count: said.append((sample.replicas, count)))
            until(lambda: fleet.observe().ready == 3)
        finally:
            fleet.close()
    assert said[0] == (1, 3) and {count for _, count in said} == {3} and said[-1] == (3, 3)


def test_options_that_never_start_are_told(five):
    processes = Scripted([])
    processes.fails = "--model nothing is unknown"
    with routed([five[0].url]) as router:
        fleet = ProcessFleet(router.url, processes)
        try:
            fleet.resize(2)
            until(lambda: fleet.failure is not None)
            with pytest.raises(RuntimeError, match="no replica starts: --model nothing is unknown"):
                fleet.observe()
        finally:
            fleet.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["http://127.0.0.1:9"], "the router http://127.0.0.1:9 does not answer"),
        (["nowhere"], "is not a server's URL"),
        (["http://127.0.0.1:9", "--policy", "best"], "--policy best is unknown"),
        (["http://127.0.0.1:9", "--policy", "predictive"], "needs --capacity"),
        (["http://127.0.0.1:9", "--least", "5"], "5 to 4 replicas"),
    ],
)
def test_bad_options_are_one_sentence(arguments, said, capsys):
    assert run(["autoscale", *arguments]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1, told


@pytest.mark.full
def test_real_processes_start_serve_and_end(five, capsys):
    """One replica is there; two are wanted, so `serve` is started once, and its start is split by itself."""
    with routed([five[0].url]) as router:
        command = [sys.executable, "-m", "minillm", "autoscale", router.url, "--least", "2", "--seconds", "600"]
        process = subprocess.Popen(
            [*command, "--interval", "0.5", "--", "--model=draft"], stdout=subprocess.PIPE, text=True
        )
        try:
            until(lambda: _ready(router.url) == 2, "the second replica did not start")
            child = psutil.Process(process.pid).children()[0]
            process.send_signal(2)
            said = process.communicate(timeout=PATIENCE_S)[0]
        finally:
            process.kill()
        assert process.returncode == 0 and not child.is_running()
        assert _ready(router.url) == 1
    phases = re.search(r"was ready after [\d.]+ s: process [\d.]+ s, imports [\d.]+ s, load [\d.]+ s, warm-up", said)
    assert phases, said


def _ready(url: str) -> int:
    return sum(each["state"] == "ready" for each in httpx.get(f"{url}/replicas").json())
