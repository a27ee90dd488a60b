import pytest
import torch

from minillm.__main__ import run
from minillm.bench import context, tiles
from minillm.comm import launch


@pytest.mark.full
def test_smoke():
    rows = {row.name: row for row in context.run(world_sizes=(2,), sizes=(64,), links=("loopback",), repeats=5)}
    assert len(rows) == 9 and all(row.correct and row.ratio > 0 for row in rows.values())
    assert rows["zigzag, 64 tokens, 2 ranks, loopback: kept per rank"].ratio > 1  # gather keeps all keys
    emulated = context.run(world_sizes=(4,), sizes=(64,), links=("emulated 100 MB/s",), repeats=5)
    assert [row.name.partition(",")[0] for row in emulated] == ["zigzag", "ring", "ulysses", "hybrid"]
    assert all(row.correct for row in emulated)


def test_outputs_that_differ_are_found_before_they_are_timed():
    def unlike(group):
        from minillm.bench import context as ours

        ours.TOLERANCE = 0.0  # rounding is not alike enough
        return [comparison.correct for comparison in ours.measure(group, (32,), 5)[0]]

    assert launch(unlike, 2) == [[False] * 3] * 2


def test_tiles_agree_with_their_peers_and_take_less_memory_than_whole_scores():
    rows = tiles.run(sizes=(512,), repeats=5, device="cpu")
    assert len(rows) == 4 and all(row.correct and row.ratio > 0 for row in rows)
    (peak,) = [row for row in rows if row.peer == "whole scores" and row.unit == "MB"]
    assert peak.ratio > 2
    wrong = tiles.compare("wrong", lambda *x: tiles.sdpa(*x, window=1), "torch SDPA", tiles.sdpa, 64, _CPU, 5)
    assert len(wrong) == 1 and not wrong[0].correct


_CPU = torch.device("cpu")


def test_bad_input_is_one_line(capsys):
    assert run(["bench", "context", "--world-sizes", "1"]) == 2
    assert "must be 2 or more" in capsys.readouterr().err
    assert run(["bench", "context", "--sizes", "30", "--world-sizes", "4"]) == 2
    assert "must be a multiple of 8 tokens for 4 ranks" in capsys.readouterr().err
    assert run(["bench", "tiles", "--sizes", "0"]) == 2
    assert "--sizes 0 holds 0: numbers start at 1" in capsys.readouterr().err
