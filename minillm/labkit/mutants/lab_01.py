"""Spoilers of lab 01: wrong collectives that people write, and right ones that look different."""

import torch
import torch.distributed as dist

from minillm.comm import Group
from minillm.labkit.exercises import alternative, mutant
from minillm.labkit.labs import lab_01 as right

# Ring reduce-scatter


@mutant("ring-reduce-scatter", "chunk-off-by-one", expect=r"chunk \d \(its own is chunk \d\): off by one")
def ends_one_chunk_early(x, group):
    n, r = group.world_size, group.rank
    chunks = list(x.clone().chunk(n))
    arriving = torch.empty_like(chunks[0])
    for s in range(n - 1):
        group.exchange(send=(chunks[(r - s) % n], (r + 1) % n), recv=(arriving, (r - 1) % n))
        chunks[(r - s - 1) % n] += arriving
    return chunks[(r + 1) % n]


@mutant("ring-reduce-scatter", "only-n-minus-2-rounds", expect="without rank")
def stops_one_round_early(x, group):
    n, r = group.world_size, group.rank
    chunks = list(x.clone().chunk(n))
    arriving = torch.empty_like(chunks[0])
    for s in range(1, n - 1):
        group.exchange(send=(chunks[(r - s - 1) % n], (r + 1) % n), recv=(arriving, (r - 1) % n))
        chunks[(r - s - 2) % n] += arriving
    return chunks[r]


@mutant("ring-reduce-scatter", "reduces-into-sent-chunk", expect="returned a wrong chunk")
def adds_to_what_it_sent(x, group):
    n, r = group.world_size, group.rank
    chunks = list(x.clone().chunk(n))
    arriving = torch.empty_like(chunks[0])
    for s in range(n - 1):
        group.exchange(send=(chunks[(r - s - 1) % n], (r + 1) % n), recv=(arriving, (r - 1) % n))
        chunks[(r - s - 1) % n] += arriving
    return chunks[r]


@mutant("ring-reduce-scatter", "whole-tensor-every-round", expect="times as many: in each round send one chunk")
def sends_everything(x, group):
    n, r = group.world_size, group.rank
    total, travelling = x.clone(), x.clone()
    for _ in range(n - 1):
        arriving = torch.empty_like(x)
        group.exchange(send=(travelling, (r + 1) % n), recv=(arriving, (r - 1) % n))
        total += arriving
        travelling = arriving
    return total.chunk(n)[r]


@mutant("ring-reduce-scatter", "destroys-input", expect="changed its input x: work on a copy")
def works_in_place(x, group):
    n, r = group.world_size, group.rank
    chunks = x.chunk(n)
    arriving = torch.empty_like(chunks[0])
    for s in range(n - 1):
        group.exchange(send=(chunks[(r - s - 1) % n], (r + 1) % n), recv=(arriving, (r - 1) % n))
        chunks[(r - s - 2) % n].add_(arriving)
    return chunks[r].clone()


@mutant("ring-reduce-scatter", "blocking-sends", expect=r"(?s)waits for.*rank 1.*Deadlock: these ranks are all in send")
def everybody_sends_first(x, group):
    n, r = group.world_size, group.rank
    chunks = list(x.clone().chunk(n))
    arriving = torch.empty_like(chunks[0])
    for s in range(n - 1):
        group.send(chunks[(r - s - 1) % n], (r + 1) % n)
        group.recv(arriving, (r - 1) % n)
        chunks[(r - s - 2) % n] += arriving
    return chunks[r]


@mutant("ring-reduce-scatter", "ready-made", expect="you called reduce_scatter")
def calls_the_group(x, group):
    return group.reduce_scatter(x)


@mutant("ring-reduce-scatter", "torch-distributed", expect="ledger saw no message")
def calls_torch(x, group):
    x = x.clone()
    dist.all_reduce(x, group=group.process_group)
    return x.chunk(group.world_size)[group.rank]


@alternative("ring-reduce-scatter", "other-direction")
def to_the_left(x, group):
    n, r = group.world_size, group.rank
    chunks = list(x.clone().chunk(n))
    arriving = torch.empty_like(chunks[0])
    for s in range(1, n):
        group.exchange(send=(chunks[(r + s) % n], (r - 1) % n), recv=(arriving, (r + 1) % n))
        chunks[(r + s + 1) % n] += arriving
    return chunks[r]


