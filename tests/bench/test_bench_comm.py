import json
from types import SimpleNamespace

import pytest
import torch

from minillm.__main__ import run
from minillm.bench import bench, comm
from minillm.bench.harness import Comparison


@pytest.mark.full
def test_smoke(tmp_path, capsys):
    path = tmp_path / "comm.json"
    argv = ["bench", "comm", "--world-sizes", "2", "--sizes", "4k", "--repeats", "5", "--json", str(path)]
    assert run(argv) == 0
    out, saved = capsys.readouterr().out, json.loads(path.read_text())
    assert [row["name"] for row in saved["rows"]] == [f"{c.name}, 2 ranks, 4 KiB" for c in comm.CONTESTS]
    assert all(row["correct"] and row["runs"] == 5 and row["ratio"] > 0 for row in saved["rows"])
    assert all(row["peer"].startswith("gloo ") and row["name"] in out for row in saved["rows"])
    assert {"hardware", "cores", "versions", "date", "command"} <= saved["provenance"].keys()
    assert "Warning" not in out


def test_a_wrong_collective_is_found_before_it_is_timed():
    alone = SimpleNamespace(
        rank=0, world_size=1, device=torch.device("cpu"), barrier=lambda: None, gather_objects=lambda value: [value]
    )

    def contest(error):
        return comm.Contest("sum", "peer", lambda x, group: (lambda: x + error, lambda: x))

    assert comm._compare(contest(0), 4096, alone, 5).correct
    assert comm._compare(contest(1), 4096, alone, 5) == Comparison(False, ())


def test_time_is_that_of_the_slowest_rank():
    one = Comparison(True, ((1.0, 9.0), (5.0, 1.0)))
    two = Comparison(True, ((2.0, 3.0), (4.0, 6.0)))
    assert comm.slowest([one, two]) == Comparison(True, ((2.0, 9.0), (5.0, 6.0)))
    assert not comm.slowest([Comparison(False, ()), Comparison(False, ())]).correct


@pytest.mark.parametrize(
    "argv, message",
    [
        (["nope"], "no benchmark 'nope': choose one of comm"),
        (["comm", "--sizes", "3"], "size 3 must be a positive multiple of 4 bytes"),
        (["comm", "--sizes", "lots"], "--sizes lots is not a list of whole numbers"),
        (["comm", "--world-sizes", "1"], "world sizes [1] must be 2 or more"),
        (["comm", "--repeats", "2"], "repeats=2 is too few"),
    ],
)
def test_bad_input_is_one_line(argv, message, capsys):
    assert run(["bench", *argv]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_option_of_another_benchmark():
    with pytest.raises(ValueError, match="benchmark 'comm' has no option acceptance"):
        bench("comm", acceptance=0.5)
