"""Emulated links: lower bounds on time, queueing, two levels, and nothing of the emulation in the ledger."""

import time
from collections import defaultdict

import pytest
import torch

from minillm import comm
from minillm.comm import Link, Topology, launch
from minillm.comm.emulation import Egress
from minillm.measure import ledger
from minillm.predict import comms


def test_seconds_of_one_message() -> None:
    assert Link(0.5, 1e6).seconds(1_000_000) == 1.5
    assert Link().seconds(10**12) == 0


@pytest.mark.parametrize("bad", [{"latency_s": -1}, {"latency_s": float("nan")}, {"bandwidth_bytes_per_s": 0}])
def test_links_that_cannot_be(bad: dict) -> None:
    with pytest.raises(ValueError, match="must be"):
        Link(**bad)
    with pytest.raises(ValueError, match="ranks_per_node=0"):
        Topology(0, Link())


def test_messages_queue_on_a_link_but_not_on_different_links() -> None:
    """Bandwidth is shared by the messages of one rank on one link; latency is not."""
    egress = Egress(Topology(2, inter=Link(1.0, 100.0), intra=Link(5.0, 1000.0)))
    begin = time.monotonic()
    first, second = egress.deliver_at(0, 2, 100), egress.deliver_at(0, 3, 200)
    between = time.monotonic()
    inside = egress.deliver_at(0, 1, 1000)
    assert begin <= first - 2.0 <= between
    assert second - first == pytest.approx(2.0, abs=1e-6)
    assert between <= inside - 6.0 <= time.monotonic()
    assert Egress(Topology(2, inter=Link(1.0))).deliver_at(0, 1, 100) is None


def paced(group):
    """(begin, end) of: one message, two at once, a collective; on the clock that all ranks share."""
    x, other, times = torch.ones(25_000), 1 - group.rank, {}
    call = group.send if group.rank == 0 else group.recv
    group.barrier()
    with ledger() as led:
        start = time.monotonic()
        call(x, other)
        times["one"] = start, time.monotonic()
        start = time.monotonic()
        handles = [call(x, other, async_op=True) for _ in range(2)]
        early = handles[0].done() and time.monotonic() - start < 0.199
        for handle in handles:
            handle.wait()
            times[f"queued {len(times)}"] = start, time.monotonic()
        start = time.monotonic()
        group.all_reduce(x)
        times["all_reduce"] = start, time.monotonic()
        start = time.monotonic()  # rank 0 sends 100 kB and keeps 20 kB, rank 1 sends 40 kB
        to, come = ([5_000, 25_000], [5_000, 10_000]) if group.rank == 0 else ([10_000, 0], [25_000, 0])
        group.all_to_all(torch.ones(sum(to)), output_splits=come, input_splits=to)
        times["all_to_all"] = start, time.monotonic()
    return times, early, led


def test_a_paced_message_takes_latency_plus_bytes_over_bandwidth() -> None:
    link = Link(latency_s=0.1, bandwidth_bytes_per_s=1e6)  # 100 kB: 0.2 s
    ranks = launch(paced, 2, link=link)
    sent = [begin for begin, _ in ranks[0][0].values()]  # a receiver may come late, and then waits less
    for rank, (times, early, led) in enumerate(ranks):
        one, first, second, _, unequal = (end - begin for begin, (_, end) in zip(sent, times.values(), strict=True))
        begin, end = times["all_reduce"]
        reduced = end - begin
        assert one >= 0.199 and first >= 0.199 and second >= 0.299 and not (early and rank == 0)
        assert reduced >= comms.ring_all_reduce(25_000, 4, 2).time(0.1, 1e6) - 0.001
        assert unequal >= (0.139 if rank == 0 else 0.199)  # of what it receives
        assert led.bytes() == [500_000, 140_000][rank]  # stamps are not counted
        assert led.messages == 3 * (rank == 0) + 2 + 1
        assert all(event.emulated for event in led.events)
        assert sum(event.waited for event in led.select("all_reduce")) >= 0.299


def test_without_a_link_nothing_is_emulated() -> None:
    def program(group):
        with ledger() as led:
            group.all_reduce(torch.ones(10))
        return [event.emulated for event in led.events]

    assert launch(program, 2) == [[False]] * 2


def test_links_inside_and_between_nodes() -> None:
    """Ranks 0 1 and 2 3 share a node; only messages between nodes are slow."""

    def program(group):
        x, found = torch.ones(1), []
        for partner in (group.rank ^ 1, group.rank ^ 2):
            stamps = stamped(group)
            group.barrier()
            start = time.monotonic()
            group.exchange((x, partner), (x.clone(), partner))
            found.append((stamps[partner], time.monotonic() - start))
        return found

    for (inside, _), (across, seconds) in launch(program, 4, link=Topology(2, inter=Link(0.5))):
        assert inside == [0] and across == [0.5] and seconds >= 0.499


def stamped(group):
    """By rank: seconds on the emulated wire of each message that this rank sends it from now on; 0 without a wire."""
    egress, found = group.world.egress, defaultdict(list)

    def deliver_at(src, dst, num_bytes):
        link = egress.links.between(src, dst)
        found[dst].append(link.seconds(num_bytes) if link else 0)
        return Egress.deliver_at(egress, src, dst, num_bytes)

    egress.deliver_at = deliver_at
    return found


def both_ways(group, numel):
    """By way: seconds, and seconds of this rank's messages on the emulated wire."""
    found = {}
    calls = {
        "flat": lambda x: comm.ring_all_reduce(x, group),
        "two levels": lambda x: comm.hierarchical_all_reduce(x, group, 2),
    }
    for name, call in calls.items():
        x = torch.full((numel,), float(group.rank))
        stamps = stamped(group)
        group.barrier()
        start = time.monotonic()
        call(x)
        found[name] = time.monotonic() - start, sum(sum(each) for each in stamps.values())
        assert torch.equal(x, torch.full((numel,), 6.0))
    return found


def test_two_levels_win_on_a_slow_link_between_nodes() -> None:
    numel, slow = 200_000, (0.05, 1e6)
    times = launch(both_ways, 4, numel, link=Topology(2, inter=Link(*slow)))
    flat = comms.ring_all_reduce(numel, 4, 4).time(*slow)
    two = comms.hierarchical_all_reduce(numel, 4, 4, 2).inter.time(*slow)
    for name, predicted in (("flat", flat), ("two levels", two)):
        seconds, on_the_wire = (max(each) for each in zip(*(rank[name] for rank in times), strict=True))
        assert on_the_wire == pytest.approx(predicted) and seconds >= predicted - 0.001
    assert flat > 2 * two
