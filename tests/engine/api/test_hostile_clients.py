"""Requests made to hurt: wrong types, lone surrogates, a million items, bodies that never end, streams nobody reads."""

import gc
import json
import logging
import socket
import threading

import httpx
import pytest

from minillm.serve.requests.params import Token
from tests.engine.api.running import engine, running, until
from tests.engine.api.test_clients import LONG, raw

from minillm.api import run as run_module  # isort: skip
from minillm.api.answers import Shape, TextOffsets, event
from minillm.api.app import Api, create_app
from minillm.api.connection import check_ending
from minillm.api.limits import ApiError, Keys, Limits
from minillm.api.protocol import ChatRequest, CompletionRequest, parsed
from minillm.api.run import bind, url_of

HEAD = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n"


def connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def post(served, path: str = "completions", **asked) -> httpx.Response:
    content = json.dumps({"model": "draft", "max_tokens": 2} | asked)  # httpx itself refuses NaN and surrogates
    return httpx.post(f"{served.url}/v1/{path}", content=content, timeout=60)


@pytest.mark.parametrize("prompt", ["\ud800", ["a", "\udfff"]])
def test_a_lone_surrogate_is_400(served, prompt):
    assert post(served, prompt=prompt).status_code == 400
    messages = [{"role": "user", "content": prompt if isinstance(prompt, str) else prompt[1]}]
    refused = post(served, "chat/completions", messages=messages)
    assert refused.status_code == 400 and "surrogate" in refused.json()["error"]["message"]


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages[0].content + 3 }}", "{{ raise_exception('no') }}"])
def test_a_template_that_fails_is_400(served, monkeypatch, template):
    monkeypatch.setattr(served.llm.tokenizer, "chat_template", template)
    refused = post(served, "chat/completions", messages=[{"role": "user", "content": "x"}])
    assert refused.status_code == 400 and "chat template" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("max_tokens", "n", "seed", "logprobs") for value in (True, "5", 5.0)),
        *((name, value) for name in ("temperature", "top_p") for value in (True, "1", float("nan"), float("inf"))),
        ("prompt", [True, 5]),
        ("stream", 1),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_a_value_of_another_type_is_refused(served, name, value):
    refused = post(served, **{"prompt": "def ", name: value})
    assert refused.status_code == 400 and refused.json()["error"]["param"].startswith(name)


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        (CompletionRequest, {"prompt": [1.5] * 1000}),
        (CompletionRequest, {"prompt": [1] * 1000 + ["x"]}),
        (CompletionRequest, {"prompt": "x", "stop": [1] * 1000}),
        (ChatRequest, {"messages": [1] * 1000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 1000}]}),
    ],
)
def test_a_long_list_is_refused_with_its_first_wrong_item(kind, asked):
    with pytest.raises(ApiError) as caught:
        parsed(kind, {"model": "draft"} | asked)
    assert caught.value.__cause__.error_count() < 10


def test_a_long_prompt_becomes_tokens_while_others_are_answered(served, monkeypatch):
    encode, others = served.llm.tokenizer.encode, threading.Event()

    def slow(text):
        assert others.wait(30), "the event loop waited for the tokenizer"
        return encode(text)

    monkeypatch.setattr(served.llm.tokenizer, "encode", slow)
    connection = raw(served.url, LONG | {"max_tokens": 1})
    assert httpx.get(f"{served.url}/health", timeout=20).status_code == 200
    others.set()
    assert connection.recv(15).startswith(b"HTTP/1.1 200")


def test_too_many_prompts_are_refused_before_they_become_tokens(served, monkeypatch):
    encoded = []
    monkeypatch.setattr(served.llm.tokenizer, "encode", encoded.append)
    assert post(served, prompt=["a"] * 17).status_code == 400
    assert not encoded


def test_an_error_does_not_send_back_all_that_was_sent(served):
    for asked in ({"model": "m" * 100_000}, {"x" * 100_000: 1}):
        assert len(post(served, **{"prompt": "a"} | asked).content) < 2000


def test_a_client_that_leaves_amid_its_body_is_no_fault_and_frees_its_place(served):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(handler)
    before = served.metric('minillm_requests_total{model="",status="499"')
    try:
        connection = connected(served.url)
        connection.sendall(HEAD.format(500).encode() + b"{")
        until(lambda: served.api.admission.open.total() == 1)
        connection.close()
        until(lambda: served.metric('minillm_requests_total{model="",status="499"') == before + 1)
        served.idle()
    finally:
        logger.removeHandler(handler)
    assert not [record for record in records if record.levelno >= logging.ERROR]


