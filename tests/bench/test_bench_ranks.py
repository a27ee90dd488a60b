"""Two ranks against one: the same tokens, and a prediction that knows the bytes."""

import pytest

from minillm.bench import bench, ranks
from minillm.model import ModelConfig
from minillm.predict.serving.ranks import weight_bytes

CONFIG = ModelConfig(64, 32, 64, 4, 4, 2, max_seq_len=16, tie_embeddings=True)


def test_shares_of_a_step():
    half = ranks.share_of_weights(CONFIG, 1, 1)
    assert 0.5 < half < 0.51 and half * weight_bytes(CONFIG, 1, 4) == weight_bytes(CONFIG, 2, 4)
    assert ranks.share_of_weights(CONFIG, 2, 1) == 1.0
    head, whole = 64 * 32 * 4, weight_bytes(CONFIG, 1, 4)
    assert ranks.share_of_weights(CONFIG, 2, 16) == pytest.approx(((whole - head) / 2 + head) / whole)
    assert ranks.number_of_calls(CONFIG, 16) == 2 * CONFIG.num_layers + 1 + 1  # and the likeliest of each rank


@pytest.mark.full
def test_smoke():
    report = bench("ranks", sizes=(128,), repeats=5)
    assert report.ok and len(report.rows) == 2 * 2 * 2 + 1
    assert {row.peer for row in report.rows} == {"one rank", "predicted", "a broadcast"}
