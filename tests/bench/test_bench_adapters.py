import pytest
import torch

from minillm.bench import adapters, bench
from minillm.model import ModelConfig, Transformer

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def contestants():
    model = Transformer(ModelConfig(64, 64, 128, 2, 4, 2, max_seq_len=16, init_std=0.2))
    with adapters.contestants(model) as each:
        yield model, each


@pytest.mark.parametrize("different", adapters.DIFFERENT)
def test_all_give_the_logits_of_the_merged_models(contestants, different):
    model, each = contestants
    batch = adapters.batch_of(model, different, 3)
    assert len(batch.rows) == different and len({*batch.which}) == different
    calls = adapters.peers_of(each, batch)
    assert list(calls) == ["a loop over adapters", "merged models", "peft, mixed batch", "the base alone"]
    for name, call in calls.items():
        assert adapters.agrees(each, batch, call) == (name != "the base alone")
    assert adapters.agrees(each, batch, None)


def test_a_wrong_row_is_found(contestants, monkeypatch):
    model, each = contestants
    batch = adapters.batch_of(model, 4, 2)
    right = adapters.grouped(each, batch)
    wrong = right.clone()
    wrong[5] = right[6]
    monkeypatch.setattr(adapters, "grouped", lambda each, batch: wrong)
    assert not adapters.agrees(each, batch, None)
    assert not torch.equal(wrong, right)


@pytest.mark.full
def test_the_command():
    report = bench("adapters", sizes=(128,), repeats=5)
    assert report.ok and len(report.rows) == 2 * 3 * 4
    with pytest.raises(ValueError, match="size 100 must be a multiple of 128"):
        bench("adapters", sizes=(100,))
