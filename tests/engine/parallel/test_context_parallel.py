"""Attention over a sequence that is cut over ranks, against dense attention in one process in float64."""

import pytest
import torch

from minillm.comm import launch
from minillm.measure import ledger
from minillm.model import dense
from minillm.parallel.context_parallel import (
    GatherAttention,
    RingAttention,
    UlyssesAttention,
    local_positions,
)
from tests.engine.comm.nccl_like import on_nccl_like

pytestmark = pytest.mark.drawn(2)

SEQ, HEAD_DIM = 16, 6
SHAPES = [(2, 4, 4), (1, 8, 2), (2, 4, 1)]  # batch, heads, kv heads
MASKS = [(None, False), (5, False), (None, True), (7, True)]  # window, documents
VARIANTS = ["ring contiguous", "ring zigzag", "ring without overlap", "ulysses", "gather"]


def draw(batch, heads, kv_heads):
    generator = torch.Generator().manual_seed(heads + kv_heads)
    q, d_out = (torch.randn(batch, heads, SEQ, HEAD_DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(batch, kv_heads, SEQ, HEAD_DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    documents = torch.randint(3, (batch, SEQ), generator=generator).sort(dim=1).values
    return q, k, v, d_out, documents


def make(variant, group, segments):
    kind, *how = variant.split()
    order = "contiguous" if "contiguous" in how or variant == "ulysses" else "zigzag"
    if kind == "ring":
        return RingAttention(group, order, tile=3, overlap="without" not in how, segments=segments), order
    made = UlyssesAttention if kind == "ulysses" else GatherAttention
    return made(group, tile=3, segments=segments), order


def cut_sequence(x, rank, world_size, order, dim):
    """A rank's positions of x along `dim`."""
    return x.index_select(dim, local_positions(x.shape[dim], rank, world_size, order))


def join_sequence(parts, order, dim):
    """The ranks' parts, in rank order -> the whole sequence."""
    seq = sum(part.shape[dim] for part in parts)
    places = torch.cat([local_positions(seq, rank, len(parts), order) for rank in range(len(parts))])
    return torch.cat(parts, dim).index_select(dim, places.argsort())


def run(group):
    """For every variant, shape and mask: this rank's output and gradients, and what it sent."""
    found = {}
    for variant in VARIANTS:
        for shape in SHAPES:
            if variant.startswith("ulysses") and shape[1] % group.world_size:
                continue
            for window, documents in MASKS if shape is SHAPES[0] else MASKS[-1:]:
                q, k, v, d_out, segments = draw(*shape)
                attention, order = make(variant, group, segments if documents else None)
                own = [cut_sequence(x, group.rank, group.world_size, order, dim=2) for x in (q, k, v, d_out)]
                inputs = [x.clone().requires_grad_() for x in own[:3]]
                positions = local_positions(SEQ, group.rank, group.world_size, order)
                with ledger() as led:
                    out = attention(*inputs, positions=positions, window=window)
                    forward = led.bytes()
                    gradients = torch.autograd.grad(out, inputs, own[3])
                key = variant, shape, window, documents
                found[key] = (order, [out.detach(), *gradients], forward, led.bytes() - forward, dict(led.calls))
    return found


@pytest.mark.parametrize(("world_size", "how"), [(1, run), (2, run), (4, run), (2, on_nccl_like(run))])
def test_outputs_and_gradients_are_those_of_one_process(world_size, how):
    """The last case on a backend that keeps NCCL's rules."""
    ranks = launch(how, world_size)
    assert len(ranks[0]) >= len(VARIANTS) * 5
    for key in ranks[0]:
        _, shape, window, documents = key
        q, k, v, d_out, segments = draw(*shape)
        inputs = [x.requires_grad_() for x in (q, k, v)]
        expected = dense(*inputs, window=window, segments=segments if documents else None)
        right = [expected.detach(), *torch.autograd.grad(expected, inputs, d_out)]
        for place, whole in enumerate(right):
            joined = join_sequence([rank[key][1][place] for rank in ranks], ranks[0][key][0], dim=2)
            torch.testing.assert_close(joined, whole, rtol=1e-10, atol=1e-11, msg=f"{key}, tensor {place}")


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_and_calls_are_as_predicted(world_size):
    """K and V of a rank: 2 · batch · kv_heads · seq / N · head_dim numbers of 8 bytes."""
    n, (batch, heads, kv_heads) = world_size, SHAPES[0]
    block = 2 * batch * kv_heads * SEQ // n * HEAD_DIM * 8
    key = lambda variant: (variant, SHAPES[0], None, False)  # noqa: E731
    for rank in launch(run, world_size):
        _, _, forward, backward, calls = rank[key("ring zigzag")]
        assert (forward, backward) == ((n - 1) * block, (n - 1) * block + n * block)
        assert calls == {"exchange": (n - 1) + (n - 1) + n}
        _, _, forward, backward, calls = rank[key("gather")]
        assert (forward, backward) == ((n - 1) * block, (n - 1) * block)
        assert calls == {"all_gather": 1, "reduce_scatter": 1}
        _, _, forward, backward, calls = rank[key("ulysses")]
        moved = 4 * batch * heads * SEQ // n * HEAD_DIM * 8 * (n - 1) // n  # q, k, v and the output
        assert (forward, backward) == (moved, moved)
        assert calls == {"all_to_all": 8}


def hybrid(group):
    """Ulysses inside nodes of 2, a ring across them."""
    node = [group.subgroup([0, 1], "node0"), group.subgroup([2, 3], "node1")][group.rank // 2]
    across = [group.subgroup([0, 2], "across0"), group.subgroup([1, 3], "across1")][group.rank % 2]
    q, k, v, d_out, _ = draw(2, 4, 2)
    attention = UlyssesAttention(node, inside=RingAttention(across, "zigzag", tile=3))
    positions = attention.positions(SEQ)
    own = []
    for x in (q, k, v, d_out):
        of_node = cut_sequence(x, across.rank, 2, "zigzag", dim=2)
        own.append(cut_sequence(of_node, node.rank, 2, "contiguous", dim=2))
    inputs = [x.clone().requires_grad_() for x in own[:3]]
    out = attention(*inputs, positions=positions)
    return [out.detach(), *torch.autograd.grad(out, inputs, own[3])]


def test_ulysses_in_the_node_and_a_ring_across():
    ranks = launch(hybrid, 4)
    q, k, v, d_out, _ = draw(2, 4, 2)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    expected = dense(*inputs)
    right = [expected.detach(), *torch.autograd.grad(expected, inputs, d_out)]
    for place, whole in enumerate(right):
        nodes = [join_sequence([ranks[r][place] for r in node], "contiguous", dim=2) for node in ((0, 1), (2, 3))]
        torch.testing.assert_close(join_sequence(nodes, "zigzag", dim=2), whole, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_zigzag_shares_out_causal_work_and_contiguous_parts_do_not(world_size):
    seq = 48 * world_size
    pairs = {
        order: [int((local_positions(seq, r, world_size, order) + 1).sum()) for r in range(world_size)]
        for order in ("contiguous", "zigzag")
    }
    total = seq * (seq + 1) // 2
    assert len(set(pairs["zigzag"])) == 1 and sum(pairs["zigzag"]) == total
    for rank, count in enumerate(pairs["contiguous"]):
        assert count / total == pytest.approx((2 * rank + 1) / world_size**2, rel=0.03 * world_size)


def test_bad_input_is_one_sentence():
    with pytest.raises(ValueError, match=r"15 positions does not divide into 4 parts.*pad it to 16"):
        local_positions(15, 0, 2)
    with pytest.raises(ValueError, match="order='spiral' must be one of contiguous, zigzag"):
        local_positions(16, 0, 2, "spiral")
    with pytest.raises(Exception, match="3 heads do not divide over 2 ranks of Ulysses attention"):
        launch(lambda group: UlyssesAttention(group)(*[torch.randn(1, 3, 4, 2)] * 3, positions=torch.arange(4)), 2)
