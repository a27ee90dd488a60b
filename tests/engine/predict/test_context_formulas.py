"""Closed forms of context parallelism against enumeration, and against what real ranks send, keep and compute."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.comm import launch
from minillm.measure import ledger
from minillm.model.attention.tiled import Sight
from minillm.parallel.context_parallel import context_attention, local_positions
from minillm.predict.training import context
from minillm.predict.training.context import VARIANTS, AttentionShape, Hardware


@settings(max_examples=200)
@given(
    world_size=st.integers(1, 5),
    size=st.integers(1, 4),
    order=st.sampled_from(["contiguous", "zigzag"]),
    window=st.none() | st.integers(1, 30),
)
def test_pairs_are_those_that_a_mask_shows(world_size, size, order, window):
    seq = 2 * world_size * size
    places = [local_positions(seq, rank, world_size, order) for rank in range(world_size)]
    for rank, source in itertools.product(range(world_size), repeat=2):
        distance = places[rank][:, None] - places[source][None]
        seen = (distance >= 0) & (distance < (window or seq))
        queries, keys = (context.spans(seq, r, world_size, order) for r in (rank, source))
        assert context.pairs(queries, keys, window) == int(seen.sum())


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_work_per_rank(world_size):
    shape = AttentionShape(1, 4096 * world_size, 4, 2, 8)
    contiguous, zigzag = (context.flops(name, shape, world_size) for name in ("ring", "zigzag"))
    assert len(set(zigzag)) == 1 and sum(zigzag) == sum(contiguous) == context.flops("ring", shape, 1)[0]
    for rank, work in enumerate(contiguous):
        share = context.work_share(rank, world_size, "contiguous")
        assert share == (2 * rank + 1) / world_size**2
        assert work / sum(contiguous) == pytest.approx(share, rel=1e-3)


@pytest.mark.parametrize("tile", [16, 24])
def test_tiles_computed_per_rank(tile):
    """In zigzag order every rank computes as many tiles as every other, give or take one."""
    n, seq = 4, 1536

    def tiles(order):
        counts = []
        for rank in range(n):
            mine = local_positions(seq, rank, n, order)
            q = torch.empty(1, 1, len(mine), 1)
            each = (local_positions(seq, source, n, order) for source in range(n))
            counts.append(sum(len(Sight(q, q, mine, at, None, None, None, tile).seen()) for at in each))
        return counts

    zigzag, contiguous = tiles("zigzag"), tiles("contiguous")
    assert max(zigzag) - min(zigzag) <= 1
    for rank, count in enumerate(contiguous):
        assert count / sum(contiguous) == pytest.approx(context.work_share(rank, n, "contiguous"), rel=0.15)


SHAPES = [AttentionShape(2, 32, 8, kv_heads, 6, itemsize) for kv_heads in (8, 2) for itemsize in (4, 8, 2)]


def used(group, shapes, node):
    """For every variant and shape what forward and backward sent, and what forward kept."""
    torch.set_num_threads(1)
    n, found = group.world_size, {}
    nodes = [group.subgroup(list(range(first, first + node)), f"node{first}") for first in range(0, n, node)]
    across = [group.subgroup(list(range(place, n, node)), f"across{place}") for place in range(node)]
    for name, (index, shape) in itertools.product(VARIANTS, enumerate(shapes)):
        groups = (nodes[group.rank // node], across[group.rank % node]) if name == "hybrid" else (group,)
        attention = context_attention(name, *groups, tile=8)
        dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[shape.itemsize]
        sizes = [(shape.batch, heads, shape.seq // n, shape.head_dim) for heads in (shape.heads, *[shape.kv_heads] * 2)]
        q, k, v = (torch.randn(size, dtype=dtype).requires_grad_() for size in sizes)
        kept = {}

        def keep(x, kept=kept):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with ledger() as led, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = attention(q, k, v, positions=attention.positions(shape.seq))
        with ledger() as back:
            out.sum().backward()
        sent = [context.Traffic(each.bytes(), len(each.events), each.messages) for each in (led, back)]
        found[name, index] = (*sent, sum(kept.values()))
    return found


def saved_bytes(variant, shape, world_size, node):
    """Bytes that each rank keeps of a layer's attention for backward: q, k, v, output and log-sum-exp, of its own
    positions or heads; gather keeps K and V of the whole sequence."""
    part, kv_heads = shape.seq // world_size, shape.kv_heads
    if variant in ("ulysses", "hybrid"):
        kv_heads = context.kv_heads_of(shape, world_size if variant == "ulysses" else node)
    keys = shape.seq if variant == "gather" else part
    elements = 2 * shape.heads * part + 2 * kv_heads * keys
    return shape.batch * (elements * shape.head_dim * shape.itemsize + shape.heads * part * shape.exact)


@pytest.mark.parametrize(("world_size", "node"), [(2, 2), (4, 2), (4, 4)])
def test_bytes_calls_and_messages_are_exactly_those_predicted(world_size, node):
    for rank in launch(used, world_size, SHAPES, node):
        for (name, index), (forward, backward, kept) in rank.items():
            args = name, SHAPES[index], world_size, node
            assert forward == context.forward_traffic(*args), args
            assert backward == context.backward_traffic(*args), args
            assert kept == saved_bytes(*args), args


def test_a_ring_takes_the_larger_of_compute_and_link():
    even = [[1.0] * 4] * 4
    assert context.ring_seconds(even, 0.5) == 4.0  # N - 1 hidden links
    assert context.ring_seconds(even, 2.0) == 3 * 2.0 + 1.0
    assert context.ring_seconds(even, 0.5, overlap=False) == 4 * 1.0 + 3 * 0.5
    assert context.ring_seconds([[7.0]], 3.0) == 7.0


def test_contiguous_parts_wait_for_the_last_rank():
    shape, fast = AttentionShape(1, 1 << 15, 8, 8, 64), Hardware(1e12, 0.0, 1e15)
    ring, zigzag = (context.forward_seconds(name, shape, 4, fast) for name in ("ring", "zigzag"))
    assert ring / zigzag == pytest.approx(7 / 4, rel=0.01)  # the last rank's (2N - 1) / N² against 1 / N


def test_the_length_from_which_a_ring_hides_its_link():
    hardware = Hardware(1e11, 0.0, 1e9)
    length = round(context.hiding_length(8, 8, hardware))  # 4 · 1e11 / 1e9
    assert length == 400
    for tokens, hidden in ((length * 2, True), (length // 2, False)):
        shape = AttentionShape(1, 4 * tokens, 8, 8, 64)
        work = context.ring_flops(shape, 4)[0][1] / hardware.flops
        assert (work >= hardware.link(shape.block_bytes(4))) == hidden


def test_which_variant_wins_depends_on_heads_length_and_link():
    slow = Hardware(1e12, 1e-5, 1e9)
    many = context.ranking(AttentionShape(1, 1 << 14, 32, 32, 128), 8, slow)
    assert next(iter(many)) in ("ulysses", "hybrid") and many["zigzag"] > many["ulysses"]
    few = context.ranking(AttentionShape(1, 1 << 18, 2, 1, 128), 8, Hardware(1e12, 1e-5, 1e10))
    assert next(iter(few)) == "zigzag" and "ulysses" not in few
    assert few["gather"] > few["zigzag"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("spiral", AttentionShape(1, 8, 2, 2, 2), 2), "variant 'spiral' is unknown: use one of ring"),
        (("zigzag", AttentionShape(1, 10, 2, 2, 2), 2), "a sequence of 10 does not divide"),
        (("ulysses", AttentionShape(1, 12, 3, 3, 2), 2), "3 heads and 3 kv heads do not divide over 2 ranks"),
        (("hybrid", AttentionShape(1, 12, 3, 3, 2), 3), "node 2 does not divide world_size 3"),
        (("ring", AttentionShape(1, 12, 3, 3, 2), 0), "world_size 0 must be at least 1"),
    ],
)
def test_bad_input_is_one_sentence(arguments, said):
    with pytest.raises(ValueError, match=said):
        context.forward_traffic(*arguments)
