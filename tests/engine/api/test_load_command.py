"""`python -m minillm load` against the real server: every request answered, counted and reported; refusals."""

import json

import pytest

from minillm.__main__ import run
from tests.engine.api.running import engine, running

pytest.importorskip("httpx")


def test_it_loads_a_server_at_two_rates(served, tmp_path, capsys):
    file, picture = tmp_path / "load.json", tmp_path / "load.png"
    arguments = [
        *("load", served.url, "--rate", "40,80", "--requests", "20", "--lengths", "8-16:4", "--prefix", "8"),
        *("--json", str(file), "--figure", str(picture)),
    ]
    assert run(arguments) == 0
    found = json.loads(file.read_text())
    assert [row["answered"] for row in found["rows"]] == [20, 20] and "command" in found["provenance"]
    for row in found["rows"]:
        assert 0 < row["ttft"]["p50"] <= row["ttft"]["p90"] <= row["ttft"]["p99"] <= row["end_to_end"]["p99"]
        assert row["errors"] == {} and row["tokens_per_s"] > 0
    assert picture.stat().st_size > 10_000
    assert capsys.readouterr().out.count("20 of 20") == 2
    assert served.metric('minillm_tokens_total{kind="answer"') == 2 * 20 * 4


def test_a_request_that_is_refused_is_an_error_of_its_kind(served, capsys):
    assert run(["load", served.url, "--rate", "100", "--requests", "4", "--lengths", "5000:4"]) == 1
    assert "4 of 4 failed: HTTP 400" in capsys.readouterr().out


def test_tenants_are_reported_apart(tmp_path, capsys):
    from minillm.api.limits import Keys

    keys, file = tmp_path / "keys", tmp_path / "load.json"
    keys.write_text("ada key-of-ada\nalan key-of-alan\n")
    with running(engine(), keys=Keys.read(None, keys)) as server:
        arguments = ["--requests", "12", "--lengths", "4:2", "--rate", "200", "--json", str(file)]
        assert run(["load", server.url, "--tenants", str(keys), "--shares", "ada=3,alan=1", *arguments]) == 0
        assert run(["load", server.url, *arguments]) == 2  # without a key
    row = json.loads(file.read_text())["rows"][0]
    assert sum(each["answered"] for each in row["tenants"].values()) == row["answered"] == 12
    assert "check its key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rate", "0"], "--rate 0: write requests per second above 0"),
        (["--rate", "a,2"], "--rate a,2: write"),
        (["--lengths", "3"], "--lengths 3: write PROMPT:ANSWER"),
        (["--prefix", "65"], "shared_prefix 65"),
        (["--trace", "/nowhere.jsonl"], "/nowhere.jsonl cannot be read"),
        (["--shares", "ada=1"], "there is no key of 'ada'"),
        ([], "http://127.0.0.1:9 does not answer"),
    ],
)
def test_bad_options_are_one_sentence(arguments, said, capsys):
    assert run(["load", "http://127.0.0.1:9", *arguments]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1, told
