"""The tour: every stop's receipt, exit status by verdict, JSON as promised, bad input named; here and on a machine
with eight GPUs.
"""

import json
from contextlib import nullcontext

import pytest

from course.commands import tour
from course.kit.receipts import receipt, row
from minillm.__main__ import run
from tests.engine.node.launching import whole_machine


@pytest.mark.parametrize("machine", [nullcontext, pytest.param(whole_machine, marks=pytest.mark.full)])
def test_every_verdict_of_the_collectives_stop_is_ok(machine, tmp_path, capsys, monkeypatch):
    file, printed = tmp_path / "tour.json", []
    stops = tour.tour
    monkeypatch.setattr(tour, "tour", lambda labs: (printed.append(stop[1]) or stop for stop in stops(labs)))
    with machine():
        status = run(["tour", "--labs", "01", "--json", str(file)])
    found = json.loads(file.read_text())
    off = [line for line in found["rows"] if line["verdict"] == "off"]
    noisy = {row.name for made in printed for row in made.rows if row.noisy}  # others on the machine may disturb them
    assert [line for line in off if line["name"] not in noisy] == []
    assert status == (1 if off else 0)
    assert set(found["rows"][0]) == {"lab", "name", "predicted", "measured", "unit", "verdict"}
    assert found["provenance"]["command"]
    assert "ring all-reduce" in capsys.readouterr().out
    assert ("Pretended GPU" in found["provenance"]["hardware"]) == (machine is whole_machine)


def test_exit_status_is_one_if_any_verdict_is_off(monkeypatch, capsys):
    rows = [row("right", 1, 1), row("wrong", 1, 2)]
    monkeypatch.setattr(tour, "tour", lambda labs: iter([("99", receipt("", rows))]))
    assert run(["tour"]) == 1
    assert "2 rows, 1 off" in capsys.readouterr().out


def test_unknown_stop_is_refused_before_anything_runs(capsys):
    assert run(["tour", "--labs", "00,77"]) == 2
    captured = capsys.readouterr()
    assert "--labs 77" in captured.err and "01" in captured.err and "lab 00" not in captured.out


def test_unwritable_json_file_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(tour, "tour", lambda labs: iter([("99", receipt("", [row("right", 1, 1)]))]))
    assert run(["tour", "--json", str(tmp_path / "missing" / "tour.json")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
