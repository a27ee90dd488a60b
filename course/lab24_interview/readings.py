"""Reports to read in a debugging round: a trace, a hang report, two logs of NCCL, with numbers that they decide.

    trace       minillm's own trace (`minillm.measure.timeline.trace`) of one step, some fields left out
    hang        minillm's own hang report, written from a flight recorder in which ranks wait for each other
    transport   NCCL's log of setting up a communicator whose messages between nodes take the slow way
    calls       NCCL's log of collectives in which one rank does not do what the others do

Numbers are drawn afresh each time. The two NCCL logs are examples written for this course in the form in which
NCCL 2.2x prints them with NCCL_DEBUG=INFO (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
"""

import json
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from course.shared.decisions import Decision

MINUTES = 5
EXACT = 0.001  # tolerance of a rank or a line: one that is off by one is wrong
TOPICS = {"trace": "debugging", "hang": "debugging", "transport": "collectives", "calls": "collectives"}
EXAMPLE = "An example, written for this course in NCCL's format; numbers in front are lines of this page."


@dataclass(frozen=True)
class Reading:
    """report: what is read. decisions: numbers that it decides. strong: what a strong candidate says after them."""

    report: str
    decisions: tuple[Decision, ...]
    strong: str


def reading(name: str) -> Reading:
    """A reading as sessions name it: KIND:SEED."""
    kind, seed = name.split(":")
    return READINGS[kind](Random(int(seed)))


def of_topic(topic: str, draw: Random) -> list[str]:
    """One of each kind with fresh numbers; of a topic of the cards, all of them for "" and for debugging."""
    return [f"{kind}:{draw.randrange(10**6)}" for kind, its in TOPICS.items() if topic in ("", "debugging", its)]


