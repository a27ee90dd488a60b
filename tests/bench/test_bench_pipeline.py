import pytest

from minillm.__main__ import run
from minillm.bench import pipeline
from minillm.comm import launch


@pytest.mark.full
def test_smoke():
    chosen = ("1f1b", "zero_bubble_v")
    rows = pipeline.run(world_sizes=(2,), shapes=("tiny",), schedules=chosen, repeats=5)
    assert [row.peer for row in rows] == ["torch Schedule1F1B", "torch ScheduleZBVZeroBubble"]
    assert all(row.correct and row.ratio > 0 for row in rows)


def test_gradients_that_differ_are_found_before_they_are_timed():
    def unlike(group):
        from minillm.bench import pipeline as ours

        ours.TOLERANCE = -1.0  # nothing is alike enough
        return [comparison.correct for comparison in ours.measure(group, "tiny", ("1f1b",), 5)]

    assert launch(unlike, 2) == [[False]] * 2


def test_bad_input_is_one_line(capsys):
    assert run(["bench", "pipeline", "--world-sizes", "3"]) == 2
    assert "use 2 or 4" in capsys.readouterr().err
