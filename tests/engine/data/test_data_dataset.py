import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from course.lab11_data_pipeline.formulas import packing_waste, padding_waste, uniform_padding_waste
from course.lab11_data_pipeline.padding import IGNORE, length_batches, pad
from minillm.data import TokenDataset, Tokens


@given(st.integers(2, 200), st.integers(1, 60))
def test_every_token_but_the_first_and_the_tail_is_a_target_once(count, seq_len):
    tokens = np.arange(count)
    if count < seq_len + 1:
        with pytest.raises(ValueError, match=f"{count} tokens are too few for seq_len {seq_len}"):
            TokenDataset(tokens, seq_len)
        return
    dataset = TokenDataset(tokens, seq_len)
    inputs, targets = dataset.batch(range(len(dataset)))
    assert inputs.shape == targets.shape == (len(dataset), seq_len)
    assert torch.equal(targets, inputs + 1)
    assert targets.flatten().tolist() == list(range(1, len(dataset) * seq_len + 1))
    assert dataset.waste == packing_waste(count, seq_len) == 1 - targets.numel() / count
    assert count - 1 - targets.numel() < seq_len


def test_any_kind_of_token_row_gives_the_same_windows():
    row = np.random.default_rng(0).integers(0, 50_000, 101)
    as_tokens = Tokens(row.astype(np.uint16), 50_000, separator=0, documents=1, text_bytes=1)
    expected = TokenDataset(row.tolist(), 10).batch([3, 1])
    for tokens in (row, torch.from_numpy(row), as_tokens):
        got = TokenDataset(tokens, 10).batch(np.array([3, 1]))
        assert all(map(torch.equal, got, expected))
        assert {part.dtype for part in got} == {torch.int64}


def test_torchs_data_loader_takes_it_as_it_is():
    dataset = TokenDataset(np.arange(101), 10)
    batches = list(torch.utils.data.DataLoader(dataset, batch_size=5))
    assert torch.equal(torch.cat([inputs for inputs, _ in batches]), dataset.batch(range(10))[0])


def test_windows_do_not_share_memory_with_the_tokens():
    row = np.arange(21)
    inputs, targets = TokenDataset(row, 10).batch([0])
    inputs.zero_()
    assert targets[0].tolist() == list(range(1, 11))
    assert row.tolist() == list(range(21))


def test_bad_windows_are_refused():
    with pytest.raises(ValueError, match="seq_len 0 is too small"):
        TokenDataset(np.arange(5), 0)
    dataset = TokenDataset(np.arange(21), 10)
    for index in (2, -1):
        with pytest.raises(IndexError, match=rf"window {index} is outside 0..1"):
            dataset[index]


def test_padded_batches_mark_what_is_not_text():
    inputs, targets = pad([[5, 6, 7], [8, 9], [4, 3, 2, 1]], pad_id=0)
    assert inputs.tolist() == [[5, 6, 7], [8, 9, 0], [4, 3, 2]]
    assert targets.tolist() == [[6, 7, IGNORE], [9, IGNORE, IGNORE], [3, 2, 1]]
    with pytest.raises(ValueError, match="longest document has 1 tokens"):
        pad([[1], []], pad_id=0)


def test_padding_targets_carry_no_loss():
    _, targets = pad([[1, 2, 3], [2, 1]], pad_id=0)
    logits = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(0))
    logits[1, 1] = float("nan")
    assert torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).isfinite()


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 9), st.booleans())
def test_length_batches_hold_every_document_once(lengths, batch_size, by_length):
    batches = length_batches(lengths, batch_size, seed=1, by_length=by_length)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    assert max(map(len, batches)) <= batch_size
    again = length_batches(lengths, batch_size, seed=1, by_length=by_length)
    assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in again]


def test_padding_wastes_44_percent_where_sorting_and_packing_waste_next_to_nothing():
    lengths = np.random.default_rng(0).integers(1, 1001, 10_000)
    random, by_length = (
        padding_waste([lengths[batch] for batch in length_batches(lengths, 8, 0, by_length=flag)])
        for flag in (False, True)
    )
    assert random == pytest.approx(uniform_padding_waste(8), abs=0.01)
    assert by_length < 0.002
    assert packing_waste(int(lengths.sum()) + len(lengths), 1024) < 0.001


def test_waste_is_the_padding_one_can_count():
    lengths = np.random.default_rng(1).integers(2, 50, 40)
    batches = length_batches(lengths, 8, seed=0)
    rows = [pad([[1] * lengths[i] for i in batch], pad_id=0) for batch in batches]
    padding = sum((targets == IGNORE).sum().item() for _, targets in rows)
    computed = sum(targets.numel() for _, targets in rows)
    assert padding / computed == pytest.approx(padding_waste([lengths[batch] - 1 for batch in batches]))


def test_batch_size_must_be_positive():
    with pytest.raises(ValueError, match="batch_size 0 must be at least 1"):
        length_batches([1], 0, seed=0)


@pytest.mark.parametrize(
    ("count", "expected"), [(1, [0]), (3, [0, 3, 6]), (10, list(range(10))), (99, list(range(10)))]
)
def test_windows_at_even_distances(count, expected):
    assert TokenDataset(np.arange(41), 4).spread(count) == expected
