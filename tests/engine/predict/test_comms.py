"""The formulas against message-by-message simulations of the algorithms, and against the laws of the field.

`play` is the independent reference: it moves real values in real messages, one round at a time, and counts what it
sends; the algorithms below are written from their description, knowing nothing of `predict`.
"""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.predict import comms

ITEMSIZE = 4
SIZES = (0, 1, 2, 5, 8, 13, 24)
WORLDS = range(1, 10)


def chunks(data, parts):
    small, more = divmod(len(data), parts)
    cuts = [0]
    for part in range(parts):
        cuts.append(cuts[-1] + small + (1 if part < more else 0))
    return [slice(a, b) for a, b in itertools.pairwise(cuts)]


class Wire:
    """Counts the messages of one round at a time; a message is (source, destination, values)."""

    def __init__(self, world):
        self.world, self.sent, self.rounds, self.critical = world, Counter(), 0, 0

    def round(self, messages):
        sources, destinations = [m[0] for m in messages], [m[1] for m in messages]
        assert len(set(sources)) == len(sources) and len(set(destinations)) == len(destinations)  # one port per rank
        for source, destination, values in messages:
            assert source != destination
            self.sent[source] += len(values) * ITEMSIZE
        self.rounds += 1
        self.critical += max(len(values) for *_, values in messages) * ITEMSIZE
        return [(source, destination, list(values)) for source, destination, values in messages]

    def cost(self):
        return comms.Cost(self.rounds, self.critical, tuple(self.sent[r] for r in range(self.world)))


def start(world, n):
    data = [[rank * 1000 + i for i in range(n)] for rank in range(world)]
    return data, [sum(column) for column in zip(*data, strict=True)]


def add(target, part, values):
    target[part] = [a + b for a, b in zip(target[part], values, strict=True)]


def play_reduce_scatter(data, ranks):
    world = len(ranks)
    parts = chunks(data[ranks[0]], world)
    for step in range(world - 1):
        sent = [(r, ranks[(i + 1) % world], data[r][parts[(i - step - 1) % world]]) for i, r in enumerate(ranks)]
        yield sent
        for source, destination, values in wire_copy(sent):
            add(data[destination], parts[(ranks.index(source) - step - 1) % world], values)


def play_all_gather(data, ranks):
    world = len(ranks)
    parts = chunks(data[ranks[0]], world)
    for step in range(world - 1):
        sent = [(r, ranks[(i + 1) % world], data[r][parts[(i - step) % world]]) for i, r in enumerate(ranks)]
        yield sent
        for source, destination, values in wire_copy(sent):
            data[destination][parts[(ranks.index(source) - step) % world]] = values


def wire_copy(messages):
    return [(a, b, list(values)) for a, b, values in messages]


def drive(wire, *generators):
    """Runs several groups side by side: their messages of the same round travel together."""
    running = list(generators)
    while running:
        batches = [(g, next(g, None)) for g in running]
        running = [g for g, batch in batches if batch is not None]
        messages = [m for _, batch in batches if batch is not None for m in batch]
        if messages:
            wire.round(messages)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("world", WORLDS)
def test_ring(world, n):
    data, total = start(world, n)
    scatter, gather = Wire(world), Wire(world)
    drive(scatter, play_reduce_scatter(data, list(range(world))))
    for rank, part in enumerate(chunks(total, world)):
        assert data[rank][part] == total[part]  # rank r owns chunk r
    drive(gather, play_all_gather(data, list(range(world))))
    assert all(row == total for row in data)
    assert comms.ring_reduce_scatter(n, ITEMSIZE, world) == scatter.cost()
    assert comms.ring_all_gather(n, ITEMSIZE, world) == gather.cost()
    assert comms.ring_all_reduce(n, ITEMSIZE, world) == scatter.cost() + gather.cost()


