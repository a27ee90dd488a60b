"""Closed forms of data parallelism against numbers worked out by hand and against each other."""

import itertools

import pytest

from course.lab03_data_parallel import formulas
from minillm.predict import comms
from minillm.predict.training import sharding as predict


def test_bytes_of_a_step():
    assert predict.gradient_bytes(12, 4) == 18 and predict.gradient_bytes(12, 1) == 0
    assert predict.all_reduce([12, 24], 4, 3).sent_per_rank == (192, 192, 192)  # 2 · 144 · 2/3
    assert predict.all_reduce([12, 24], 2, 3).sent_per_rank == (96, 96, 96)
    assert predict.all_reduce([], 4, 2).sent_per_rank == (0, 0)
    # 2 ranks: 600 int8 and a scale to the other, twice.
    assert predict.int8([1200], 2).sent_per_rank == (1208, 1208)
    assert predict.int8([1200], 2).total_bytes / predict.all_reduce([1200], 4, 2).total_bytes == 1208 / 4800
    # 10 values and 10 places of 4 bytes to each of 3 others.
    assert predict.top_k([1000], 0.01, 4, 4).sent_per_rank == (240,) * 4
    assert predict.top_k([1000], 0.0101, 4, 4).sent_per_rank == (264,) * 4
    # [20, 10] at rank 2: 40 and 20 instead of 200; a bias of 20 and [2, 2] go whole, with the first.
    both = comms.ring_all_reduce(40 + 20 + 4, 4, 2) + comms.ring_all_reduce(20, 4, 2)
    assert predict.power_sgd([[(20, 10), (20,), (2, 2)]], 2, 4, 2) == both
    assert predict.power_sgd([[(20, 5, 2)]], 2, 4, 2) == predict.power_sgd([[(20, 10)]], 2, 4, 2)
    assert predict.power_sgd([[()]], 1, 4, 2) == comms.ring_all_reduce(1, 4, 2) + comms.ring_all_reduce(0, 4, 2)


def test_buckets():
    mb = 1 << 20
    assert predict.bucket_sizes([4 * mb] * 20, 25 * mb, mb) == [4 * mb, 28 * mb, 28 * mb, 20 * mb]  # as torch's default
    assert predict.bucket_sizes([mb] * 12, mb) == [mb] * 12 and predict.bucket_sizes([], 1) == []
    with pytest.raises(ValueError, match="cap 0"):
        predict.bucket_sizes([1], 0)
    with pytest.raises(ValueError, match="first_cap 0"):
        predict.bucket_sizes([1], 1, 0)


@pytest.mark.parametrize(("backward", "comm"), [(8.0, 4.0), (8.0, 8.0), (4.0, 8.0)])
def test_time_under_overlap(backward, comm):
    count = 4
    ready = [backward * (i + 1) / count for i in range(count)]
    times = formulas.reduction_times(ready, [comm / count] * count)
    end = times[-1][1]
    closed = formulas.overlapped_seconds(backward, comm, comm / count)
    assert all(start >= r for (start, _), r in zip(times, ready, strict=True))
    assert all(later[0] >= earlier[1] for earlier, later in itertools.pairwise(times))
    assert end == closed if comm <= backward else end < closed <= end + comm / count
    assert closed < formulas.naive_seconds(backward, comm)
    assert formulas.hidden_share(formulas.naive_seconds(backward, comm), backward, comm) == 0
    assert formulas.hidden_share(backward, backward, comm) == 1
    assert formulas.hidden_share(end, backward, comm) == pytest.approx(0.75 if comm <= backward else 1 - 5 / 8)
