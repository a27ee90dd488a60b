import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from course.lab11_data_pipeline.formulas import sampler_duplicates
from minillm.data import Loader, ShardedSampler, TokenDataset

sizes = st.tuples(st.integers(1, 40), st.integers(1, 5), st.integers(1, 5), st.integers(0, 3))


def dataset(samples=37, seq_len=4):
    return TokenDataset(np.arange(samples * seq_len + 1), seq_len)


def stream(sampler_size, samples, position=0):
    """The global stream from `position` on, dealt back together from what the ranks drew, and how often."""
    num_samples, batch_size, world_size, seed = sampler_size
    ranks = [ShardedSampler(num_samples, batch_size, rank, world_size, seed) for rank in range(world_size)]
    drawn: list[int] = []
    while len(drawn) < samples:
        cards = np.stack([rank.indices(position + len(drawn)) for rank in ranks], axis=1)
        drawn += cards.flatten().tolist()
    return drawn[:samples]


@given(sizes)
def test_every_epoch_holds_every_sample_exactly_once_over_all_ranks(size):
    drawn = stream(size, 3 * size[0])
    for epoch in range(3):
        assert sorted(drawn[epoch * size[0] : (epoch + 1) * size[0]]) == list(range(size[0]))


@given(sizes, st.integers(1, 5), st.integers(1, 5), st.integers(0, 100))
def test_the_stream_does_not_depend_on_ranks_or_batch_even_from_the_middle(size, batch_size, world_size, position):
    num_samples, _, _, seed = size
    one_by_one = stream((num_samples, 1, 1, seed), position + 50)
    assert stream((num_samples, batch_size, world_size, seed), 50, position) == one_by_one[position:]


def test_sample_i_goes_to_rank_i_mod_world_size():
    order = stream((40, 1, 1, 0), 40)
    for rank in range(4):
        assert ShardedSampler(40, 10, rank, 4).indices(0).tolist() == order[rank::4]


def test_epochs_and_seeds_differ_and_unshuffled_is_in_order():
    drawn = stream((40, 1, 1, 0), 80)
    assert drawn[:40] != drawn[40:]
    assert drawn[:40] != stream((40, 1, 1, 1), 40)
    assert ShardedSampler(5, 7, shuffle=False).indices(3).tolist() == [3, 4, 0, 1, 2, 3, 4]


@given(sizes)
def test_one_pass_shows_every_sample_once_in_equally_many_batches(size):
    num_samples, batch_size, world_size, _ = size
    passes = [list(ShardedSampler(num_samples, batch_size, rank, world_size).one_pass()) for rank in range(world_size)]
    assert sorted(int(i) for batches in passes for batch in batches for i in batch) == list(range(num_samples))
    assert {len(batches) for batches in passes} == {-(-num_samples // (batch_size * world_size))}
    counts = [sum(map(len, batches)) for batches in passes]
    assert max(counts) - min(counts) <= 1


@given(st.integers(1, 60), st.integers(1, 9))
def test_torchs_sampler_repeats_what_the_formula_says_and_ours_nothing(samples, world_size):
    data = range(samples)
    torchs = [i for rank in range(world_size) for i in DistributedSampler(data, world_size, rank)]
    assert len(torchs) - samples == sampler_duplicates(samples, world_size)
    assert len(stream((samples, 1, world_size, 0), samples)) == len(set(stream((samples, 1, world_size, 0), samples)))


def test_ten_samples_on_four_ranks_and_the_order_torch_repeats():
    assert sampler_duplicates(10, 4) == 2
    torchs = DistributedSampler(range(10), 4, 0, seed=3)
    assert list(torchs) == list(torchs)
    assert stream((10, 1, 1, 3), 10) != stream((10, 1, 1, 3), 20)[10:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_samples=0, batch_size=1), "num_samples 0"),
        (dict(num_samples=1, batch_size=0), "batch_size 0"),
        (dict(num_samples=1, batch_size=1, world_size=0), "world_size 0"),
        (dict(num_samples=1, batch_size=1, rank=2, world_size=2), "rank 2 is not in a world of 2: use 0..1"),
        (dict(num_samples=1, batch_size=1, seed=-1), "seed -1"),
    ],
)
def test_impossible_samplers_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ShardedSampler(**options)