def test_a_client_that_leaves_before_its_answer_logs_nothing(served, caplog):
    connection = raw(served.url, LONG)
    until(lambda: served.llm.unfinished > 0)
    connection.close()
    served.idle()
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_a_body_that_does_not_end_is_408_and_closes(monkeypatch):
    monkeypatch.setattr(run_module, "FIRST_REQUEST_S", 0.2)
    with running(engine(), Limits(body_s=0.1, timeout_s=0.3, unread_s=0.1)) as found:
        connection = connected(found.url)
        connection.sendall(HEAD.format(500).encode() + b"{")
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 408") and b"connection: close" in answer.lower()
        silent = connected(found.url)
        assert silent.recv(1) == b"", "a connection that sends nothing stays open"
        unread = raw(found.url, LONG | {"stream": True, "n": 16, "logprobs": 20})  # more than the buffers between
        until(lambda: found.api.admission.open.total() == 1)
        found.idle()
        unread.close()


def test_an_engine_that_has_stopped_is_neither_ready_nor_healthy(monkeypatch):
    llm = engine()
    with running(llm) as found:
        assert httpx.get(f"{found.url}/ready").status_code == 200

        def broken():
            raise MemoryError("no memory for this step")

        monkeypatch.setattr(llm, "advance", broken)
        assert post(found, prompt="a").status_code == 500
        assert [httpx.get(f"{found.url}/{path}").status_code for path in ("ready", "health")] == [503, 503]
        assert post(found, prompt="a").json()["error"]["code"] == "engine_failure"


def test_a_fault_has_a_request_id_in_its_header_and_in_the_log(served, monkeypatch):
    async def faulty(*_):
        raise KeyError("secret detail")

    records = []
    monkeypatch.setattr(Api, "submit", faulty)
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "error", lambda *given, **_: records.append(str(given)))
    failed = post(served, prompt="a")
    request_id = failed.json()["error"]["request_id"]
    assert failed.status_code == 500 and failed.headers["x-request-id"] == request_id
    assert "secret" not in failed.text and any(request_id in record for record in records)
    served.idle()


def test_waiting_requests_are_counted_beside_a_request_of_many_samples():
    llm = engine(max_num_seqs=8)
    with running(llm) as found:
        held = [raw(found.url, LONG | {"n": 8, "stream": True})]
        until(lambda: len(llm.scheduler.running) == 8)
        held += [raw(found.url, LONG | {"stream": True}) for _ in range(3)]
        until(lambda: found.metric("minillm_waiting_requests{") == 3, "the queue of three is not shown")
        for connection in held:
            connection.close()
        found.idle()


def test_every_chunk_has_usage_if_it_is_asked_for(served):
    asked = {"prompt": "def ", "stream": True, "stream_options": {"include_usage": True}}
    lines = [line for line in post(served, **asked).text.split("\n\n") if line]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["usage"]["completion_tokens"] == 2 and chunks[-1]["choices"] == []


def test_streamed_offsets_are_those_of_the_whole_answer_while_text_is_held_back(served):
    text = post(served, prompt="def ", temperature=0, max_tokens=20).json()["choices"][0]["text"]
    asked = {"prompt": "def ", "temperature": 0, "max_tokens": 20, "logprobs": 1, "stop": text[2:9] + "\ufffe"}
    whole = post(served, **asked).json()["choices"][0]["logprobs"]["text_offset"]
    lines = post(served, **asked, stream=True).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [offset for each in logprobs if each for offset in each["text_offset"]] == whole


def test_parts_of_a_character_have_their_bytes_and_its_offset(served):
    tokenizer = served.llm.tokenizer
    ids = tokenizer.encode("a\u20ac\U0001f600b")
    tokens = [Token(token, -1.0, ((token, -float("inf")),)) for token in ids]
    chat = Shape("draft", tokenizer, True)._logprobs(tokens, TextOffsets(tokenizer))["content"]
    assert bytes(byte for each in chat for byte in each["bytes"]).decode() == "a\u20ac\U0001f600b"
    plain = Shape("draft", tokenizer, False)._logprobs(tokens, TextOffsets(tokenizer))
    assert len(ids) > 4 and plain["text_offset"][-1] == 3 and plain["text_offset"][0] == 0
    assert json.dumps(plain, allow_nan=False)