def read_trace(draw: Random) -> Reading:
    """One rank's backward takes longer; the last bucket is waited for everywhere, least of all there."""
    from minillm.measure.ledger import Ledger, Span  # these need torch, which takes seconds to import
    from minillm.measure.timeline import trace

    ranks = 3
    slow = draw.randrange(ranks)
    other = 0 if slow else 1
    forward, backward, extra, transfer = (draw.choice(of) for of in ((20, 25), (40, 50), (8, 12, 15), (4, 5, 6)))
    size = draw.choice((8, 16, 32)) * 10**6
    done = forward + backward + extra + transfer  # the last bucket, on all ranks
    ledgers = []
    for rank in range(ranks):
        own = backward + extra * (rank == slow)
        first, last = forward + own // 2, forward + own
        spans = [
            Span("forward", "compute", 0.0, forward / 1e3),
            Span("backward", "compute", forward / 1e3, last / 1e3),
            Span("step", "optimizer", done / 1e3, (done + 3) / 1e3),
        ]
        reached = forward + (backward + extra) // 2 + transfer
        events = [
            _all_reduce(size, first, reached, 0.0),
            _all_reduce(size, last, done, done - last),
        ]
        ledgers.append(Ledger(events, spans))
    waited, fair = extra + transfer, transfer
    report = "\n".join(_slice(event) for event in trace(ledgers)["traceEvents"] if event["ph"] == "X")
    which = Decision(
        "Which rank (pid) makes the others wait?",
        slow,
        "",
        f"Rank {slow} waits least for the last all_reduce, {fair} ms, since its backward ends last.",
        tolerance=EXACT,
        below="That rank waits for another one.",
        above="That rank waits for another one.",
    )
    exposed = Decision(
        f"How many milliseconds of communication are exposed on rank {other}?",
        waited,
        "ms",
        f"waited_ms of both buckets: 0 + {waited}. The first all_reduce ran beside backward.",
        slips={(waited + reached - forward - backward // 2) / waited: "That is all communication, hidden or not."},
        tolerance=0.02,
    )
    left = Decision(
        "How many of them would be left if all ranks computed equally fast?",
        fair,
        "ms",
        f"What rank {slow} waits: {fair} ms, the transfer itself. The other {extra} ms are the wait for rank {slow}.",
        slips={extra / fair: "Those are the milliseconds that would go."},
        tolerance=0.02,
    )
    strong = (
        "The step is the slowest rank's backward plus the last transfer. A smaller last bucket shortens the transfer; "
        f"a faster network does nothing for the {extra} ms. Look at rank {slow}: clocks, input, longer sequences."
    )
    return Reading(f"One step in minillm's trace, times in µs:\n{report}", (which, exposed, left), strong)


def read_hang(draw: Random) -> Reading:
    """Tensor-parallel pairs and data-parallel groups across them. One rank is outside: its partner waits for it in the
    pair, everybody else in a group of gradients, where some wait for that partner."""
    replicas = draw.choice((3, 4))
    lost = draw.randrange(2 * replicas)
    partner, ranks = lost ^ 1, range(2 * replicas)
    report = _hang_table(lost, partner, replicas, draw.choice((31.2, 44.8, 62.5)))
    direct = replicas  # the partner, and all other ranks of the lost one's data-parallel group
    where = Decision(
        "On which rank do you look for the cause?",
        lost,
        "",
        f"Rank {lost} waits for nobody and is in no operation; follow the last column from any rank and you end there.",
        tolerance=EXACT,
        below="That rank waits for another one: follow the last column.",
        above="That rank waits for another one: follow the last column.",
    )
    how_many = Decision(
        "How many ranks wait for it directly?",
        direct,
        "",
        f"{direct}: rank {partner} in their pair and {replicas - 1} in its group of gradients. The other "
        f"{replicas - 1} wait for rank {partner}.",
        slips={(len(ranks) - 1) / direct: "All others wait, but some of them for its partner."},
        tolerance=EXACT,
    )
    strong = (
        "The longest wait names a victim, not the cause. Take the stack of the rank that waits for nobody (py-spy "
        "dump): it reads its data, saves, or took another branch. Then ask why only there, and time that call out."
    )
    return Reading(f"A job hangs. minillm's report:\n{report}", (where, how_many), strong)


def read_transport(draw: Random) -> Reading:
    """Between nodes the log says NET/Socket; one line above says why."""
    each, channels, pid = draw.choice((4, 8)), draw.choice((2, 4)), draw.randrange(400, 800)
    last = each - 1
    disabled = draw.random() < 0.5
    name = f"n0:{pid}:{pid + 121} [{last}] NCCL INFO"
    cause = "NCCL_IB_DISABLE set by environment to 1." if disabled else "NET/IB : No device found."
    lines = [
        "Bootstrap : Using eth0:10.0.3.11<0>",
        "NCCL_SOCKET_IFNAME set by environment to eth0",
        cause,
        "NET/Socket : Using [0]eth0:10.0.3.11<0>",
        "Using network Socket",
        f"comm 0x55d0c8a3e0f0 rank {last} nranks {2 * each} cudaDev {last} busId d8000 - Init START",
        *(f"Channel {c:02}/0 : {last}[{last}] -> {last - 1}[{last - 1}] via P2P/IPC" for c in range(channels)),
        *(f"Channel {c:02}/0 : {last}[{last}] -> {each}[0] [send] via NET/Socket/0" for c in range(channels)),
        f"comm 0x55d0c8a3e0f0 rank {last} nranks {2 * each} cudaDev {last} busId d8000 - Init COMPLETE",
    ]
    lines.insert(draw.randrange(1, 3), "NET/Plugin : No plugin found (libnccl-net.so).")
    place = lines.index(cause) + 1
    which = Decision(
        "The nodes have InfiniBand, and all_reduce between them reaches 1 GB/s. Which line says why?",
        place,
        "",
        f"Line {place}: {'InfiniBand is switched off by a variable' if disabled else 'NCCL saw no InfiniBand device'}, "
        "so that messages between nodes take TCP over eth0, as NET/Socket says below.",
        tolerance=EXACT,
        below="That line is the same where InfiniBand works.",
        above="That line is a consequence: something above it decided so.",
    )
    node = Decision(
        "How many GPUs does a node have here?",
        each,
        "",
        f"Rank {each} is device [0] of the next node: {each} ranks lie before it.",
        slips={2.0: "That is nranks, the ranks of both nodes."},
        tolerance=EXACT,
    )
    strong = (
        "NCCL_SOCKET_IFNAME and NET/Plugin are innocent: the bootstrap uses TCP in any case. "
        + ("Unset NCCL_IB_DISABLE" if disabled else "Check ibv_devinfo inside the container, and /dev/infiniband")
        + "; NCCL_NET=IB then makes a missing device an error instead of a slow job."
    )
    return Reading(f"{EXAMPLE}\n{_numbered([f'{name} {line}' for line in lines])}", (which, node), strong)


def read_calls(draw: Random) -> Reading:
    """One rank has another operation, or another count, under the same opCount."""
    ranks, number, count = 4, draw.randrange(16, 200), draw.choice((1, 4, 16)) * 2**20
    odd, kind, width = draw.randrange(ranks), *draw.choice(((7, 4), (9, 2)))
    other_operation = draw.random() < 0.5
    lines = []
    for rank in range(ranks):
        call = "Broadcast" if rank == odd and other_operation else "AllReduce"
        amount = count - 1024 if rank == odd and not other_operation else count
        buffer = f"0x7f{rank}c4e000000"
        lines.append(
            f"n0:{512 + rank}:{624 + rank} [{rank}] NCCL INFO {call}: opCount {number:x} "
            f"sendbuff {buffer} recvbuff {buffer} count {amount} datatype {kind} op 0 root 0 "
            f"comm 0x55d0c8a3e{rank}f0 [nranks={ranks}] stream 0x55d0c7b1f2a0"
        )
    which = Decision(
        "The job hangs after these lines. Which rank does not do what the others do?",
        odd,
        "",
        f"Under opCount {number:x} rank {odd} has "
        + ("Broadcast" if other_operation else f"a count of {count - 1024:,}")
        + f"; the others {'AllReduce' if other_operation else f'{count:,}'}.",
        tolerance=EXACT,
        below="That rank does what most of them do.",
        above="That rank does what most of them do.",
    )
    size = Decision(
        f"How many bytes does each of the others reduce in that call? (datatype {kind} is "
        + ("ncclFloat32)" if width == 4 else "ncclBfloat16)"),
        count * width,
        "B",
        f"{count:,} elements of {width} bytes: count is of elements.",
        slips={1 / width: "count is of elements, not of bytes."},
        tolerance=0.01,
    )
    strong = (
        "opCount is in hexadecimal and numbers the calls of one communicator: compare equal numbers of equal "
        f"communicators. Then ask which branch or which shape only rank {odd} has, "
        + ("such as a save that only some ranks enter." if other_operation else "such as a shorter last batch.")
    )
    return Reading(f"{EXAMPLE}\n{_numbered(lines)}", (which, size), strong)


READINGS: dict[str, Callable[[Random], Reading]] = {
    "trace": read_trace,
    "hang": read_hang,
    "transport": read_transport,
    "calls": read_calls,
}


def _all_reduce(size: int, start: float, end: float, waited: float) -> Any:
    from minillm.measure.ledger import Event

    return Event("all_reduce", "dp", size, 4, (size // 4,), "float32", start / 1e3, end / 1e3, waited / 1e3)


def _slice(event: dict) -> str:
    """One slice of the trace on a line, of its arguments those that matter."""
    shown = {key: event[key] for key in ("name", "cat", "pid")} | {key: round(event[key]) for key in ("ts", "dur")}
    if event["args"]:
        shown["args"] = {"waited_ms": round(event["args"]["waited_ms"], 1)}
    return "  " + json.dumps(shown, separators=(", ", ":"))


def _hang_table(lost: int, partner: int, replicas: int, since: float) -> str:
    """`hang_report` of a real flight recorder, whose clock is ours."""
    from minillm.comm.diagnostics import flight_recorder, hang_report

    ranks, clock = list(range(2 * replicas)), SimpleNamespace(now=0.0)
    own_clock = SimpleNamespace(monotonic=lambda: clock.now)
    pairs = [[rank, rank + 1] for rank in ranks[::2]]
    gradients = [ranks[0::2], ranks[1::2]]
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(flight_recorder, "time", own_clock),
        patch.object(hang_report, "time", own_clock),
    ):
        recorder = flight_recorder.FlightRecorder(Path(folder, "recorder"), ranks)
        for rank in ranks:
            recorder.set_state(rank, flight_recorder.RUNNING)
        clock.now = 1.2  # the pair of the lost rank goes into its next all_reduce, the lost one does not
        pair = pairs[lost // 2]
        said = flight_recorder.describe("all_reduce", [4096, 1024], "bfloat16", pair, f"tp{lost // 2}")
        recorder.post(partner, 1, 7, said)
        for rank in ranks:
            clock.now = 1.3 + 0.1 * rank
            if rank not in pair:
                group = gradients[rank % 2]
                said = flight_recorder.describe("reduce_scatter", [8388608], "float32", group, f"dp{rank % 2}")
                recorder.post(rank, 2 + rank % 2, 3, said)
        clock.now = 1.2 + since
        table = hang_report.hang_report(recorder, {lost: "loader.py:88 in read_shard"})
        recorder.close()
    return textwrap.indent(table, "  ")


def _numbered(lines: list[str]) -> str:
    """Lines of a log with their number; what does not fit goes on below, indented."""
    folded = []
    for number, line in enumerate(lines, 1):
        first, *rest = textwrap.wrap(line, 96, break_long_words=False, break_on_hyphens=False)
        folded += [f"{number:>2}  {first}", *(f"      {part}" for part in rest)]
    return "\n".join(folded)