@pytest.mark.parametrize("n", (0, 5))
@pytest.mark.parametrize("world, root", [(w, r) for w in WORLDS for r in range(w)])
def test_tree(world, root, n):
    data, total = start(world, n)
    up, down = Wire(world), Wire(world)
    rank_of = [(v + root) % world for v in range(world)]
    reach = [1 << k for k in range(10) if 1 << k < world]
    for step in reversed(reach):
        messages = [(rank_of[v], rank_of[v - step], data[rank_of[v]]) for v in range(step, min(2 * step, world))]
        for _, destination, values in up.round(messages):
            add(data[destination], slice(None), values)
    assert data[root] == total
    for step in reach:
        messages = [(rank_of[v], rank_of[v + step], data[rank_of[v]]) for v in range(step) if v + step < world]
        for _, destination, values in down.round(messages):
            data[destination] = values
    assert all(row == total for row in data)
    assert comms.tree_reduce(n, ITEMSIZE, world, root) == up.cost()
    assert comms.tree_broadcast(n, ITEMSIZE, world, root) == down.cost()
    assert comms.tree_all_reduce(n, ITEMSIZE, world, root) == up.cost() + down.cost()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("world", range(1, 18))
def test_recursive_doubling(world, n):
    data, total = start(world, n)
    wire = Wire(world)
    power = max(p for p in (1, 2, 4, 8, 16) if p <= world)
    pairs = [(power + i, i) for i in range(world - power)]
    if pairs:
        for _, destination, values in wire.round([(late, early, data[late]) for late, early in pairs]):
            add(data[destination], slice(None), values)
    distance = 1
    while distance < power:
        for _, destination, values in wire.round([(r, r ^ distance, data[r]) for r in range(power)]):
            add(data[destination], slice(None), values)
        distance *= 2
    if pairs:
        for _, destination, values in wire.round([(early, late, data[early]) for late, early in pairs]):
            data[destination] = values
    assert all(row == total for row in data)
    assert comms.recursive_doubling_all_reduce(n, ITEMSIZE, world) == wire.cost()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("world", WORLDS)
def test_all_to_all(world, n):
    data, _ = start(world, n)
    wire = Wire(world)
    parts = chunks(range(n), world)
    got = [{rank: data[rank][parts[rank]]} for rank in range(world)]
    for step in range(1, world):
        messages = [(r, (r + step) % world, data[r][parts[(r + step) % world]]) for r in range(world)]
        for source, destination, values in wire.round(messages):
            got[destination][source] = values
    for rank in range(world):
        assert got[rank] == {source: data[source][parts[rank]] for source in range(world)}
    assert comms.pairwise_all_to_all(n, ITEMSIZE, world) == wire.cost()


@pytest.mark.parametrize("n", (0, 5))
@pytest.mark.parametrize("world, root", [(w, r) for w in WORLDS for r in range(w)])
def test_parameter_server_and_linear_broadcast(world, root, n):
    data, total = start(world, n)
    gather, spread = Wire(world), Wire(world)
    others = [rank for rank in range(world) if rank != root]
    for rank in others:
        for _, destination, values in gather.round([(rank, root, data[rank])]):
            add(data[destination], slice(None), values)
    for rank in others:
        for _, destination, values in spread.round([(root, rank, data[root])]):
            data[destination] = values
    assert all(row == total for row in data)
    cost = comms.parameter_server_all_reduce(n, ITEMSIZE, world, root)
    assert cost == gather.cost() + spread.cost()
    assert comms.linear_broadcast(n, ITEMSIZE, world, root) == spread.cost()
    through_root = cost.sent_per_rank[root] + sum(cost.sent_per_rank[rank] for rank in others)
    assert through_root == cost.total_bytes == 2 * (world - 1) * n * ITEMSIZE  # P10


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("nodes, per_node", [(n, g) for n in (1, 2, 3, 4) for g in (1, 2, 3, 4)])
def test_hierarchical(nodes, per_node, n):
    world = nodes * per_node
    data, total = start(world, n)
    inside, across, back = Wire(world), Wire(world), Wire(world)
    node_groups = [list(range(node * per_node, (node + 1) * per_node)) for node in range(nodes)]
    drive(inside, *(play_reduce_scatter(data, group) for group in node_groups))
    shards = chunks(total, per_node)
    held = {rank: data[rank][shards[rank % per_node]] for rank in range(world)}  # the shard each rank owns
    rings = [list(range(local, world, per_node)) for local in range(per_node)]
    drive(across, *(play_reduce_scatter(held, ring) for ring in rings))
    drive(across, *(play_all_gather(held, ring) for ring in rings))
    for rank in range(world):
        data[rank][shards[rank % per_node]] = held[rank]
    drive(back, *(play_all_gather(data, group) for group in node_groups))
    assert all(row == total for row in data)

    cost = comms.hierarchical_all_reduce(n, ITEMSIZE, world, per_node)
    assert cost.intra == inside.cost() + back.cost()
    assert cost.inter == across.cost()
    assert cost.total.rounds == 2 * (per_node - 1) + 2 * (nodes - 1)
    assert cost.crossing_bytes_per_node == tuple(sum(across.sent[r] for r in group) for group in node_groups)


