"""Collectives on one machine use sockets of their own: what two ranks do not agree on is named, not mixed up."""

import socket

import pytest
import torch

from minillm.comm import MismatchError, RankError, launch


def sizes(group):
    mine = torch.arange(float(group.rank + 1))  # ranks disagree, and nothing else has said so before
    other = torch.empty(group.rank + 1)
    try:
        group.run("mine", torch.empty(0), lambda: group.exchange((mine, 1 - group.rank), (other, 1 - group.rank)))
    except MismatchError as error:
        return str(error)


def in_flight(group):
    peer, n = 1 - group.rank, 1_000_000  # more than a connection holds: neither is done before the other takes it
    arriving = [torch.empty(n), torch.empty(3)]

    def body():
        sends = [torch.full((n,), float(group.rank)), torch.tensor(3.0).expand(3).contiguous()]
        handles = [group.exchange((x, peer), (y, peer), async_op=True) for x, y in zip(sends, arriving, strict=True)]
        handles[1].wait()  # the later one moves the earlier one along
        return handles[0].done()

    return group.run("mine", torch.empty(0), body), bool((arriving[0] == peer).all()), arriving[1].tolist()


def eager(group):
    """What each rank got and the messages rank 0 had got rid of before rank 1 asked for any."""
    peer, gone = 1 - group.rank, []
    group.connect()
    group.connect()
    arriving = [torch.empty(3) for _ in range(3)]
    if group.rank == 0:
        gone = [group.exchange((torch.full((3,), float(i)), 1), async_op=True, eager=True).done() for i in range(3)]
    group.barrier()
    if group.rank == 1:
        for x in arriving:
            group.exchange(recv=(x, 0), eager=True)
    large = torch.empty(3_000_000)  # more than a connection holds, both ways at once
    group.exchange((torch.full_like(large, float(group.rank)), peer), (large, peer), eager=True)
    return gone, [x[0].item() for x in arriving] if group.rank else [], bool((large == peer).all())


def test_eager_messages_leave_before_anybody_asks() -> None:
    assert launch(eager, 2) == [([True] * 3, [], True), ([], [0.0, 1.0, 2.0], True)]


def gone(group):
    if group.rank == 1:
        raise ValueError("rank 1 has had enough")
    group.run("mine", torch.empty(0), lambda: group.exchange((torch.ones(1), 1), (torch.empty(1), 1)))


def test_a_message_of_another_size_is_named() -> None:
    assert launch(sizes, 2) == [
        "a message of 4 bytes was expected, but 8 bytes came",
        "a message of 8 bytes was expected, but 4 bytes came",
    ]


def test_messages_in_flight_arrive_in_order() -> None:
    assert launch(in_flight, 2) == [(True, True, [3.0] * 3)] * 2


def test_a_rank_that_dies_is_the_cause() -> None:
    with pytest.raises(RankError, match="rank 1 has had enough"):
        launch(gone, 2)


def congestion_control(group):
    connections = [way.connection for way in group._backend.sockets.ways]
    return {c.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") for c in connections}


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="only Linux lets a connection choose")
def test_no_connection_is_paced() -> None:
    assert launch(congestion_control, 2) == [{b"reno"}] * 2
