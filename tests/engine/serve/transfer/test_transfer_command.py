"""`serve --prefill N --decode M` as processes: answers, metrics, refusals, and that nothing is left."""

import signal

import httpx
import pytest

from minillm.__main__ import run
from minillm.serve import SamplingParams
from tests.engine.api.running import engine
from tests.engine.serve.ranks.test_ranks_command import Server, until

PROMPT = "def main(argument, other):\n    return argument"


@pytest.fixture(params=[("1", "1"), ("2", "2")], ids=["1+1", "2+2"])
def server(request, tmp_path):
    prefill, decode = request.param
    server = Server(tmp_path, "--prefill", prefill, "--decode", decode, "--prefill-least", "4", "--order", "arrival")
    try:
        server.wait()
        yield server
    finally:
        server.process.kill()


def answered(server):
    asked = {"model": "draft", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    return httpx.post(f"{server.url}/v1/completions", json=asked, timeout=240).json()["choices"][0]["text"]


def handovers(server):
    """By outcome."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    found = (line for line in lines if line.startswith("minillm_handovers_total{"))
    return {line.split('outcome="')[1].split('"')[0]: float(line.split()[-1]) for line in found}


@pytest.mark.full
def test_it_answers_as_one_process_and_leaves_nothing(server):
    alone = engine()
    expected = alone.generate([alone.tokenizer.encode(PROMPT)], SamplingParams(12))[0].answers[0].text
    assert answered(server) == expected
    assert handovers(server).get("whole", 0) >= 1
    shown = httpx.get(f"{server.url}/metrics").text
    assert 'minillm_handover_tokens_total{kind="received",model="draft"}' in shown
    assert "minillm_handover_bytes_total" in shown
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == 0, server.text
    assert "Traceback" not in server.text


@pytest.mark.full
@pytest.mark.parametrize("server", [("1", "1")], ids=["1+1"], indirect=True)
def test_its_pool_is_killed_and_it_goes_on(server):
    [rank] = server.ranks()
    rank.kill()
    alone = engine()
    expected = alone.generate([alone.tokenizer.encode(PROMPT)], SamplingParams(12))[0].answers[0].text
    assert answered(server) == expected
    until(lambda: [each for each in server.ranks() if each != rank], "no rank takes its place")
    server.processes += [each.pid for each in server.children()]
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == 0 and "Traceback" not in server.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--decode", "2"], "--decode 2 stands beside --prefill N and in place of --tp"),
        (["--prefill", "1", "--decode", "2", "--tp", "2"], "--decode 2 stands beside --prefill N and in place of --tp"),
        pytest.param(["--prefill", "3"], "8 attention heads do not divide over 3 ", marks=pytest.mark.full),
    ],
)
def test_what_it_refuses_is_one_sentence(arguments, said, capfd):
    assert run(["serve", "--port", "0", *arguments]) == 2
    captured = capfd.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1
