"""Who writes what of a checkpoint: every element once, on the rank that has the least to write."""

import pytest
import torch

from minillm.parallel.sharding.placement import FlatShard, Placement, Replicate, Shard, join
from minillm.train.checkpoint.shares import SPLIT_FROM, catalogue_of, shares_of

LARGE, SMALL = torch.Size((SPLIT_FROM // 2, 3)), torch.Size((5, 3))


def replicated(rank):
    return {"large": Placement(LARGE, (Replicate(rank),)), "small": Placement(SMALL, (Replicate(rank),))}


def split(rank):
    """Tensor parallel over two, two replicas of each part; the last part is padded."""
    part = Shard(0, rank // 2, 2)
    return {name: Placement(shape, (part, Replicate(rank % 2))) for name, shape in (("large", LARGE), ("small", SMALL))}


def sharded(rank):
    return {"small": Placement(SMALL, (FlatShard(4 * rank, min(15, 4 * rank + 4)),))}


@pytest.mark.parametrize("place", [replicated, split, sharded])
def test_every_element_is_written_once(place):
    catalogues = [catalogue_of(place(rank)) for rank in range(4)]
    written = {name: torch.zeros(placement.shape) for name, placement in place(0).items()}
    for rank in range(4):
        for share in shares_of(catalogues, rank):
            part = torch.ones(share.placement.part_shape)
            written[share.name] += join([(share.placement, part)])
    for name, count in written.items():
        assert (count == 1).all(), name


def test_replicas_share_a_large_tensor_and_take_small_ones_in_turn():
    small = {f"small {index}": Placement(SMALL, ()) for index in range(8)}
    catalogues = [catalogue_of({"large": Placement(LARGE), **small})] * 4
    sizes = [sum(share.placement.part_shape.numel() for share in shares_of(catalogues, rank)) for rank in range(4)]
    assert max(sizes) - min(sizes) <= SMALL.numel() and sum(sizes) == LARGE.numel() + 8 * SMALL.numel()
