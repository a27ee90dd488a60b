"""Clients that leave, read slowly, have no key, send too much or nonsense: others go on, and no block is lost."""

import asyncio
import json
import random
import socket

import httpx
import pytest

from minillm.serve.engine import LLM
from minillm.serve.requests.params import SamplingParams
from tests.engine.api.running import engine, running, until

from minillm.api.limits import Keys, Limits  # isort: skip

LONG = {"model": "draft", "prompt": "def ", "max_tokens": 400, "temperature": 1, "ignore_eos": True}


def raw(url: str, body: dict, path: str = "/v1/completions") -> socket.socket:
    """A connection that has sent the request and read nothing."""
    host, port = url.removeprefix("http://").split(":")
    found, content = socket.create_connection((host, int(port)), timeout=60), json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", f"host: {host}", "content-type: application/json"]
    found.sendall("\r\n".join([*head, f"content-length: {len(content)}", "", ""]).encode() + content)
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request(served, stream):
    connection = raw(served.url, LONG | {"stream": stream})
    until(lambda: served.llm.unfinished > 0)
    if stream:
        assert connection.recv(15).startswith(b"HTTP/1.1 200")
    before = len(served.llm.records)
    connection.close()
    served.idle()
    assert len(served.llm.records) < before + 200, "it was computed to its end"


def test_a_slow_reader_holds_back_only_itself(served):
    slow = raw(served.url, LONG | {"stream": True, "n": 8})
    until(lambda: served.llm.unfinished > 0)
    quick = httpx.post(f"{served.url}/v1/completions", json=LONG | {"max_tokens": 5}, timeout=60)
    assert quick.status_code == 200
    slow.close()
    served.idle()


def test_keys_are_asked_for_and_belong_to_tenants():
    limits = Limits(per_tenant=1, open_requests=2)
    with running(engine(), limits, Keys({"ada": "secret-of-ada", "alan": "secret-of-alan"})) as found:

        def post(key, **asked):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            return httpx.post(f"{found.url}/v1/completions", json=LONG | asked, headers=headers, timeout=60)

        for wrong in (None, "wrong", "secret-of-ad", "secret-of-alan2"):
            refused = post(wrong, max_tokens=1)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(f"{found.url}/health").status_code == 200
        assert httpx.get(f"{found.url}/metrics").status_code == 401
        host = found.url.removeprefix("http://").split(":")
        held = socket.create_connection((host[0], int(host[1])))
        body = json.dumps(LONG | {"stream": True}).encode()
        held.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret-of-ada\r\n"
                     + f"content-length: {len(body)}\r\n\r\n".encode() + body)  # fmt: skip
        until(lambda: found.llm.unfinished > 0)
        busy = post("secret-of-ada", max_tokens=1)
        assert busy.status_code == 429 and busy.headers["retry-after"] == "1"
        assert post("secret-of-alan", max_tokens=1).status_code == 200
        held.close()
        found.idle()
        until(lambda: post("secret-of-ada", max_tokens=1).status_code == 200)


def test_what_is_too_much_is_refused_with_the_right_status():
    limits = Limits(body_bytes=2000, prompt_tokens=20, samples=2, timeout_s=0.05)
    with running(engine(), limits) as found:
        post = lambda **asked: httpx.post(f"{found.url}/v1/completions", json=LONG | asked, timeout=60)  # noqa: E731
        assert post(prompt="x" * 3000).status_code == 413
        assert "20 are the limit" in post(prompt=[5] * 21).json()["error"]["message"]
        assert "2 are the limit" in post(prompt=["a", "b", "c"]).json()["error"]["message"]
        late = post()
        assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
        streamed = post(stream=True)
        assert streamed.status_code == 200 and '"code":"timeout"' in streamed.text and "[DONE]" not in streamed.text
        chunked = httpx.post(f"{found.url}/v1/completions", content=(b" " * 500 for _ in range(9)), timeout=60)
        assert chunked.status_code == 413
        found.idle()


