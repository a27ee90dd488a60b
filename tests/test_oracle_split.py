"""The oracle over tensor and pipeline axes: every kind of split equals one process, usual mistakes are found."""

import json

import pytest

from minillm.__main__ import run
from minillm.equivalence import CONTEXT_CASES, SPLIT_CASES, ParallelConfig, compare
from minillm.parallel.placement import global_norm
from minillm.train.strategies.hybrid import Hybrid


@pytest.mark.slow
def test_splits_of_two_ranks_equal_one_process():
    schedules = [
        ("gpipe", 1),
        ("1f1b", 5),
        ("interleaved", 4),
        ("zero_bubble", 2),
        ("zero_bubble_v", 4),
        ("dualpipe", 5),
    ]
    layouts = [ParallelConfig(pp=2, accumulate=count, schedule=schedule) for schedule, count in schedules]
    layouts += [ParallelConfig(tp=2), ParallelConfig(tp=2, sequence=True, accumulate=2)]
    rows = compare(layouts, {name: SPLIT_CASES[name] for name in ("frozen tied", "clipped")}, steps=2)
    assert len(rows) == 2 * len(layouts) and all(row.ok for row in rows), [row for row in rows if not row.ok]


@pytest.mark.slow
def test_products_of_axes_equal_one_process():
    four = [
        ParallelConfig(dp=2, tp=2, sequence=True, zero=1, accumulate=2),
        ParallelConfig(dp=2, tp=2, zero=2, accumulate=2),
        ParallelConfig(dp=2, tp=2, sequence=True, zero=3, accumulate=2),
        ParallelConfig(dp=2, pp=2, zero=2, accumulate=3),
        ParallelConfig(dp=2, pp=2, zero=3, accumulate=4, schedule="zero_bubble_v"),
        ParallelConfig(dp=2, pp=2, zero=3, accumulate=4, schedule="dualpipe"),
        ParallelConfig(dp=4, zero=2, dp_replicate=2, accumulate=2),
        ParallelConfig(dp=4, zero=3, dp_replicate=2, accumulate=2),
        ParallelConfig(tp=4, sequence=True),
        ParallelConfig(pp=4, accumulate=4, schedule="interleaved"),
    ]
    cube = [ParallelConfig(dp=2, tp=2, sequence=True, pp=2, accumulate=2, zero=zero) for zero in (0, 3)]
    cases = {name: SPLIT_CASES[name] for name in ("frozen tied", "unequal", "clipped")}
    rows = compare(four, cases, steps=2)
    rows += compare(cube, {"tied": SPLIT_CASES["tied"]}, steps=2)
    assert len(rows) == 3 * len(four) + 2 and all(row.ok for row in rows), [row for row in rows if not row.ok]


@pytest.mark.slow
def test_what_several_stages_hold_keeps_the_same_bits_on_them():
    """Three replicas: then a ring's sums depend on the order in which it adds, which differs along a bucket."""
    common = {"dp": 3, "pp": 2, "accumulate": 2}
    rows = compare(ParallelConfig(**common, zero=3), {"tied": CONTEXT_CASES["tied"]})
    both_ways = [ParallelConfig(**common | {"accumulate": 4}, schedule="dualpipe", zero=zero) for zero in (0, 1)]
    rows += compare(both_ways, {"tied": SPLIT_CASES["tied"]}, steps=2)
    assert len(rows) == 3 and all(row.ok for row in rows), rows


class CountsEverything(Hybrid):
    """The norm counts what several ranks hold once for each of them."""

    def grad_norm(self, parameters):
        return global_norm(self.stepped.gradients(), None, self.group)


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
