"""What lab 01 claims: bytes, rounds and values of collectives, where the ring loses, where two levels win.

Each function takes what a cell measured with the reader's collectives; those in CLAIMS measure minillm's when called
without.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from course.kit.answers import answers_of
from course.kit.receipts import Receipt, formula, receipt, row
from course.lab01_collectives import experiments
from course.shared.table import Table, table
from minillm.comm import launch
from minillm.predict import comms

WORLD = 4
CROSSING = 0.5  # relative: lines that cross at a small angle move the crossing far when one of them moves a little
ANSWERS = answers_of("01_collectives")


def bytes_moved(moved: dict[str, Any] | None = None, guess_mb: float | None = None) -> Receipt:
    """Bytes of each collective: the busiest rank's by the ledger, all ranks' on the wire."""
    moved = moved or experiments.bytes_of_collectives(WORLD)
    rows = []
    for line in moved["rows"]:
        guess = guess_mb * 1e6 if guess_mb and line["name"] == "all-reduce" else None
        name, predicted = f"{line['name']}: busiest rank, ledger", line["busiest_predicted"]
        rows.append(row(name, predicted, line["busiest_ledger"], "B", guess=guess))
        rows.append(row("    all ranks, wire", line["predicted"], line["wire"], "B", tolerance=0.03, noisy=True))
    title = f"P = {moved['payload_bytes']:,} bytes on {moved['world_size']} ranks"
    return receipt(title, rows, open_rows=2, show="parameter server: busiest")


def same_bits(same: bool | None = None, error: float | None = None) -> Receipt:
    """A ring adds in another order for every chunk: equal bits on all ranks, not those of another order."""
    if same is None:
        same, error = launch(experiments.bits_of_ring, WORLD)[0]
    return receipt(
        "ring all-reduce of random numbers",
        [
            row("all ranks hold the same bits", True, same),
            row("largest difference to the sum in fp64", None, error),
        ],
    )


def messages(ledgers: Sequence | None = None) -> Receipt:
    """Messages each rank sends in one ring all-reduce."""
    ledgers = ledgers or launch(experiments.one_all_reduce, WORLD)
    sent = [led.messages for led in ledgers]
    return receipt(
        "messages per rank in one ring all-reduce",
        [row("messages of every rank: 2(N-1)", [2 * (len(sent) - 1)] * len(sent), sent)],
    )


def crossovers(loopback: dict[str, Any], emulated: dict[str, Any]) -> Receipt:
    """From which size on the ring is quicker than the others: beside known α and β, and beside a fitted line."""
    rows = [row("loopback: typical error of the fit", None, loopback["fit_error"])]
    for other, predicted in loopback["predicted_crossover_bytes"].items():  # fitted here, so the line is no promise
        rows.append(row(f"loopback: ring passes {other} at", None, _crossover(loopback, other), "B"))
        rows.append(formula("    by the fitted line", round(predicted), "B"))
    for other, predicted in emulated["predicted_crossover_bytes"].items():
        found = _crossover(emulated, other)
        rows.append(
            row(f"emulated: ring passes {other} at", round(predicted), found, "B", tolerance=CROSSING, noisy=True)
        )
    smallest = {name: seconds[0] for name, seconds in loopback["measured_s"].items()}
    quickest = min(smallest, key=smallest.get)
    rows += [
        row("loopback: α of one round, fitted", None, loopback["latency_s"], "s"),
        row("    β, fitted", None, loopback["bandwidth_bytes_per_s"], "B/s"),
        row(f"    4 kB: time of the ring / time of {quickest}", None, smallest["ring"] / smallest[quickest]),
    ]
    return receipt("where the lines cross", rows, open_rows=1, show="ring passes")


def _crossover(numbers: dict[str, Any], other: str) -> int | str:
    """Bytes from which on the ring is quicker; in words where that lies beyond what was measured."""
    sizes, found = numbers["sizes"], numbers["measured_crossover_bytes"][other]
    if found is None:
        return f"above {sizes[-1]:,} B (largest measured)"
    return round(found) if found > sizes[0] else f"below {sizes[0]:,} B (smallest measured)"


def two_nodes(levels: dict[str, Any] | None = None) -> Receipt:
    """A flat ring and two levels over an emulated slow link between two nodes, the largest size."""
    levels = levels or experiments.flat_against_two_level()
    seconds = {name: (levels["predicted_s"][name][-1], found[-1]) for name, found in levels["measured_s"].items()}
    tolerance = {"flat ring": 0.3, "two levels": 0.5}  # the formula leaves out what two levels do inside a node
    rows = [row(f"{name}, emulated", *pair, "s", tolerance[name], noisy=True) for name, pair in seconds.items()]
    wins = [flat / two for flat, two in zip(*seconds.values(), strict=True)]
    rows.append(row("    two levels win, times", *wins, tolerance=0.4, noisy=True))
    return receipt(f"{levels['sizes'][-1]:,} bytes over two nodes, emulated (formula: the slow link alone)", rows)


def leaving_a_node(nodes: int = 8, per_node: int = 8) -> Table:
    """What leaves a node in a flat ring and over two levels, by formula."""
    size, world = 1 << 28, nodes * per_node
    two, flat = comms.hierarchical_all_reduce(size, 4, world, per_node), comms.ring_all_reduce(size, 4, world)
    leaving, payload = comms.flat_ring_crossing_bytes(size, 4, world, per_node)[0], 4 * size
    busiest = max(flat.sent_per_rank), max(two.inter.sent_per_rank)
    lines = [
        ("leaves each node / P", leaving / payload, two.crossing_bytes_per_node[0] / payload),
        ("    through the busiest network card / P", *(sent / payload for sent in busiest)),
        ("rounds", flat.rounds, two.total.rounds),
        ("    that cross between nodes", flat.rounds, two.inter.rounds),
    ]
    return table(f"{world} ranks, {per_node} per node; formula", ("", "flat ring", "two levels"), lines)


def logged(all_gather: Callable = ANSWERS.all_gather) -> Receipt:
    """What a training loop would log of a gradient whose chunks lie one place off."""
    ranks = launch(experiments.one_place_off, WORLD, all_gather)
    wrong, good = ranks[0]
    return receipt(
        "what a training loop would log",
        [
            row("first four numbers of the gradient, right", None, tuple(good[:4].tolist())),
            row("    with the bug", None, tuple(wrong[:4].tolist())),
            row("sum of the gradient", good.sum(), wrong.sum()),
            row("norm of the gradient", good.norm(), wrong.norm(), tolerance=1e-6),
            row("the same on every rank", True, all((other == wrong).all() for other, _ in ranks)),
        ],
        open_rows=5,
    )


def diagnosis(bad_rank: int, culprit: Callable, table: str, circle: str) -> Receipt:
    """Whom the reader's function blames for two hangs, from their tables."""
    found, in_a_circle = culprit(_waits_for(table)), culprit(_waits_for(circle))
    return receipt(
        "the diagnosis",
        [
            row("one rank takes another branch: to blame is rank", bad_rank, found),
            row("everybody sends first: to blame is", "nobody", "nobody" if in_a_circle is None else in_a_circle),
        ],
    )


