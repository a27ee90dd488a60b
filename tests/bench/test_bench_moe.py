import pytest
import torch

from minillm.bench import bench, moe

pytest.importorskip("transformers")
CPU, TOKENS, HIDDEN, INTERMEDIATE = torch.device("cpu"), 200, 32, 48


def test_contestants_agree_and_a_wrong_one_is_found(monkeypatch):
    """Receipts: the first expert has half of the skewed rows; gate, up and what the rows need are kept, no more."""
    ours, peers = moe.contestants(HIDDEN, INTERMEDIATE, CPU, torch.float32)
    for routing, least, most in (("balanced", 0.05, 0.2), ("skewed", 0.5, 0.5)):
        x = moe.routed(routing, TOKENS, HIDDEN, CPU, torch.float32)
        counts = torch.bincount(ours.router(x).experts.flatten(), minlength=8) / (TOKENS * moe.TOP_K)
        assert least <= counts.max() <= most
        assert all(moe.agree(ours, peer, x) for peer in peers.values())
    kept = moe.kept_bytes(ours, x)
    rows = TOKENS * moe.TOP_K * 4 * 2 * (INTERMEDIATE + HIDDEN)
    assert rows <= kept <= rows + 2000 * TOKENS
    assert all(moe.kept_bytes(peer, x) > kept for peer in peers.values())
    monkeypatch.setattr(moe, "TOP_K", 3)
    assert not moe.agree(ours, peers["dense"], x)


@pytest.mark.full
def test_the_command():
    report = bench("moe", sizes=(64, 32, 16), repeats=5)
    assert report.ok and len(report.rows) == 2 * 2 * 3 + 1 + 3
    kept = [row for row in report.rows if row.name.startswith("kept")]
    assert len(kept) == 3 and all(row.ratio > 1 for row in kept)  # bytes, no clock
