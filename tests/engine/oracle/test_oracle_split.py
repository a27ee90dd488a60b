"""The oracle finds the usual mistakes with models that are split over tensor and pipeline ranks."""

import json

import pytest

from minillm.__main__ import run
from minillm.equivalence import SPLIT_CASES, ParallelConfig, compare
from minillm.parallel.sharding.placement import global_norm
from minillm.train.strategies.hybrid import Hybrid


class CountsEverything(Hybrid):
    """The norm counts what several ranks hold once for each of them."""

    def grad_norm(self, parameters):
        return global_norm(self.stepped.gradients_by_name(), None, self.group)


class LeavesOut(Hybrid):
    """The sums over tp and pp are missing."""

    def finish_backward(self):
        pass


class DividesByMicrobatches(Hybrid):
    def loss_divisor(self, weight):
        return super().loss_divisor(weight) * self.layout.accumulate


@pytest.mark.parametrize(
    ("strategy", "layout", "parameter"),
    [
        (CountsEverything, ParallelConfig(tp=2), None),
        (CountsEverything, ParallelConfig(dp=2, zero=3, dp_replicate=2), None),
        (LeavesOut, ParallelConfig(tp=2, sequence=True), "norm.weight"),
        (LeavesOut, ParallelConfig(pp=2, accumulate=2), "embedding.weight"),
        (DividesByMicrobatches, ParallelConfig(pp=2, accumulate=2), ""),
    ],
)
def test_wrong_splits_are_found(strategy, layout, parameter):
    (row,) = compare(layout, {"tied": SPLIT_CASES["tied"]}, steps=1, strategy=strategy)
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
