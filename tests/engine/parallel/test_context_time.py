"""What attention over a cut sequence does beyond its values: bytes by an independent witness, time behind an emulated
link, the memory of a long step, and bad input."""

import time
from unittest import mock

import pytest
import torch

from minillm.comm import Link, launch
from minillm.comm.operation import Work
from minillm.measure import ledger, memory, wire
from minillm.model import ModelConfig, Transformer
from minillm.parallel.context_parallel import (
    CONTEXTS,
    GatherAttention,
    RingAttention,
    UlyssesAttention,
    context_attention,
    context_parallel,
    local_positions,
)
from minillm.parallel.context_parallel.variants import sequence_multiple
from minillm.predict.training import context
from minillm.predict.training.context import AttentionShape, ring_seconds

SHAPE = AttentionShape(4, 128, 8, 8, 512)  # many bytes and little work, for a short time in which others may send


def counted(group, variants):
    """For each variant the bytes of all ranks on the wire, forward and backward: the least of several."""
    torch.set_num_threads(1)
    found = []
    for name in variants:
        attention = context_attention(name, group, tile=512)
        at = attention.positions(SHAPE.seq)
        q, k, v = (torch.randn(4, 8, len(at), 512).requires_grad_() for _ in range(3))
        sent = []
        for _ in range(12):
            group.barrier()
            with wire() as seen:
                group.barrier()
                attention(q, k, v, positions=at).sum().backward()
                group.barrier()
            sent.append(seen.sent)
        found.append(min(sent))
    return found


@pytest.mark.full
@pytest.mark.wire
def test_the_wire_shows_the_predicted_bytes():
    variants = ["zigzag", "ulysses", "gather"]
    for name, sent in zip(variants, launch(counted, 2, variants)[0], strict=True):
        traffic = context.forward_traffic(name, SHAPE, 2) + context.backward_traffic(name, SHAPE, 2)
        assert sent == pytest.approx(2 * traffic.bytes, rel=0.03), name


PACE = 0.15
SMALL = AttentionShape(1, 128, 2, 2, 16)


def forward_times(group, overlap):
    """Seconds of a forward ring whose work on a block takes PACE, and after how many blocks it sends, and waits."""
    torch.set_num_threads(1)
    attention = RingAttention(group, "zigzag", overlap=overlap, pace=PACE)
    at, pass_on, wait, sends, waits = attention.positions(SMALL.seq), attention.pass_on, Work.wait, [], []
    q, k, v = (torch.randn(1, 2, len(at), 16) for _ in range(3))

    def noted_send(block):
        sends.append(len(led.spans))
        return pass_on(block)

    def noted_wait(work):
        waits.append(len(led.spans))
        return wait(work)

    attention.pass_on = noted_send

    group.barrier()
    with mock.patch.object(Work, "wait", noted_wait), ledger() as led:
        start = time.monotonic()
        attention(q, k, v, positions=at)
        seconds = time.monotonic() - start
    assert [span.name for span in led.spans] == [f"block {(group.rank - i) % group.world_size}" for i in range(4)]
    return seconds, sends, waits


@pytest.mark.full
@pytest.mark.parametrize("link", [PACE / 3, 3 * PACE])
def test_a_ring_hides_its_link_behind_its_work(link):
    """Work and link are emulated: a busy machine adds to the predicted seconds, and nothing takes from them."""
    even = [[PACE] * 4] * 4
    wires = Link(0, SMALL.block_bytes(4) / link)
    for overlap, order in ((True, [1, 2, 3]), (False, [0, 1, 1, 2, 2, 3])):  # the second wait for a message is none
        for seconds, sends, waits in launch(forward_times, 4, overlap, link=wires):
            assert seconds >= ring_seconds(even, link, overlap=overlap) - 0.001
            assert sends == [0, 1, 2] and waits == order


LONG = ModelConfig(64, 32, 96, 2, 2, 1, max_seq_len=4096, tie_embeddings=True)


def activations(group, name):
    """The most that activations take in a training step on this rank's part of the sequence."""
    torch.set_num_threads(1)
    model, at = Transformer(LONG), torch.arange(4096)
    tokens = torch.randint(64, (2, 1, 4096), generator=torch.Generator().manual_seed(0))
    if name:
        attention = context_attention(name, group, tile=512)
        model, at = context_parallel(model, attention), attention.positions(4096)
    with memory(model) as seen:
        model(tokens[0][:, at], targets=tokens[1][:, at])[0].backward()
    return seen.peak.activation


@pytest.mark.full
def test_four_ranks_hold_less_than_a_third_of_the_activations_each():
    (alone,) = launch(activations, 1, None)
    for name in ("zigzag", "ulysses", "gather"):
        if name == "ulysses":
            assert max(launch(activations, 2, name)) < alone / 1.8
        else:
            assert max(launch(activations, 4, name)) < alone / 3, name


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize(("world_size", "node"), [(1, 1), (2, 2), (4, 2), (6, 3), (4, 4)])
def test_what_a_length_has_to_be_a_multiple_of(name, world_size, node):
    """The smallest length that can be cut, found by trying."""
    rings = world_size // node if name == "hybrid" else world_size

    def cuts(seq):
        try:
            order = "contiguous" if name in ("ring", "ulysses") else "zigzag"
            part = local_positions(seq, 0, rings, order)
            return name != "hybrid" or len(local_positions(len(part), 0, node, "contiguous")) > 0
        except ValueError:
            return False

    assert sequence_multiple(name, world_size, node) == next(seq for seq in range(1, 99) if cuts(seq))


def said(group):
    """What each misuse says."""
    q = torch.randn(1, 2, 4, 2)
    documents = torch.zeros(1, 4, dtype=torch.int64)
    calls = {
        "no positions": lambda: RingAttention(group)(q, q, q),
        "others' positions": lambda: GatherAttention(group)(q, q, q, positions=torch.arange(8)),
        "own documents": lambda: UlyssesAttention(group)(q, q, q, positions=torch.arange(4), segments=documents),
        "one group": lambda: context_attention("hybrid", group),
        "unknown": lambda: context_attention("spiral", group),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises(ValueError) as caught:
            call()
        found[name] = str(caught.value)
    return found


def test_bad_input_is_one_sentence():
    for found in launch(said, 2):
        assert "positions None would turn this rank's 4 queries as if they began the sequence" in found["no positions"]
        assert "4 queries but 8 positions: pass this rank's positions" in found["others' positions"]
        assert "segments of 4 positions for a sequence of 8: pass those of the whole" in found["own documents"]
        assert "'hybrid' needs two groups: pass across=" in found["one group"]
        assert "context 'spiral' is unknown: use one of ring, zigzag" in found["unknown"]
