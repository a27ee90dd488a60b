"""What becomes of a request when replicas fail before, within and after its tokens, and when its client leaves."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from openai import NotFoundError, OpenAI

from minillm.serve.requests.params import SamplingParams
from tests.engine.api.router.scripted import (
    DONE,
    EVENT,
    cut_off,
    failing,
    replicas,
    routed,
    silent,
    stream,
    whole,
)
from tests.engine.api.running import engine, running, until

from minillm.api.limits import Keys, Limits  # isort: skip

pytestmark = pytest.mark.drawn(2)

CLIENT = httpx.Client(timeout=60)  # one for all: each would take as long as a request to set up
ASKED = {"model": "m", "prompt": "def ", "stream": True}
ANSWER = {"choices": [{"text": "whole"}]}


def post(found, headers=None, **asked) -> httpx.Response:
    return CLIENT.post(f"{found.url}/v1/completions", json=ASKED | asked, headers=headers)


def served(made) -> list[int]:
    return [len(each.asked) for each in made]


def test_a_stream_comes_through_byte_by_byte_and_a_body_whole():
    with replicas(stream(5), whole(ANSWER)) as made, routed([each.url for each in made]) as found:
        assert post(found).content == b"".join(EVENT % number for number in range(5)) + DONE
        assert post(found).json() == ANSWER
        head, body = made[0].asked[0]
        assert body == ASKED and head.startswith("POST /v1/completions")


def test_the_id_of_a_request_is_one_for_client_router_and_replica():
    with replicas(whole(ANSWER)) as made, routed([made[0].url]) as found:
        answer = post(found, headers={"authorization": "Bearer secret-of-ada", "cookie": "not sent on"})
        head = made[0].asked[0][0].lower()
        assert f"x-request-id: {answer.headers['x-request-id']}\r\n" in head
        assert "authorization: bearer secret-of-ada\r\n" in head and "cookie" not in head


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        (cut_off(), "lost"),
        (stream(3, breaks_after=0), "lost"),
        (failing("draining", "503 Service Unavailable"), "draining"),
        (failing("overloaded", "503 Service Unavailable"), "overloaded"),
        (failing("engine_failure", "500 Internal Server Error"), "engine_failure"),
        (stream(0, begins=b'data: {"error":{"code":"engine_failure"}}\n\n'), "engine_failure"),
    ],
)
def test_what_had_no_token_is_sent_to_another_replica(script, outcome):
    with replicas(script, stream(4)) as made, routed([each.url for each in made]) as found:
        assert post(found).content.endswith(DONE)
        assert served(made) == [1, 1]
        metrics = CLIENT.get(f"{found.url}/metrics").text
        assert f'minillm_router_retries_total{{outcome="{outcome}"}} 1.0' in metrics


def test_what_had_tokens_is_not_sent_again_and_its_client_is_told():
    with replicas(stream(9, breaks_after=3), stream(9)) as made, routed([each.url for each in made]) as found:
        answer = post(found)
        *events, last = [line for line in answer.text.split("\n\n") if line]
        assert events == [(EVENT % number).decode().rstrip() for number in range(3)]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "replica_lost" and error["request_id"] == answer.headers["x-request-id"]
        assert served(made) == [1, 0] and "minillm_router_lost_streams_total 1.0" in metrics_of(found)


def metrics_of(found) -> str:
    return CLIENT.get(f"{found.url}/metrics").text


@pytest.mark.parametrize("status", ["400 Bad Request", "429 Too Many Requests", "404 Not Found"])
def test_an_answer_that_another_replica_would_give_too_comes_through(status):
    with replicas(failing("bad", status), stream(4)) as made, routed([each.url for each in made]) as found:
        answer = post(found)
        assert answer.status_code == int(status[:3]) and answer.json()["error"]["code"] == "bad"
        assert served(made) == [1, 0]


def test_a_request_that_fails_alone_ejects_no_replica():
    failed = failing("request_failed", "500 Internal Server Error")
    with replicas(failed, stream(2)) as made, routed([each.url for each in made]) as found:
        assert post(found).json()["error"]["code"] == "request_failed"
        assert [found.state(each.url) for each in made] == ["ready", "ready"] and served(made) == [1, 0]


def test_a_replica_that_says_nothing_is_given_up_after_the_timeout():
    with replicas(silent()) as made, routed([made[0].url], Limits(timeout_s=0.3)) as found:
        answer = post(found, stream=False)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")


@pytest.mark.parametrize("path", ["/v1/models/../../admin", "/v1/models/%2e%2e/%2e%2e/admin", "/v1/models/./x"])
def test_no_path_leads_out_of_the_interface(path):
    with replicas(whole(ANSWER)) as made, routed([made[0].url]) as found:
        address = httpx.URL(found.url)
        with socket.create_connection((address.host, address.port)) as line:
            head = f"host: 127.0.0.1:{address.port}\r\nconnection: close"
            line.sendall(f"GET {path} HTTP/1.1\r\n{head}\r\n\r\n".encode())
            assert b" 404 " in line.makefile("rb").readline()
        assert served(made) == [0]


@pytest.mark.parametrize("keys", [Keys({}), Keys({"ada": "secret-of-ada"})])
def test_the_page_comes_from_a_replica_with_keys_and_without(keys):
    with replicas(whole(ANSWER)) as made, routed([made[0].url], keys=keys) as found:
        assert CLIENT.get(f"{found.url}/").status_code == 200


def test_the_operators_key_is_not_sent_on():
    keys = Keys({"ada": "secret-of-ada", "operator": "secret-of-operator"})
    with replicas(whole(ANSWER), whole(ANSWER)) as made, routed([each.url for each in made], keys=keys) as found:
        assert post(found, headers={"authorization": "Bearer secret-of-operator"}).json() == ANSWER
        assert post(found, headers={"authorization": "Bearer secret-of-ada"}).json() == ANSWER
        heads = [each.asked[0][0].lower() for each in made]
        assert "authorization" not in heads[0] and "authorization: bearer secret-of-ada\r\n" in heads[1]


def test_a_dead_replica_is_ejected_and_returns():
    with replicas(stream(2), stream(2)) as made, routed([each.url for each in made]) as found:
        made[0].ready = False
        until(lambda: found.state(made[0].url) == "ejected")
        assert all(post(found).content.endswith(DONE) for _ in range(4)) and served(made) == [0, 4]
        made[0].ready = True
        until(lambda: found.state(made[0].url) == "ready")
        assert all(post(found).content.endswith(DONE) for _ in range(4)) and served(made) == [2, 6]


def test_a_replica_that_refuses_connections_is_ejected_by_the_first_request():
    with replicas(stream(2), stream(2)) as made, routed([each.url for each in made], check_s=30.0) as found:
        made[0].loop.call_soon_threadsafe(made[0].server.close)
        until(lambda: not made[0].server.is_serving())
        assert all(post(found).content.endswith(DONE) for _ in range(3))
        assert found.state(made[0].url) == "ejected" and served(made) == [0, 3]
        refused = f'minillm_router_attempts_total{{outcome="refused",replica="{made[0].url}"}} 1.0'
        assert refused in metrics_of(found)


def test_a_request_without_a_token_leaves_a_replica_that_hangs():
    with replicas(silent(), stream(2)) as made, routed([each.url for each in made], check_s=0.05) as found:
        made[0].ready = False
        assert post(found).content.endswith(DONE) and served(made)[1] == 1
        until(lambda: made[0].gone == served(made)[0])


def test_the_budget_ends_a_storm_of_retries():
    """Every attempt fails: three attempts each would be 60; 20 requests and a budget of 2 + 20 · 0.1 make 24."""
    scripts = [failing("overloaded", "503 Service Unavailable") for _ in range(3)]
    options = {"retry_share": 0.1, "retry_reserve": 2.0}
    with replicas(*scripts) as made, routed([each.url for each in made], **options) as found:
        answers = [post(found) for _ in range(20)]
        assert {each.status_code for each in answers} == {503}
        assert 20 < sum(served(made)) <= 24
        assert "minillm_router_retries_refused_total 1" in metrics_of(found)


def test_without_a_replica_it_says_so():
    with routed([]) as found:
        answer = post(found)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_replica"
        assert answer.headers["retry-after"] == "1"
        assert CLIENT.get(f"{found.url}/ready").status_code == 503
        assert CLIENT.get(f"{found.url}/health").status_code == 200


@pytest.mark.parametrize("script", [silent(), stream(1000, pause=0.05)])
def test_a_client_that_leaves_ends_its_request_at_the_replica(script):
    with replicas(script) as made, routed([made[0].url]) as found:
        host, port = found.url.removeprefix("http://").split(":")
        body = json.dumps(ASKED).encode()
        with socket.create_connection((host, int(port)), timeout=60) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            until(lambda: served(made) == [1])
        until(lambda: made[0].gone == 1, "the replica still writes for a client that left")
        found.idle()


def test_a_drained_replica_ends_what_it_has_and_gets_nothing():
    with replicas(stream(20, pause=0.02), stream(2)) as made, routed([each.url for each in made]) as found:
        with CLIENT.stream("POST", f"{found.url}/v1/completions", json=ASKED) as answer:
            lines = answer.iter_lines()
            next(lines)
            gone = CLIENT.delete(f"{found.url}/replicas", params={"url": made[0].url, "wait_s": 0.001})
            assert gone.json() == {"url": made[0].url, "outstanding": 1}
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and len(rest) == 20
        assert all(post(found).content.endswith(DONE) for _ in range(3)) and served(made) == [1, 3]
        assert [each["url"] for each in CLIENT.get(f"{found.url}/replicas").json()] == [made[1].url]


def test_prefixes_stay_with_their_replica():
    many = [stream(1) for _ in range(4)]
    with replicas(*many) as made, routed([each.url for each in made], policy="prefix-affinity") as found:
        for number in range(24):
            prompt = f"{number % 3} " + "the same words again " * 20 + f"{number}"
            post(found, prompt=prompt)
        homes = [{body["prompt"][0] for _, body in each.asked} for each in made]
        assert sum(map(len, homes)) == 3 and sum(served(made)) == 24


def test_keys_and_limits_are_checked_before_a_replica_is_asked():
    keys = Keys({"ada": "secret-of-ada", "operator": "secret-of-operator"})
    with replicas(whole(ANSWER)) as made, routed([made[0].url], Limits(body_bytes=200), keys) as found:
        assert post(found).status_code == 401
        ada = {"authorization": "Bearer secret-of-ada"}
        assert post(found, ada, prompt="x" * 500).status_code == 413
        assert served(made) == [0]
        assert post(found, ada).json() == ANSWER
        assert CLIENT.get(f"{found.url}/replicas", headers=ada).status_code == 403
        operator = {"authorization": "Bearer secret-of-operator"}
        assert CLIENT.get(f"{found.url}/replicas", headers=operator).json()[0]["state"] == "ready"


@pytest.mark.parametrize("url", ["", "nonsense", "ftp://x", "http://", "http://user:word@host", "http://host?x=1"])
def test_what_is_no_url_is_refused(url):
    with routed([]) as found:
        assert CLIENT.post(f"{found.url}/replicas", json={"url": url}).status_code == 400
        assert CLIENT.post(f"{found.url}/replicas/count", json={"count": 2}).json()["error"]["code"] == "no_spawn"


@pytest.mark.parametrize("wait_s", ["abc", "nan", "inf", "-1", ""])
def test_a_time_to_wait_that_is_none_is_refused_as_everything_else_is(wait_s):
    with replicas(whole(ANSWER)) as made, routed([made[0].url]) as found:
        answer = CLIENT.delete(f"{found.url}/replicas", params={"url": made[0].url, "wait_s": wait_s})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["type"] == "invalid_request_error" and error["param"] == "wait_s"
        assert repr(wait_s) in error["message"] and "\n" not in error["message"]
        assert [each["state"] for each in CLIENT.get(f"{found.url}/replicas").json()] != ["draining"]


def test_all_that_waits_at_a_replica_moves_when_it_dies_whatever_the_budget():
    """Thirty requests without a token; a budget for retries would be two."""
    options = {"retry_share": 0.0, "retry_reserve": 2.0, "check_s": 30.0}
    with replicas(silent(), stream(3)) as made, routed([each.url for each in made], **options) as found:
        found.router.fleet.of(made[1].url).health.eject()
        with ThreadPoolExecutor(30) as pool:
            answers = [pool.submit(post, found) for _ in range(30)]
            until(lambda: served(made) == [30, 0])
            found.router.fleet.of(made[1].url).health.ready = True
            made[0].die()
            assert all(each.result().content.endswith(DONE) for each in answers)
        assert found.router.budget.balance == 2.0 and served(made) == [30, 30]


def test_an_openai_client_gets_the_engines_tokens_through_the_router():
    with running(engine()) as first, running(engine()) as second, routed([first.url, second.url]) as found:
        client = OpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0)
        right = first.llm.generate(["def "], SamplingParams(max_tokens=12))[0].answers[0].text
        asked = {"model": "draft", "prompt": "def ", "max_tokens": 12, "temperature": 0}
        for _ in range(2):
            assert client.completions.create(**asked).choices[0].text == right
            assert "".join(each.choices[0].text for each in client.completions.create(**asked, stream=True)) == right
        assert [each.id for each in client.models.list()] == ["draft"]
        with pytest.raises(NotFoundError, match="no model 'other' here"):
            client.completions.create(**asked | {"model": "other"})
        for each in (first, second):
            assert each.metric("minillm_requests_total") >= 2
            each.idle()


def test_another_path_may_say_whether_a_replica_is_ready():
    with replicas(stream(2)) as made:
        made[0].ready = False  # what its /ready says
        with routed([made[0].url], check_path="/health") as found:
            assert post(found).content.endswith(DONE)


def test_metrics_show_a_tenant_its_own_rows_and_the_routers():
    secrets = {"ada": "secret-of-ada", "alan": "secret-of-alan", "operator": "secret-of-operator"}
    with replicas(stream(2)) as made, routed([made[0].url], keys=Keys(secrets)) as found:
        headers = {name: {"authorization": f"Bearer {secret}"} for name, secret in secrets.items()}
        for name, count in (("ada", 2), ("alan", 1)):
            assert all(post(found, headers[name]).content.endswith(DONE) for _ in range(count))
        found.idle()  # what has ended is counted
        texts = {name: CLIENT.get(f"{found.url}/metrics", headers=headers[name]).text for name in secrets}
        for name, other, count in (("ada", "alan", 2), ("alan", "ada", 1)):
            assert other not in texts[name]
            for row in (
                f'minillm_router_requests_total{{status="200",tenant="{name}"}} {count}.0',
                f'minillm_router_ttft_seconds_count{{tenant="{name}"}} {count}.0',
            ):
                assert row in texts[name] and row in texts["operator"]
        router = f'minillm_router_attempts_total{{outcome="200",replica="{made[0].url}"}} 3.0'
        assert all(router in text for text in texts.values())
        assert CLIENT.get(f"{found.url}/metrics").status_code == 401
