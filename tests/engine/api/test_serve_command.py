"""`python -m minillm serve` as a process: its refusals, its start without arguments, and its end."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest

from minillm.__main__ import run
from minillm.cli import serve as command
from tests.engine.api.running import engine, until

COMMAND = [sys.executable, "-m", "minillm", "serve"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "give a key with --api-key"),
        (["--api-key", "short"], "fewer than 8 characters"),
        (["--speculate", "magic"], "no proposer 'magic'"),
        (["--dtype", "int3"], "--dtype int3 is unknown"),
        (["--kv", "int2"], "--kv int2 is unknown"),
        (["--model", "/nowhere"], "nowhere"),
    ],
)
def test_bad_options_are_one_sentence(arguments, said, capsys):
    assert run(["serve", "--port", "0", *arguments]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1, told


def test_a_port_that_is_taken_is_one_sentence(capsys):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        assert run(["serve", "--port", str(held.getsockname()[1])]) == 2
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


def test_a_file_of_keys_is_read_line_by_line(tmp_path):
    from minillm.api.limits import Keys

    file = tmp_path / "keys"
    file.write_text("# tenants\nada secret-of-ada\n\nalan secret-of-alan\n")
    assert Keys.read(None, file).tenant("Bearer secret-of-alan") == "alan"
    file.write_text("ada\n")
    with pytest.raises(ValueError, match="line 1: write a tenant's name and its key"):
        Keys.read(None, file)


def test_a_server_over_ranks_shows_where_the_time_of_its_start_went(monkeypatch):
    """Without the ranks: what makes the app of rank 0 gets an engine of this process."""
    made = []
    monkeypatch.setattr(command, "serve_on_ranks", lambda tp, folder, port, app_of, *_, **__: made.append(app_of))
    assert run(["serve", "--model", "draft", "--speculate", "none", "--tp", "2", "--port", "0"]) == 0
    api = made[0](engine()).state.api
    assert list(api.start.phases) == ["process", "imports", "load"]


def test_it_serves_the_committed_model_and_ends_what_is_open_on_sigterm():
    process = subprocess.Popen([*COMMAND, "--port", "0"], stderr=subprocess.PIPE, text=True)
    try:
        first = process.stderr.readline()
        url = re.search(r"http://127.0.0.1:\d+", first)[0]
        log = []
        threading.Thread(target=lambda: log.extend(process.stderr), daemon=True).start()

        def ready():
            assert process.poll() is None, "".join(log)
            try:
                return httpx.get(f"{url}/ready").status_code == 200
            except httpx.TransportError:
                return False

        until(ready)
        (model,) = httpx.get(f"{url}/v1/models").json()["data"]
        assert model["id"] == "target" and model["speculation"] and not model["chat"]
        assert "<title>minillm</title>" in httpx.get(url).text
        asked = {
            "model": "target",
            "prompt": "def ",
            "max_tokens": 300,
            "temperature": 1,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=120) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]" and json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        process.wait(60)
        assert not any("Traceback" in line for line in log)
    finally:
        process.kill()
        process.wait()
