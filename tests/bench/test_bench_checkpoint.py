import pytest

from minillm.__main__ import run
from minillm.bench import checkpoint


@pytest.mark.full
def test_smoke():
    rows = {row.name: row for row in checkpoint.run(world_sizes=(2,), shapes=("draft",), repeats=5)}
    assert len(rows) == 10 and all(row.correct and row.ratio > 0 for row in rows.values())
    for layout in ("replicas", "ZeRO stage 3"):  # the same bytes, and theirs have more about them
        assert 1 <= rows[f"{layout}, draft, 2 ranks: bytes of a rank"].ratio < 1.2


def test_bad_input_is_one_line(capsys):
    assert run(["bench", "checkpoint", "--world-sizes", "1"]) == 2
    assert "must be 2 or more" in capsys.readouterr().err
