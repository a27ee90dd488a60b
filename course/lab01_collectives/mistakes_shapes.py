"""Spoilers of lab 01, other shapes than one ring: trees, two levels and all-to-alls that people get wrong; and the
wrong rank blamed for a hang."""

import torch

from minillm.comm import Group
from minillm.labkit.answers import answers_of
from minillm.labkit.exercises import alternative, mistake

right = answers_of("01_collectives")

# Tree broadcast


@mistake("tree-broadcast", "star", expect="this is a star: the root sends every message itself")
def root_does_it_all(x, group, root=0):
    if group.rank == root:
        for rank in range(group.world_size):
            if rank != root:
                group.send(x, rank)
    else:
        group.recv(x, root)
    return x


@mistake("tree-broadcast", "chain", expect=r"4 rounds for 5 ranks where 3 are enough|3 rounds for 4 ranks where 2")
def from_hand_to_hand(x, group, root=0):
    n, place = group.world_size, (group.rank - root) % group.world_size
    if place > 0:
        group.recv(x, (group.rank - 1) % n)
    if place < n - 1:
        group.send(x, (group.rank + 1) % n)
    return x


@mistake("tree-broadcast", "heap", expect="4 rounds for 7 ranks where 3.*two children each")
def two_children_each(x, group, root=0):
    n, place = group.world_size, (group.rank - root) % group.world_size
    if place:
        group.recv(x, ((place - 1) // 2 + root) % n)
    for child in (2 * place + 1, 2 * place + 2):
        if child < n:
            group.send(x, (child + root) % n)
    return x


@mistake(
    "tree-broadcast", "root-ignored", expect=r"with root=\d ended with .*holds what rank 0 had|root is 0|from the root"
)
def always_from_rank_0(x, group, root=0):
    return right.broadcast(x, group, 0)


@mistake("tree-broadcast", "powers-of-two-only", expect="nothing arrived.*no power of two")
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


@mistake("tree-broadcast", "everybody-tells-everybody", expect="messages for 4 ranks where 3 are enough")
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


@mistake("hierarchical-all-reduce", "flat-ring", expect="one flat ring over all ranks")
def ignores_the_nodes(x, group, node, across):
    return right.all_reduce(x, group)


@mistake("hierarchical-all-reduce", "whole-tensor-across", expect=r"take only your own 1/2 across")
def two_full_all_reduces(x, group, node, across):
    right.all_reduce(x, node)
    return right.all_reduce(x, across)


@mistake("hierarchical-all-reduce", "leaders-only", expect=r"ranks \[1, 3, 5\] send nothing there")
def one_rank_per_node_crosses(x, group, node, across):
    right.all_reduce(x, node)
    if node.rank == 0:
        right.all_reduce(x, across)
    return right.broadcast(x, node)


@mistake("hierarchical-all-reduce", "never-crosses", expect="the nodes never met")
def stays_at_home(x, group, node, across):
    return right.all_reduce(x, node)


@mistake("hierarchical-all-reduce", "crosses-before-adding", expect="wrong values|other nodes")
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


@mistake("all-to-all", "gathers-then-slices", expect="times as many: send each rank only the part that is for it")
def gathers_everything(x, group):
    n = group.world_size
    return right.all_gather(x, group).view(n, n, -1)[:, group.rank].reshape(-1)


@mistake(
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


@mistake("all-to-all", "wrong-part", expect=r"holds part \d of rank \d; place i is for part 0")
def sends_its_own_part(x, group):
    n, r = group.world_size, group.rank
    out = torch.empty_like(x)
    outgoing, incoming = x.chunk(n), out.chunk(n)
    incoming[r].copy_(outgoing[r])
    for s in range(1, n):
        to, source = (r + s) % n, (r - s) % n
        group.exchange(send=(outgoing[r], to), recv=(incoming[source], source))
    return out


@mistake("all-to-all", "blocking-sends", expect=r"(?s)waits for.*Deadlock: these ranks are all in send")
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


@mistake("find-the-culprit", "most-waited-for", expect="waits itself.*follow the arrow further")
def blames_the_popular_one(waits_for):
    waited = [rank for others in waits_for.values() for rank in others]
    return max(set(waited), key=waited.count)


@mistake("find-the-culprit", "first-idle-rank", expect="has finished and nobody waits for it|not none|everybody waits")
def blames_the_first_idle(waits_for):
    return next((rank for rank, others in waits_for.items() if not others), -1)


@mistake("find-the-culprit", "never-none", expect="everybody waits for somebody")
def always_blames_somebody(waits_for):
    found = right.culprit(waits_for)
    return found if found is not None else min(waits_for)


@mistake("find-the-culprit", "only-direct", expect="not None|follow the arrow")
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
