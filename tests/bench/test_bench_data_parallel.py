import pytest

from minillm.__main__ import run
from minillm.bench import data_parallel
from minillm.comm import launch


@pytest.mark.full
@pytest.mark.wire
def test_smoke():
    rows = {row.name: row for row in data_parallel.run(world_sizes=(2,), shapes=("tiny",), repeats=5)}
    assert len(rows) == 9 and all(row.correct and row.ratio > 0 for row in rows.values())
    for form, traffic in (("BucketedDDP", 1.0), ("ZeRO stage 1", 1.5)):  # 2P against 2P, and against 3P
        assert rows[f"{form}, tiny, 2 ranks: wire per step"].ratio == pytest.approx(traffic, rel=0.1)
        assert rows[f"{form}, tiny, 2 ranks: peak per rank"].ratio >= 0.99


def test_models_that_move_apart_are_found_before_they_are_timed():
    def unlike(group):
        from minillm.bench import data_parallel as ours

        ours.TOLERANCE = -1.0  # nothing is alike enough
        return [comparison.correct for comparison in ours.measure(group, "tiny", 5)[0]]

    assert launch(unlike, 2) == [[False] * 3] * 2


def test_bad_input_is_one_line(capsys):
    assert run(["bench", "data-parallel", "--world-sizes", "1"]) == 2
    assert "must be 2 or more" in capsys.readouterr().err