@alternative("ring-reduce-scatter", "taking-turns")
def even_ranks_send_first(x, group):
    n, r = group.world_size, group.rank
    chunks = list(x.clone().chunk(n))
    arriving = torch.empty_like(chunks[0])
    for s in range(n - 1):
        if r % 2 == 0:
            group.send(chunks[(r - s - 1) % n], (r + 1) % n)
            group.recv(arriving, (r - 1) % n)
        else:
            group.recv(arriving, (r - 1) % n)
            group.send(chunks[(r - s - 1) % n], (r + 1) % n)
        chunks[(r - s - 2) % n] += arriving
    return chunks[r]


# Ring all-gather


@mutant("ring-all-gather", "chunk-off-by-one", expect="gathered wrongly: place")
def receives_one_place_off(x, group):
    n, r = group.world_size, group.rank
    out = x.new_zeros(n * x.numel())
    chunks = out.chunk(n)
    chunks[r].copy_(x)
    for s in range(n - 1):
        group.exchange(send=(chunks[(r - s) % n], (r + 1) % n), recv=(chunks[(r - s - 2) % n], (r - 1) % n))
    return out


@mutant("ring-all-gather", "arrival-order", expect=r"place \d of it holds rank \d's tensor, not rank")
def as_they_come(x, group):
    n, r = group.world_size, group.rank
    parts = [x]
    for _ in range(n - 1):
        arriving = torch.empty_like(x)
        group.exchange(send=(parts[-1], (r + 1) % n), recv=(arriving, (r - 1) % n))
        parts.append(arriving)
    return torch.cat(parts)


@mutant("ring-all-gather", "only-n-minus-2-rounds", expect="something that no rank ever had")
def one_chunk_missing(x, group):
    n, r = group.world_size, group.rank
    out = torch.full((n * x.numel(),), -1.0)
    chunks = out.chunk(n)
    chunks[r].copy_(x)
    for s in range(n - 2):
        group.exchange(send=(chunks[(r - s) % n], (r + 1) % n), recv=(chunks[(r - s - 1) % n], (r - 1) % n))
    return out


@mutant("ring-all-gather", "whole-buffer-every-round", expect="times as many: pass on only the chunk")
def passes_everything_on(x, group):
    n, r = group.world_size, group.rank
    out = x.new_zeros(n * x.numel())
    out.chunk(n)[r].copy_(x)
    for _ in range(n - 1):
        arriving = torch.empty_like(out)
        group.exchange(send=(out, (r + 1) % n), recv=(arriving, (r - 1) % n))
        out = torch.maximum(out, arriving)
    return out


@alternative("ring-all-gather", "taking-turns-leftwards")
def odd_ranks_receive_first(x, group):
    n, r = group.world_size, group.rank
    parts = {r: x}
    for s in range(n - 1):
        arriving = torch.empty_like(x)
        turns = [lambda s=s: group.send(parts[(r + s) % n], (r - 1) % n), lambda a=arriving: group.recv(a, (r + 1) % n)]
        for turn in turns if r % 2 == 0 else reversed(turns):
            turn()
        parts[(r + s + 1) % n] = arriving
    return torch.cat([parts[rank] for rank in range(n)])


# Ring all-reduce


@mutant("ring-all-reduce", "no-division", expect="it is the sum, 4 times the mean: divide")
def forgets_the_mean(x, group, op="sum"):
    return x.copy_(right.all_gather(right.reduce_scatter(x, group), group))


@mutant("ring-all-reduce", "divides-twice", expect="divided by 4 once more")
def divides_before_and_after(x, group, op="sum"):
    right.all_reduce(x, group, op)
    return x.div_(group.world_size) if op == "avg" else x


@mutant("ring-all-reduce", "not-in-place", expect="did not write them into x")
def leaves_x_as_it_was(x, group, op="sum"):
    mine = right.reduce_scatter(x, group)
    return right.all_gather(mine / group.world_size if op == "avg" else mine, group)


