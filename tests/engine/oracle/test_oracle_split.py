"""The oracle finds the usual mistakes with models that are split over tensor and pipeline ranks."""

import json

import pytest

from course.shared.faults import training as faults
from course.shared.faults.strategy import PlantedStrategy
from minillm.__main__ import run
from minillm.equivalence import SPLIT_CASES, ParallelConfig, compare


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "layout", "parameter"),
    [
        (faults.NORM_COUNTS_COPIES, ParallelConfig(tp=2), None),
        (faults.NORM_COUNTS_COPIES, ParallelConfig(dp=2, zero=3, dp_replicate=2), None),
        (faults.NORMS_NOT_SUMMED, ParallelConfig(tp=2, sequence=True), "norm.weight"),
        (faults.TIED_NOT_SUMMED, ParallelConfig(pp=2, accumulate=2), "embedding.weight"),
        (faults.MICROBATCHES_SUMMED, ParallelConfig(pp=2, accumulate=2), ""),
    ],
)
def test_wrong_splits_are_found(fault, layout, parameter):
    (row,) = compare(layout, {"tied": SPLIT_CASES["tied"]}, steps=1, strategy=PlantedStrategy((fault,)))
    assert not row.ok
    if parameter is None:
        assert row.worst_gradient < 1e-10 and row.grad_norm > 1e-3
    else:
        assert row.worst_gradient > 1e-2 and row.parameter.endswith(parameter)


@pytest.mark.full
def test_command_leaves_out_what_cannot_be(tmp_path, capsys):
    path = tmp_path / "oracle.json"
    argv = [
        "oracle",
        "--dp",
        "1",
        "--zero",
        "0,3",
        "--tp",
        "1,2",
        "--sp",
        "1",
        "--microbatches",
        "1",
        "--cases",
        "plain",
    ]
    assert run([*argv, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "4 entries, none off" in out and len(json.loads(path.read_text())["rows"]) == 4
    argv = ["oracle", "--dp", "2", "--zero", "0,2", "--dp-replicate", "2", "--accumulate", "1", "--cases", "tied"]
    assert run(argv) == 0
    out = capsys.readouterr().out
    assert "1 entries, none off" in out and "1 combinations left out" in out and "says where ZeRO's shards lie" in out
    assert run(["oracle", "--pp", "9", "--zero", "0"]) == 2
    assert "no layout is left to compare: 9 parts need 9 layers" in capsys.readouterr().err
