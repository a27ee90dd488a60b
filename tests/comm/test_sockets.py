"""Collectives on one machine use sockets of their own: what two ranks do not agree on is named, not mixed up."""

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
