"""SIGTERM under load: what does not end in the time that it has is answered with 503, or with an error event."""

import contextlib
import json
import signal
import threading
from collections.abc import Iterator

from fastapi import FastAPI

from tests.engine.api.router.scripted import EVENT, replicas, silent, stream
from tests.engine.api.running import PATIENCE_S, engine, until
from tests.engine.api.test_clients import LONG, raw

from minillm.api.app import create_app  # isort: skip
from minillm.api.router.app import RouterOptions, create_router
from minillm.api.run import DrainingServer, bind, uvicorn_config


@contextlib.contextmanager
def draining(app: FastAPI, drain_s: float) -> Iterator[tuple[str, DrainingServer]]:
    """Served as the command does; it ends when the test has ended it."""
    bound = bind("127.0.0.1", 0)
    server = DrainingServer(uvicorn_config(app, log_level="error", drain_s=drain_s), lambda: False, drain_s)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    until(lambda: server.started)
    yield f"http://127.0.0.1:{bound.getsockname()[1]}", server
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "the server did not end"


def whole(connection) -> tuple[int, str, bytes]:
    """Status, request id and all that came, of an answer to its end."""
    came = b"".join(iter(lambda: connection.recv(65536), b""))
    head = came.partition(b"\r\n\r\n")[0].decode()
    (request_id,) = [line.split(": ")[1] for line in head.splitlines() if line.startswith("x-request-id: ")]
    return int(head.split()[1]), request_id, came


def error_of(came: bytes) -> dict:
    """The last error in a body or in a stream of events."""
    start = came.rindex(b'{"error":')
    return json.JSONDecoder().raw_decode(came[start:].decode())[0]["error"]


def test_what_does_not_end_in_time_is_answered_with_503_and_nothing_is_left():
    llm = engine(max_num_seqs=1)
    with draining(create_app({"draft": llm}), drain_s=0.0) as (url, server):
        begun = raw(url, LONG | {"stream": True})
        first = begun.recv(15)
        until(lambda: llm.pool.used > 0)
        waiting = [raw(url, LONG | {"stream": streams}) for streams in (True, False)]
        until(lambda: llm.unfinished == 3)
        server.handle_exit(signal.SIGTERM, None)
        answers = [whole(each) for each in waiting]
        rest = b"".join(iter(lambda: begun.recv(65536), b""))
    assert [status for status, _, _ in answers] == [200, 503], "a stream has begun before its first token"
    for _, request_id, came in answers:
        error = error_of(came)
        assert (error["code"], error["type"], error["request_id"]) == ("draining", "server_error", request_id)
    assert first.startswith(b"HTTP/1.1 200") and error_of(rest)["code"] == "draining" and b"[DONE]" not in rest
    assert llm.unfinished == 0 and llm.pool.used == 0


def test_what_ends_in_time_comes_whole():
    llm = engine(max_num_seqs=4)
    with draining(create_app({"draft": llm}), drain_s=PATIENCE_S) as (url, server):
        held = [raw(url, LONG | {"max_tokens": 20, "stream": number % 2 == 0}) for number in range(12)]
        until(lambda: server.config.app.state.api.admission.open.total() == 12)
        server.handle_exit(signal.SIGTERM, None)
        answers = [whole(each) for each in held]
    assert [status for status, _, _ in answers] == [200] * 12
    assert all((b"data: [DONE]" in came) == (number % 2 == 0) for number, (_, _, came) in enumerate(answers))
    assert llm.pool.used == 0


def test_a_router_that_ends_tells_those_whose_answers_have_not():
    with replicas(stream(1000, pause=0.05), silent()) as made:
        app = create_router([each.url for each in made], RouterOptions(policy="round-robin", check_s=0.02))
        with draining(app, drain_s=0.0) as (url, server):
            until(lambda: all(each.state == "ready" for each in app.state.api.fleet.replicas.values()))
            begun = raw(url, LONG | {"stream": True})
            until(lambda: made[0].asked)
            came = begun.recv(4096)
            waiting = raw(url, LONG | {"stream": True})
            until(lambda: made[1].asked)
            server.handle_exit(signal.SIGTERM, None)
            status, request_id, refused = whole(waiting)
            came += b"".join(iter(lambda: begun.recv(65536), b""))
        until(lambda: made[0].gone == made[1].gone == 1, "a replica still computes for a router that has ended")
    assert EVENT % 0 in came and error_of(came)["code"] == "draining"
    assert (status, error_of(refused)["code"], error_of(refused)["request_id"]) == (503, "draining", request_id)