def _waits_for(table: str) -> dict[int, list[int]]:
    """The last column of a table of who waits for whom: rank -> ranks."""
    lines = table.splitlines()[2:]
    return {int(line.split()[0]): [int(r) for r in re.findall(r"rank (\d+)", line)] for line in lines}


def torch_on_the_wire(wire: dict[str, int]) -> Receipt:
    """torch.distributed's calls on gloo beside the formulas of ours."""
    costs, twins = experiments.costs(WORLD), experiments.TORCH_TWINS
    size = 4 * experiments.ELEMENTS
    scatter = "reduce_scatter_tensor"
    rows = [
        row(f"dist.{call}", costs[twins[call]].total_bytes, wire[call], "B", tolerance=0.03, noisy=True)
        for call in (scatter, *(name for name in wire if name != scatter))
    ]
    rows.insert(1, row("    as multiple of the ring", None, wire[scatter] / costs["reduce-scatter"].total_bytes))
    return receipt(f"torch.distributed on gloo, bytes on the wire for P = {size:,}", rows, open_rows=2)


def interview_numbers() -> Receipt:
    """The numbers behind the answers; 5 µs a round where none is given."""
    gb, latency = 1e9, 5e-6
    rows = []
    for n in (2, 4, 8, 64, 1024):
        ring = comms.ring_all_reduce(1024, 1, n)
        rows.append(formula(f"1. ring, {n} ranks: bytes sent per rank / P", ring.sent_per_rank[0] / 1024))
        rows.append(formula(f"    its {ring.rounds:,} rounds at 5 µs each", ring.rounds * latency, "s"))
    whole, part = comms.ring_all_reduce(70 * 10**9, 2, 64), comms.ring_all_reduce(70 * 10**9 // 16, 2, 4)
    server = comms.parameter_server_all_reduce(4, 1, 4)
    rows += [
        formula("2. 70B parameters in bf16, 64 ranks: sent per rank", whole.sent_per_rank[0] / gb, "GB"),
        formula("    at 400 Gb/s", whole.time(latency, 50 * gb), "s"),
        formula("    split 16 ways, 4 replicas, at 400 Gb/s", part.time(latency, 50 * gb), "s"),
        formula("4. parameter server, 4 ranks: the server sends / P", server.sent_per_rank[0] / 4),
    ]
    for n in (8, 64, 1024):
        size = comms.crossover_bytes(comms.ring_all_reduce, comms.tree_all_reduce, n, latency, 50 * gb)
        rows.append(formula(f"5. ring passes an unpipelined tree, {n} ranks, 50 GB/s", size / 1e6, "MB"))
        rows.append(
            formula("    a pipelined double binary tree", _double_tree_crossover(n, latency, 50 * gb) / 1e6, "MB")
        )
    routed = comms.pairwise_all_to_all(4096 * 2 * 4096, 2, 8)
    sent = routed.sent_per_rank[0] / 1e6
    rows.append(formula("6. all-to-all of 4,096 tokens, top-2, hidden 4,096, bf16, 8 ranks", sent, "MB"))
    rows.append(formula("7. bus bandwidth / (P / time), 8 ranks", comms.ring_all_reduce(8, 1, 8).sent_per_rank[0] / 8))
    return receipt("numbers for the answers", rows, open_rows=1)


def _double_tree_crossover(n: int, latency: float, bandwidth: float) -> float:
    """Bytes from which a ring beats two pipelined trees of 2·log2(n) latencies and 2P bytes (Sanders et al. 2009)."""
    more_rounds, fewer_bytes = 2 * (n - 1) - 2 * math.log2(n), 2 / n
    return more_rounds * latency * bandwidth / fewer_bytes


def design_numbers() -> Receipt:
    """The numbers behind the design questions: gradients of 8B on 64 GPUs, decode of 70B over 8."""
    params, card, nvlink = 8 * 10**9, 50e9, 450e9
    flat, two = comms.ring_all_reduce(params, 4, 64), comms.hierarchical_all_reduce(params, 4, 64, 8)
    leaves_flat = comms.flat_ring_crossing_bytes(params, 4, 64, 8)[0]
    payload, latency, calls = 32 * 8192 * 2, 2e-6, 160
    ring = comms.ring_all_reduce(32 * 8192, 2, 8).time(latency, nvlink)
    return receipt(
        "numbers for the design questions",
        [
            formula("A. fp32 gradients: sent per GPU, 64 GPUs", flat.sent_per_rank[0] / 1e9, "GB"),
            formula("    at 50 GB/s per GPU", flat.sent_per_rank[0] / card, "s"),
            formula("    50 GB/s per node: flat ring over all cards", leaves_flat / card, "s"),
            formula("    two levels, between nodes", two.crossing_bytes_per_node[0] / card, "s"),
            formula("    and inside a node, at 450 GB/s", max(two.intra.sent_per_rank) / nvlink, "s"),
            formula("B. ring: one all-reduce, and per token", _once_and_per_token(ring, calls), "µs, ms"),
            formula("    one-shot exchange", _once_and_per_token(latency + 7 * payload / nvlink, calls), "µs, ms"),
            formula("    in-network", _once_and_per_token(2 * latency + payload / nvlink, calls), "µs, ms"),
        ],
        open_rows=1,
    )


def _once_and_per_token(seconds: float, calls: int) -> tuple[float, float]:
    """Microseconds of one call, milliseconds of all calls of a token."""
    return seconds * 1e6, calls * seconds * 1e3


CLAIMS = (bytes_moved, same_bits, messages, logged, two_nodes)
