"""Open and closed loops in virtual time, servers whose every delay is known: percentiles, and what a stall hides."""

import asyncio
import json
import random
from itertools import pairwise

import httpx
import pytest

from minillm.api.load.drive import closed_loop, open_loop
from minillm.api.load.plan import Lengths, Plan
from minillm.api.load.report import Limit, report
from minillm.api.load.send import Call, OverHttp
from minillm.api.load.virtual_time import run_virtual
from minillm.predict.serving.queueing import waits
from minillm.serve.requests.summary import percentiles

SHARES = (0.5, 0.9, 0.99)


class StubServer(httpx.AsyncBaseTransport):
    """An OpenAI server without a model: delays(number) -> seconds to the first token, and per further token."""

    def __init__(self, delays, answer=None):
        self.delays, self.answer, self.seen = delays, answer, []

    async def handle_async_request(self, request):
        body, number = json.loads(request.content), len(self.seen)
        self.seen.append(request)
        if self.answer is not None and (special := self.answer(number)) is not None:
            return special
        first, then = self.delays(number)

        async def events():
            for token in range(body["max_tokens"]):
                await asyncio.sleep(then if token else first)
                yield event({"choices": [{"text": "x", "finish_reason": None}]})
            yield event({"choices": [{"text": "", "finish_reason": "length"}]})
            yield event({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
            yield b"data: [DONE]\n\n"

        return httpx.Response(200, content=events())


def event(content):
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def measured(plan, rate, server, keys=None, drive=open_loop, timeout_s=1e9):
    async def run():
        async with httpx.AsyncClient(transport=server, base_url="http://stub", timeout=None) as client:
            return await drive(plan.at(rate), OverHttp(client, "stub", keys or {}, timeout_s))

    return run_virtual(run())


def test_percentiles_are_those_of_a_server_with_known_delays():
    rng = random.Random(5)
    first = [rng.expovariate(2.0) for _ in range(500)]
    then = [rng.uniform(0.01, 0.03) for _ in range(500)]
    found = report(measured(Plan(500, Lengths(answer=(8, 8))), 20.0, StubServer(lambda n: (first[n], then[n]))))
    for spread, known in (
        (found.ttft, first),
        (found.tpot, then),
        (found.end_to_end, [a + 7 * b for a, b in zip(first, then, strict=True)]),
    ):
        assert [*vars(spread).values()] == pytest.approx(percentiles(known, SHARES), rel=1e-6)
    assert found.answered == found.requests == 500 and not found.errors
    assert found.rate == pytest.approx(20.0, rel=0.15)
    assert found.late.p99 == 0


def test_a_stall_shows_in_an_open_loop_and_hides_in_a_closed_one():
    """A server that answers within 10 ms stands still for 10 s of a minute: every request that was due then waits."""
    stalls = (20.0, 30.0)

    async def send(arrival, start):
        loop = asyncio.get_running_loop()
        begun = loop.time() - start
        if stalls[0] <= begun < stalls[1]:
            await asyncio.sleep(stalls[1] - begun)
        await asyncio.sleep(0.01)
        ended = loop.time() - start
        return Call(arrival, begun, ended, ended, ended, 1)

    plan = Plan(600, cv=0.0)  # ten requests per second, evenly
    mine = report(run_virtual(open_loop(plan.at(10.0), send)))
    due = [max(0.0, 30.0 - at) + 0.01 if 20.0 <= at < 30.0 else 0.01 for at in (0.1 * n for n in range(1, 601))]
    assert [*vars(mine.ttft).values()] == pytest.approx(percentiles(due, SHARES), abs=2e-3)
    assert mine.ttft.p99 > 9 and mine.ttft.p90 > 3 and mine.good < 0.9

    theirs = run_virtual(closed_loop(plan.at(10.0), send))
    as_counted = percentiles([call.ended - call.begun for call in theirs], SHARES)
    assert as_counted == pytest.approx([0.01, 0.01, 0.01])  # one of 600 requests met the stall
    assert report(theirs).ttft.p99 > 9  # and counted from when they were due, it is there again


def test_a_queue_in_front_of_one_server_is_lindleys():
    """FIFO, one at a time: what the load generator measures is the recursion, request by request."""
    rng, lock = random.Random(3), asyncio.Lock
    service = [rng.expovariate(1.0) for _ in range(200)]

    class Fifo(StubServer):
        gate = None

        async def handle_async_request(self, request):
            self.gate = self.gate or lock()
            number = len(self.seen)
            self.seen.append(request)
            async with self.gate:
                await asyncio.sleep(service[number])
            content = event({"choices": [{"text": "x", "finish_reason": None}]}) + b"data: [DONE]\n\n"
            return httpx.Response(200, content=content)

    plan = Plan(200, Lengths(answer=(1, 1)))
    calls = measured(plan, 0.8, Fifo(None))
    at = [call.arrival.at for call in calls]
    expected = waits([at[0], *(b - a for a, b in pairwise(at))], service)
    assert [call.ttft for call in calls] == pytest.approx([w + s for w, s in zip(expected, service, strict=True)])


def test_errors_are_counted_by_kind_and_their_times_are_left_out():
    def answer(number):
        if number % 10 == 1:
            return httpx.Response(429)
        if number % 10 == 2:
            return httpx.Response(200, content=event({"error": {"code": "engine_failure"}}))
        if number % 10 == 3:
            return httpx.Response(200, content=event({"choices": [{"text": "x"}]}))  # no [DONE]
        if number % 10 == 4:
            return httpx.Response(200, content=b"data: {nothing\n\n")
        if number % 10 == 5:
            raise httpx.ConnectError("refused")
        if number % 10 == 6:
            raise httpx.ReadError("reset")

    slow = StubServer(lambda number: (60.0 if number % 10 == 7 else 0.2, 0.0), answer)
    found = report(measured(Plan(100), 5.0, slow, timeout_s=30.0), Limit(ttft_s=0.3))
    assert found.errors == {
        "HTTP 429": 10,
        "stream error: engine_failure": 10,
        "ended early": 10,
        "stream error: not JSON": 10,
        "no connection": 10,
        "connection lost": 10,
        "timeout": 10,
    }
    assert found.answered == 30 and found.good == pytest.approx(0.3) and found.ttft.p99 == pytest.approx(0.2)


def test_each_tenant_sends_its_own_key():
    server, keys = StubServer(lambda _: (0.1, 0.0)), {"ada": "key-of-ada", "alan": "key-of-alan"}
    calls = measured(Plan(60, tenants={"ada": 5.0, "alan": 1.0}), 10.0, server, keys)
    sent = [request.headers["authorization"] for request in server.seen]
    assert sent == [f"Bearer key-of-{call.arrival.tenant}" for call in calls]
    assert sent.count("Bearer key-of-ada") > 2 * sent.count("Bearer key-of-alan") > 0


def test_a_load_that_is_cancelled_leaves_no_request_open():
    open_now = 0

    async def send(arrival, start):
        nonlocal open_now
        open_now += 1
        try:
            await asyncio.sleep(1e6)
        finally:
            open_now -= 1

    async def run():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(50):
                await open_loop(Plan(20).at(1.0), send)
        assert open_now == 0

    run_virtual(run())


def test_virtual_time_refuses_what_would_wait_for_ever():
    async def forever():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="waits for something outside"):
        run_virtual(forever())


def test_no_calls_are_no_report():
    with pytest.raises(ValueError, match="nothing to report"):
        report([])