@mutant("ring-all-reduce", "gathers-everything", expect="times as many: reduce-scatter first")
def gathers_and_adds(x, group, op="sum"):
    total = right.all_gather(x, group).view(group.world_size, -1).sum(0)
    return x.copy_(total / group.world_size if op == "avg" else total)


@mutant("ring-all-reduce", "no-gather", expect="in place")
def keeps_its_own_chunk_only(x, group, op="sum"):
    mine = right.reduce_scatter(x, group)
    x.chunk(group.world_size)[group.rank].copy_(mine / group.world_size if op == "avg" else mine)
    return x


@alternative("ring-all-reduce", "one-loop")
def both_laps_in_one_loop(x, group, op="sum"):
    n, r = group.world_size, group.rank
    chunks = x.chunk(n)
    for s in range(2 * (n - 1)):
        arriving, target = torch.empty_like(chunks[0]), chunks[(r - s - 2) % n]
        if s == n - 1 and op == "avg":
            chunks[r].div_(n)
        group.exchange(send=(chunks[(r - s - 1) % n], (r + 1) % n), recv=(arriving, (r - 1) % n))
        target.copy_(target + arriving if s < n - 1 else arriving)
    return x


# Tree broadcast


@mutant("tree-broadcast", "star", expect="this is a star: the root sends every message itself")
def root_does_it_all(x, group, root=0):
    if group.rank == root:
        for rank in range(group.world_size):
            if rank != root:
                group.send(x, rank)
    else:
        group.recv(x, root)
    return x


@mutant("tree-broadcast", "chain", expect=r"4 rounds for 5 ranks where 3 are enough|3 rounds for 4 ranks where 2")
def from_hand_to_hand(x, group, root=0):
    n, place = group.world_size, (group.rank - root) % group.world_size
    if place > 0:
        group.recv(x, (group.rank - 1) % n)
    if place < n - 1:
        group.send(x, (group.rank + 1) % n)
    return x


@mutant(
    "tree-broadcast", "root-ignored", expect=r"with root=\d ended with .*holds what rank 0 had|root is 0|from the root"
)
def always_from_rank_0(x, group, root=0):
    return right.broadcast(x, group, 0)


@mutant("tree-broadcast", "powers-of-two-only", expect="nothing arrived.*no power of two")
def forgets_the_rest(x, group, root=0):
    n, place = group.world_size, (group.rank - root) % group.world_size
    power, distance = 1 << (n.bit_length() - 1), 1
    while distance < power:
        if place < distance:
            group.send(x, (group.rank + distance) % n)
        elif distance <= place < 2 * distance:
            group.recv(x, (group.rank - distance) % n)
        distance *= 2
    return x


@mutant("tree-broadcast", "everybody-tells-everybody", expect="messages for 4 ranks where 3 are enough")
def gossip(x, group, root=0):
    n, r = group.world_size, group.rank
    for _ in range(max(0, n - 1)):
        arriving = torch.empty_like(x)
        group.exchange(send=(x, (r + 1) % n), recv=(arriving, (r - 1) % n))
        if r != root:
            x.copy_(arriving)
    return x


@alternative("tree-broadcast", "halving")
def far_ranks_first(x, group, root=0):
    n, place = group.world_size, (group.rank - root) % group.world_size
    low, high = 0, n  # the places this rank's part of the tree covers; place `low` has x
    while high - low > 1:
        middle = (low + high + 1) // 2
        if place == low:
            group.send(x, (middle + root) % n)
        elif place == middle:
            group.recv(x, (low + root) % n)
        low, high = (low, middle) if place < middle else (middle, high)
    return x


# Two levels


@mutant("hierarchical-all-reduce", "flat-ring", expect="one flat ring over all ranks")
def ignores_the_nodes(x, group, node, across):
    return right.all_reduce(x, group)


@mutant("hierarchical-all-reduce", "whole-tensor-across", expect=r"take only your own 1/2 across")
def two_full_all_reduces(x, group, node, across):
    right.all_reduce(x, node)
    return right.all_reduce(x, across)


@mutant("hierarchical-all-reduce", "leaders-only", expect=r"ranks \[1, 3, 5\] send nothing there")
def one_rank_per_node_crosses(x, group, node, across):
    right.all_reduce(x, node)
    if node.rank == 0:
        right.all_reduce(x, across)
    return right.broadcast(x, node)