def test_a_sample_that_was_cut_off_did_not_stop():
    for reason in ("cancelled", "failed", "timeout", None):
        with pytest.raises(ApiError):
            check_ending(reason)
    check_ending("stop")


def test_an_event_is_one_line_to_any_client():
    assert len(event({"text": "a\u0085b\u2028c"}).decode().splitlines()) == 2


def test_a_key_may_have_any_characters_and_belongs_to_one_tenant(tmp_path):
    keys = Keys({"ada": "gr\u00fc\u00dfe-an-ada"})
    assert keys.tenant("bearer " + "gr\u00fc\u00dfe-an-ada".encode().decode("latin-1")) == "ada"
    with pytest.raises(ApiError):
        keys.tenant("Bearer \u20ac")
    file = tmp_path / "keys"
    file.write_text("ada secret-of-both\nalan secret-of-both\n")
    with pytest.raises(ValueError, match="line 2: 'alan' has the key of another tenant"):
        Keys.read(None, file)


def test_an_address_of_ipv6_is_a_url():
    try:
        listening = bind("::1", 0)
    except ValueError:
        pytest.skip("this machine has no IPv6")
    with listening:
        assert url_of("::1", listening) == f"http://[::1]:{listening.getsockname()[1]}"


@pytest.mark.parametrize("sent", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/9\r\nhost: x\r\n\r\n"])
def test_what_is_not_http_is_answered_with_an_id(served, sent):
    with connected(served.url) as connection:
        connection.sendall(sent)
        head, _, body = b"".join(iter(lambda: connection.recv(4096), b"")).partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert head.startswith(b"HTTP/1.1 400") and error["code"] == "not_http"
    assert f"x-request-id: {error['request_id']}".encode() in head


LOCAL = ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:1", "[::1]:8000", "127.9.9.9:80"]
ELSEWHERE = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "192.168.0.9",
    "127.0.0.1.nip.io",
    "[::2]",
    "",
]


@pytest.mark.parametrize("host", LOCAL + ELSEWHERE)
def test_without_keys_only_names_of_this_machine_are_answered(served, host):
    for path in ("/", "/v1/models", "/health"):
        answer = httpx.get(f"{served.url}{path}", headers={"host": host})
        assert answer.status_code == (200 if host in LOCAL else 403), (host, path)


def test_without_keys_no_page_from_elsewhere_is_answered(served):
    name = served.url.removeprefix("http://")
    for origin, status in ((served.url, 200), ("http://evil.example", 403), ("null", 403), (f"https://{name}", 403)):
        content = json.dumps({"model": "draft", "prompt": "def ", "max_tokens": 2})
        headers = {"origin": origin, "content-type": "text/plain"}  # which a browser sends without asking first
        answer = httpx.post(f"{served.url}/v1/completions", content=content, headers=headers, timeout=60)
        assert answer.status_code == status, origin
    assert answer.json()["error"]["code"] == "origin_not_allowed"


def test_with_keys_any_name_is_answered():
    with running(engine(), keys=Keys({"ada": "secret-of-ada"})) as found:
        headers = {"authorization": "Bearer secret-of-ada", "host": "models.example", "origin": "https://app.example"}
        assert httpx.get(f"{found.url}/v1/models", headers=headers).status_code == 200


@pytest.mark.full
def test_a_client_that_reads_nothing_does_not_hold_up_the_end(monkeypatch):
    """Its answer does not fit the buffers between; one that is read meanwhile comes to its end."""
    monkeypatch.setattr(run_module, "UNREAD_LOOKS", 1)
    app = create_app({"draft": engine()})
    listening = bind("127.0.0.1", 0)
    server = run_module.DrainingServer(run_module.uvicorn_config(app, log_level="error"), lambda: False)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    until(lambda: server.started)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    unread = raw(url, LONG | {"stream": True, "n": 16, "logprobs": 20})
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        connections = server.server_state.connections
        until(lambda: any(each.flow.write_paused for each in connections), "all of it fitted the buffers")
        server.should_exit = True
        assert [line for line in lines if line][-1] == "data: [DONE]"
    thread.join(60)
    assert not thread.is_alive()
    unread.close()
