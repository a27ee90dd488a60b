"""Results written where the caller wants them, and the memory that is kept between calls."""

import pytest
import torch

from minillm.comm import RankError, launch, pairwise_all_to_all, ring_all_gather, ring_reduce_scatter
from minillm.comm.operands import SCRATCH_BYTES, Scratch


def into_out(group):
    n, x = group.world_size, torch.arange(6.0) + group.rank
    part, whole, mixed = torch.empty(6 // n), torch.empty(6 * n), torch.empty(6)
    results = ring_reduce_scatter(x, group, out=part), ring_all_gather(x, group, out=whole)
    assert results[0] is part and results[1] is whole and pairwise_all_to_all(x, group, out=mixed) is mixed
    assert torch.equal(x, torch.arange(6.0) + group.rank)
    assert torch.equal(part, ring_reduce_scatter(x, group)) and torch.equal(mixed, pairwise_all_to_all(x, group))
    assert torch.equal(part, (n * torch.arange(6.0) + n * (n - 1) / 2).tensor_split(n)[group.rank])
    return sum(map(len, group.scratch._free.values()))


@pytest.mark.parametrize("world_size, kept", [(1, 0), (2, 1), (3, 2)])
def test_results_land_in_out_and_buffers_are_kept(world_size, kept):
    assert launch(into_out, world_size) == [kept] * world_size


@pytest.mark.parametrize(
    "out, message",
    [
        (torch.empty(4), r"out \[4\] has 4 elements, but the result has 3"),
        (torch.empty(3, dtype=torch.float64), "out is torch.float64 but x is torch.float32"),
        (torch.empty(6)[::2], r"out \[3\] is not contiguous"),
    ],
)
def test_out_that_does_not_fit_is_refused(out, message):
    with pytest.raises(RankError, match=message):
        launch(lambda group: ring_reduce_scatter(torch.zeros(6), group, out=out), 2)


def test_scratch_is_reused_grows_and_is_bounded():
    scratch, small, large = Scratch(), torch.empty(8), torch.empty(16, dtype=torch.float64)
    first = scratch.take(small)
    assert first.numel() == small.nbytes
    scratch.give([first])
    assert scratch.take(small).data_ptr() == first.data_ptr()
    assert scratch.take(small).data_ptr() != first.data_ptr()  # it is in use
    scratch.give([first])
    assert scratch.take(large).numel() == large.nbytes
    scratch.give([torch.empty(SCRATCH_BYTES + 1, dtype=torch.uint8)])
    assert scratch._free == {0: []}  # one list a stream; a CPU has one