@mutant("hierarchical-all-reduce", "never-crosses", expect="the nodes never met")
def stays_at_home(x, group, node, across):
    return right.all_reduce(x, node)


@mutant("hierarchical-all-reduce", "crosses-before-adding", expect="wrong values|other nodes")
def gathers_first(x, group, node, across):
    mine = right.reduce_scatter(x, node)
    x.copy_(right.all_gather(mine, node))
    return right.all_reduce(x, across)


@alternative("hierarchical-all-reduce", "four-steps")
def spelled_out(x, group, node, across):
    mine = right.reduce_scatter(x, node)
    smaller = right.reduce_scatter(mine, across)
    return x.copy_(right.all_gather(right.all_gather(smaller, across), node))


# All-to-all


@mutant("all-to-all", "gathers-then-slices", expect="times as many: send each rank only the part that is for it")
def gathers_everything(x, group):
    n = group.world_size
    return right.all_gather(x, group).view(n, n, -1)[:, group.rank].reshape(-1)


@mutant(
    "all-to-all",
    "own-part-forgotten",
    expect="place 0 of it holds something that no rank ever had; place i is for part 0",
)
def forgets_itself(x, group: Group):
    n, r = group.world_size, group.rank
    out = torch.full_like(x, -1)
    outgoing, incoming = x.chunk(n), out.chunk(n)
    for s in range(1, n):
        to, source = (r + s) % n, (r - s) % n
        group.exchange(send=(outgoing[to], to), recv=(incoming[source], source))
    return out


@mutant("all-to-all", "wrong-part", expect=r"holds part \d of rank \d; place i is for part 0")
def sends_its_own_part(x, group):
    n, r = group.world_size, group.rank
    out = torch.empty_like(x)
    outgoing, incoming = x.chunk(n), out.chunk(n)
    incoming[r].copy_(outgoing[r])
    for s in range(1, n):
        to, source = (r + s) % n, (r - s) % n
        group.exchange(send=(outgoing[r], to), recv=(incoming[source], source))
    return out


@mutant("all-to-all", "blocking-sends", expect=r"(?s)waits for.*Deadlock: these ranks are all in send")
def sends_before_receiving(x, group):
    n, r = group.world_size, group.rank
    out = x.clone()
    outgoing, incoming = x.chunk(n), out.chunk(n)
    for s in range(1, n):
        group.send(outgoing[(r + s) % n], (r + s) % n)
        group.recv(incoming[(r - s) % n], (r - s) % n)
    return out


@alternative("all-to-all", "all-at-once")
def posts_everything_at_once(x, group):
    n, r = group.world_size, group.rank
    out = x.clone()
    others = [rank for rank in range(n) if rank != r]
    outgoing, incoming = x.chunk(n), out.chunk(n)
    group.exchange([(outgoing[rank], rank) for rank in others], [(incoming[rank], rank) for rank in others])
    return out


# The culprit


@mutant("find-the-culprit", "most-waited-for", expect="waits itself.*follow the arrow further")
def blames_the_popular_one(waits_for):
    waited = [rank for others in waits_for.values() for rank in others]
    return max(set(waited), key=waited.count)


@mutant("find-the-culprit", "first-idle-rank", expect="nobody waits for rank .*no crime|not none|everybody waits")
def blames_the_first_idle(waits_for):
    return next((rank for rank, others in waits_for.items() if not others), -1)


@mutant("find-the-culprit", "never-none", expect="everybody waits for somebody")
def always_blames_somebody(waits_for):
    found = right.culprit(waits_for)
    return found if found is not None else min(waits_for)


@mutant("find-the-culprit", "only-direct", expect="not None|follow the arrow")
def asks_only_for_unanimity(waits_for):
    for rank in waits_for:
        if all(rank in others for other, others in waits_for.items() if other != rank):
            return rank
    return None


@alternative("find-the-culprit", "follows-arrows")
def walks(waits_for):
    for start, others in waits_for.items():
        rank, seen = start, set()
        while waits_for[rank] and rank not in seen:
            seen.add(rank)
            rank = waits_for[rank][0]
        if others and not waits_for[rank]:
            return rank
    return None