def test_hierarchy_against_the_flat_ring():
    """P09: 8 nodes of 8 ranks: 1.75 P against 1.97 P over each node's wire, 28 rounds against 126."""
    n, world, per_node = 64 * 1000, 64, 8
    size = n * ITEMSIZE
    cost = comms.hierarchical_all_reduce(n, ITEMSIZE, world, per_node)
    assert set(cost.crossing_bytes_per_node) == {1.75 * size}
    assert set(comms.flat_ring_crossing_bytes(n, ITEMSIZE, world, per_node)) == {2 * 63 / 64 * size}
    assert (cost.total.rounds, comms.ring_all_reduce(n, ITEMSIZE, world).rounds) == (28, 126)
    fast, slow = (1e-6, 100e9), (20e-6, 10e9)
    assert cost.time(fast, slow) < comms.ring_all_reduce(n, ITEMSIZE, world).time(*slow)
    assert comms.flat_ring_crossing_bytes(n, ITEMSIZE, 8, 8) == (0,)


@pytest.mark.parametrize("nodes, per_node", [(2, 1), (2, 3), (3, 2), (4, 4)])
def test_flat_ring_crossing_counts_the_messages_between_nodes(nodes, per_node):
    world, n = nodes * per_node, 29
    data, _ = start(world, n)
    leaving = Counter()
    for play in (play_reduce_scatter, play_all_gather):
        for messages in play(data, list(range(world))):
            for source, destination, values in messages:
                if source // per_node != destination // per_node:
                    leaving[source // per_node] += len(values) * ITEMSIZE
    crossing = comms.flat_ring_crossing_bytes(n, ITEMSIZE, world, per_node)
    assert crossing == tuple(leaving[node] for node in range(nodes))


@given(n=st.integers(0, 10**9), itemsize=st.sampled_from([1, 2, 4, 8]), world=st.integers(1, 300))
def test_textbook_totals(n, itemsize, world):
    """P01-P05: what all ranks send together is exact whether or not the tensor divides."""
    size, others = n * itemsize, world - 1
    args = (n, itemsize, world)
    assert comms.ring_reduce_scatter(*args).total_bytes == others * size
    assert comms.ring_all_gather(*args).total_bytes == others * size
    assert comms.ring_all_reduce(*args).total_bytes == 2 * others * size
    assert comms.pairwise_all_to_all(*args).total_bytes == others * size
    assert comms.tree_broadcast(*args).total_bytes == comms.linear_broadcast(*args).total_bytes == others * size
    assert comms.tree_reduce(*args).total_bytes == others * size
    if n % world == 0:
        assert set(comms.ring_all_reduce(*args).sent_per_rank) == {2 * size * others // world}
    assert comms.ring_all_reduce(*args).rounds == 2 * others
    assert comms.tree_broadcast(*args).rounds == (math.ceil(math.log2(world)))


@given(
    world=st.integers(2, 64),
    latency=st.floats(1e-7, 1e-2),
    bandwidth=st.floats(1e6, 1e12),
    quick=st.sampled_from([comms.tree_all_reduce, comms.recursive_doubling_all_reduce]),
)
def test_crossover_is_where_the_times_meet(world, latency, bandwidth, quick):
    at = comms.crossover_bytes(comms.ring_all_reduce, quick, world, latency, bandwidth)

    def ahead(size):
        elements = max(1, round(size / world)) * world  # whole chunks, so the line is exact
        seconds = [c(elements, 1, world).time(latency, bandwidth) for c in (comms.ring_all_reduce, quick)]
        return seconds[1] - seconds[0]  # above 0: the ring wins

    if at == math.inf:
        assert ahead(1e15) <= 1e-12 * 1e15 / bandwidth
    elif at == 0:
        assert ahead(world) >= -1e-12
    elif at > 100 * world:
        assert ahead(at * 1.1) > 0 > ahead(at * 0.9)


def test_crossover_by_hand():
    """N = 4: ring 6a + 1.5P/b, tree 4a + 4P/b, recursive doubling 2a + 2P/b."""
    ring, tree, doubling = comms.ring_all_reduce, comms.tree_all_reduce, comms.recursive_doubling_all_reduce
    assert comms.crossover_bytes(ring, tree, 4, 1e-4, 1e9) == pytest.approx(2 * 1e-4 * 1e9 / 2.5)
    assert comms.crossover_bytes(ring, doubling, 4, 1e-4, 1e9) == pytest.approx(4 * 1e-4 * 1e9 / 0.5)
    assert comms.crossover_bytes(ring, tree, 2, 1e-4, 1e9) == 0.0  # same rounds, half the bytes
    assert comms.crossover_bytes(ring, doubling, 2, 1e-4, 1e9) == math.inf  # same bytes, twice the rounds
    assert comms.crossover_bytes(tree, ring, 4, 1e-4, 1e9) == math.inf


def test_time_by_hand():
    """Seventy billion bf16 weights over 64 ranks at 50 GB/s each: 5.51 s."""
    assert comms.ring_all_reduce(70 * 10**9, 2, 64).time(0.0, 50e9) == pytest.approx(5.5125, rel=1e-6)
    assert comms.tree_broadcast(1000, 4, 5).time(1e-3, 1e6) == pytest.approx(3 * (1e-3 + 4e-3))


@pytest.mark.parametrize(
    "call, names",
    [
        (lambda: comms.ring_all_reduce(10, 4, 0), "world_size is 0"),
        (lambda: comms.ring_all_reduce(-1, 4, 2), "num_elements is -1"),
        (lambda: comms.tree_broadcast(10, 0, 2), "itemsize is 0"),
        (lambda: comms.tree_reduce(10, 4, 4, root=4), "root is 4"),
        (lambda: comms.hierarchical_all_reduce(10, 4, 6, 4), "ranks_per_node is 4"),
        (lambda: comms.flat_ring_crossing_bytes(10, 4, 6, 0), "ranks_per_node is 0"),
        (lambda: comms.ring_all_reduce(10, 4, 2).time(1e-6, 0), "bandwidth_bytes_per_s is 0"),
        (lambda: comms.ring_all_reduce(10, 4, 2).time(-1, 1e9), "latency_s is -1"),
        (lambda: comms.crossover_bytes(comms.ring_all_reduce, comms.tree_all_reduce, 4, 1e-6, 0), "bandwidth"),
        (lambda: comms.ring_all_reduce(1, 1, 2) + comms.ring_all_reduce(1, 1, 3), "2 and 3 ranks"),
    ],
)
def test_bad_input_is_one_clear_sentence(call, names):
    with pytest.raises(ValueError, match=names) as error:
        call()
    assert "\n" not in str(error.value)