def test_a_full_queue_is_503_and_an_engine_that_stops_says_so(monkeypatch):
    llm = engine(max_num_seqs=1, max_waiting=1)
    with running(llm) as found:
        held = [raw(found.url, LONG | {"stream": True})]
        until(lambda: len(llm.scheduler.running) == 1)
        held.append(raw(found.url, LONG | {"stream": True}))
        until(lambda: llm.unfinished == 2)
        full = httpx.post(f"{found.url}/v1/completions", json=LONG, timeout=60)
        assert full.status_code == 503 and "the queue is full" in full.json()["error"]["message"]
        for connection in held:
            connection.close()
        found.idle()

        def broken(self):
            raise MemoryError("no memory for this step")

        monkeypatch.setattr(LLM, "advance", broken)
        failed = httpx.post(f"{found.url}/v1/completions", json=LONG, timeout=60)
        assert failed.status_code == 500 and "Traceback" not in failed.text
        monkeypatch.undo()


def test_metrics_count_what_was_answered(served):
    before = {name: served.metric(name) for name in ("minillm_tokens_total", "minillm_ttft_seconds_count")}
    answer = httpx.post(f"{served.url}/v1/completions", json=LONG | {"max_tokens": 7, "prompt": [5, 6, 7]}, timeout=60)
    assert answer.status_code == 200
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert served.metric("minillm_tokens_total") - before["minillm_tokens_total"] == 3 + 7 + cached
    assert served.metric("minillm_ttft_seconds_count") - before["minillm_ttft_seconds_count"] == 1
    assert served.metric("minillm_kv_blocks{") == served.llm.pool.total


BODIES = [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": 5}', b'{"model":"draft","prompt":{"a":1}}', b"[" * 5000]


def malformed(draw: random.Random) -> bytes:
    """A request with one part of it spoilt."""
    body = json.dumps(LONG | {"max_tokens": 3}).encode()
    kind = draw.randrange(4)
    if kind == 0:
        return draw.choice(BODIES)
    if kind == 1:
        place = draw.randrange(len(body))
        return body[:place] + bytes([draw.randrange(256)]) + body[place + 1 :]
    if kind == 2:
        return body[: draw.randrange(len(body))]
    name = draw.choice(["prompt", "max_tokens", "temperature", "stop", "n", "stream", "seed", "logprobs", "model"])
    value = draw.choice([None, -1, 0, 1e308, float("1e-9"), "x", "", [], {}, [[]], [None], True, 2**70, ["a"] * 40])
    return json.dumps(LONG | {"max_tokens": 3, name: value}).encode()


def attacked(found, count: int, seed: int) -> list[int]:
    """Statuses of malformed requests among streams that are read, read slowly, or left."""
    draw = random.Random(seed)

    async def one(client, number):
        if number % 3 == 0:
            answer = await client.post(
                "/v1/completions", content=malformed(draw), headers={"content-type": "application/json"}
            )
            assert answer.status_code != 500 or answer.json()["error"]["request_id"], answer.text
            return answer.status_code
        asked = LONG | {"stream": True, "max_tokens": draw.randint(1, 60), "n": draw.randint(1, 2)}
        leave, slow = draw.random() < 0.5, draw.random() < 0.2
        async with client.stream("POST", "/v1/completions", json=asked) as answer:
            async for _ in answer.aiter_lines():
                if slow:
                    await asyncio.sleep(0.01)
                if leave and draw.random() < 0.2:
                    break
        return answer.status_code

    async def patiently(client, number):
        """As clients do: once more on a connection that was closed while it lay idle in their pool."""
        try:
            return await one(client, number)
        except httpx.TransportError:
            return await one(client, number)

    async def all_of_them():
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=found.url, timeout=300, limits=limits) as client:
            return await asyncio.gather(*(patiently(client, number) for number in range(count)))

    return asyncio.run(all_of_them())


def test_a_crowd_of_bad_clients_costs_nobody_a_block(served):
    statuses = attacked(served, 60, seed=1)
    assert set(statuses) <= {200, 400, 404, 422} and statuses.count(200) > 30
    served.idle()
    answer = served.llm.generate([[5, 6]], SamplingParams(max_tokens=3))
    assert len(answer[0].answers[0].tokens) == 3


@pytest.mark.full
def test_a_larger_crowd():
    with running(engine(max_num_seqs=64)) as found:
        statuses = attacked(found, 500, seed=2)
        assert set(statuses) <= {200, 400, 404, 422, 503}
        found.idle()