def take(loader, batches):
    return [next(loader) for _ in range(batches)]


def test_batches_are_bit_equal_for_any_number_of_workers():
    runs = []
    for workers in (0, 1, 2, 5):
        with Loader(dataset(), 4, seed=7, workers=workers, depth=max(2, workers)) as loader:
            runs.append(take(loader, 30))
    for run in runs[1:]:
        for ours, theirs in zip(run, runs[0], strict=True):
            assert torch.equal(ours.inputs, theirs.inputs)
            assert torch.equal(ours.targets, theirs.targets)
            assert (ours.indices == theirs.indices).all()
            assert ours.epoch == theirs.epoch


def test_a_batch_holds_its_samples():
    data = dataset()
    with Loader(data, 4) as loader:
        for batch in take(loader, 12):
            assert torch.equal(batch.inputs, data.batch(batch.indices)[0])
            assert torch.equal(batch.targets, data.batch(batch.indices)[1])
    assert loader.epoch == 48 / 37
    assert batch.epoch == 1


@given(st.integers(0, 25), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2))
def test_resuming_continues_at_the_exact_sample_on_another_world(steps, before, after, workers):
    whole = stream((37, 1, 1, 5), steps * 2 * before + 24 * after)
    saving = Loader(dataset(), 2, world_size=before, seed=5, workers=workers)
    with saving:
        take(saving, steps)
        state = saving.state_dict()
    resumed = []
    for rank in range(after):
        with Loader(dataset(), 4, rank, after, seed=5, workers=workers) as loader:
            loader.load_state_dict(state)
            resumed.append([batch.indices for batch in take(loader, 6)])
    together = np.array(resumed).transpose(1, 2, 0).flatten().tolist()
    assert together == whole[steps * 2 * before :]


def test_the_state_is_of_the_batch_taken_not_of_the_batches_made():
    with Loader(dataset(), 4, workers=2, depth=6) as loader:
        take(loader, 3)
        state = loader.state_dict()
        expected = next(loader).indices.tolist()
        loader.load_state_dict(state)
        assert next(loader).indices.tolist() == expected
        assert loader.position == 16


def test_closing_only_pauses():
    with Loader(dataset(), 4, workers=0) as whole:
        expected = [batch.indices.tolist() for batch in take(whole, 6)]
    loader = Loader(dataset(), 4, workers=2)
    first = [batch.indices.tolist() for batch in take(loader, 3)]
    worked, waited = loader.worked_s, loader.waited_s
    loader.close()
    assert (loader.worked_s, loader.waited_s) == (worked, waited)
    assert first + [batch.indices.tolist() for batch in take(loader, 3)] == expected
    loader.close()
    assert loader.worked_s >= worked > 0
    assert loader.waited_s >= waited > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failed_or_interrupted_batch_can_be_taken_again(workers, monkeypatch):
    with Loader(dataset(), 4) as whole:
        expected = [batch.indices.tolist() for batch in take(whole, 4)]
    loader = Loader(dataset(), 4, workers=workers)
    got = [batch.indices.tolist() for batch in take(loader, 2)]
    loader.close()
    with monkeypatch.context() as patch:
        patch.setattr(loader, "load", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(loader)
    assert loader.state_dict()["position"] == 8
    got += [batch.indices.tolist() for batch in take(loader, 2)]
    loader.close()
    assert got == expected


def test_state_of_other_data_is_refused():
    state = Loader(dataset(), 4).state_dict()
    for other, name in [
        (Loader(dataset(samples=38), 4), "samples 37"),
        (Loader(dataset(37, seq_len=5), 4), "seq_len 4"),
        (Loader(dataset(), 4, seed=1), "seed 0"),
        (Loader(dataset(), 4, shuffle=False), "shuffle 1"),
    ]:
        with pytest.raises(ValueError, match=f"cannot resume: saved with {name}"):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="cannot resume: saved with samples None"):
        Loader(dataset(), 4).load_state_dict({})
