import pytest

from minillm.__main__ import run
from minillm.bench import tensor
from minillm.comm import launch


@pytest.mark.full
def test_smoke():
    rows = {row.name: row for row in tensor.run(world_sizes=(2,), shapes=("tiny",), repeats=5)}
    assert len(rows) == 12 and all(row.correct and row.ratio > 0 for row in rows.values())


def test_gradients_that_differ_are_found_before_they_are_timed():
    def unlike(group):
        from minillm.bench import tensor as ours

        ours.TOLERANCE = -1.0  # nothing is alike enough
        return [comparison.correct for comparison in ours.measure(group, "tiny", 5)[0]]

    assert launch(unlike, 2) == [[False] * 3] * 2


def test_bad_input_is_one_line(capsys):
    assert run(["bench", "tensor", "--world-sizes", "1"]) == 2
    assert "must be 2 or more" in capsys.readouterr().err
    assert run(["bench", "tensor", "--world-sizes", "3"]) == 2
    assert "do not divide over 3 ranks" in capsys.readouterr().err
