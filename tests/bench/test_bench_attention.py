import pytest
import torch

from minillm.bench import attention
from minillm.model.paged.cpp import missing

CPU = torch.device("cpu")


@pytest.mark.full
def test_every_backend_agrees_with_the_peer():
    rows = attention.run(batches=("one sequence",), repeats=5, device="cpu")
    rows.append(attention.compare("15 decode and a prompt piece", "gathered", attention.gathered, CPU, 5))
    assert len(rows) == (3 if missing() else 4) and all(row.correct and row.ratio > 0 for row in rows)


def test_a_wrong_result_is_found_before_it_is_timed():
    def wrong(q, *rest, window):
        return attention.gathered(q, *rest, window=1)

    row = attention.compare("one sequence", "wrong", wrong, CPU, 5)
    assert not row.correct and row.ours is None
