"""Spoilers of lab 01, other shapes than one ring: trees, two levels and all-to-alls that people get wrong; and the
wrong rank blamed for a hang."""

import torch

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake

right = answers_of("01_collectives")

# Tree broadcast


def grows(number=lambda place, root, n: place + root, bound=lambda n: n, ends=lambda n: n):
    """A tree that doubles, whose places become ranks by `number`; it stops at a distance of `ends(n)`."""

    def broadcast(x, group, root=0):
        n, place, distance = group.world_size, (group.rank - root) % group.world_size, 1
        while distance < ends(n):
            if place < distance and place + distance < bound(n):
                group.send(x, number(place + distance, root, n) % n)
            elif distance <= place < 2 * distance:
                group.recv(x, number(place - distance, root, n) % n)
            distance *= 2
        return x

    return broadcast


TREES = {
    "root-forgotten-in-peers": (grows(lambda place, root, n: place), "ended with|for ever|stopped with"),
    "powers-of-two-only": (grows(ends=lambda n: 1 << (n.bit_length() - 1)), "nothing arrived.*no power of two"),
    "sends-beyond-the-last": (grows(bound=lambda n: 2 * n), "for ever|ended with|stopped with"),
}
for label, (tree, expect) in TREES.items():
    mistake("tree-broadcast", label, expect=f"(?s){expect}")(tree)


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


@mistake("tree-broadcast", "everybody-tells-everybody", expect="messages for 4 ranks where 3 are enough")
def gossip(x, group, root=0):
    n, r = group.world_size, group.rank
    for _ in range(max(0, n - 1)):
        arriving = torch.empty_like(x)
        group.exchange(send=(x, (r + 1) % n), recv=(arriving, (r - 1) % n))
        if r != root:
            x.copy_(arriving)
    return x


@mistake("tree-broadcast", "not-in-place", expect="did not write them into x")
def into_a_buffer(x, group, root=0):
    return right.broadcast(x.clone(), group, root)


@mistake("tree-broadcast", "returns-nothing", expect=r"returned nothing \(None\)")
def forgets_to_return_it(x, group, root=0):
    right.broadcast(x, group, root)


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


@alternative("tree-broadcast", "bits")
def partner_by_bit(x, group, root=0):
    n, place = group.world_size, (group.rank - root) % group.world_size
    for bit in range((n - 1).bit_length()):
        partner = place ^ (1 << bit)
        if place < 1 << bit and partner < n:
            group.send(x, (partner + root) % n)
        elif place >> bit == 1:
            group.recv(x, (partner + root) % n)
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


@mistake("hierarchical-all-reduce", "all-ranks-for-across", expect="wrong values in x")
def reduces_over_everybody(x, group, node, across):
    mine = right.reduce_scatter(x, node)
    padded = right.all_reduce(torch.cat([mine] * group.world_size), group).chunk(group.world_size)[0]
    return x.copy_(right.all_gather(padded, node))


@mistake("hierarchical-all-reduce", "never-gathers", expect="the exercise asks for x itself")
def returns_its_part(x, group, node, across):
    return right.all_reduce(right.reduce_scatter(x, node), across)


@mistake("hierarchical-all-reduce", "not-in-place", expect="did not write them into x")
def returns_a_new_tensor(x, group, node, across):
    return right.hierarchical_all_reduce(x.clone(), group, node, across)


@alternative("hierarchical-all-reduce", "four-steps")
def spelled_out(x, group, node, across):
    mine = right.reduce_scatter(x, node)
    smaller = right.reduce_scatter(mine, across)
    return x.copy_(right.all_gather(right.all_gather(smaller, across), node))


# All-to-all


def swaps(send=lambda r, to: to, own=True, out=torch.zeros_like):
    """Parts straight to their ranks: which part is sent, and into what it arrives."""

    def all_to_all(x, group):
        n, r = group.world_size, group.rank
        received = out(x)
        outgoing, incoming = x.chunk(n), received.chunk(n)
        if own:
            incoming[r].copy_(outgoing[r])
        for s in range(1, n):
            to, source = (r + s) % n, (r - s) % n
            group.exchange(send=(outgoing[send(r, to)], to), recv=(incoming[source], source))
        return received

    return all_to_all


SWAPS = {
    "own-part-forgotten": (swaps(own=False), "place 0 of it holds something that no rank ever had; place i is for"),
    "wrong-part": (swaps(send=lambda r, to: r), r"holds part \d of rank \d; place i is for part 0"),
    "destroys-input": (swaps(out=lambda x: x), "changed its input x|holds the wrong parts"),
}
for label, (swap, expect) in SWAPS.items():
    mistake("all-to-all", label, expect=expect)(swap)


@mistake("all-to-all", "gathers-then-slices", expect="times as many: send each rank only the part that is for it")
def gathers_everything(x, group):
    n = group.world_size
    return right.all_gather(x, group).view(n, n, -1)[:, group.rank].reshape(-1)


@mistake("all-to-all", "blocking-sends", expect=r"(?s)waits for.*Deadlock: these ranks are all in send")
def sends_before_receiving(x, group):
    n, r = group.world_size, group.rank
    out = x.clone()
    outgoing, incoming = x.chunk(n), out.chunk(n)
    for s in range(1, n):
        group.send(outgoing[(r + s) % n], (r + s) % n)
        group.recv(incoming[(r - s) % n], (r - s) % n)
    return out


@mistake("all-to-all", "list", expect="returned a list; the exercise asks for one part from every rank")
def returns_the_parts(x, group):
    return list(right.all_to_all(x, group).chunk(group.world_size))


@alternative("all-to-all", "all-at-once")
def posts_everything_at_once(x, group):
    n, r = group.world_size, group.rank
    out = x.clone()
    others = [rank for rank in range(n) if rank != r]
    outgoing, incoming = x.chunk(n), out.chunk(n)
    group.exchange([(outgoing[rank], rank) for rank in others], [(incoming[rank], rank) for rank in others])
    return out


@alternative("all-to-all", "pairs-in-order")
def lower_rank_sends_first(x, group):
    out = x.clone()
    outgoing, incoming = x.chunk(group.world_size), out.chunk(group.world_size)
    for other in range(group.world_size):
        if other != group.rank:
            turns = [lambda o=other: group.send(outgoing[o], o), lambda o=other: group.recv(incoming[o], o)]
            for turn in turns if group.rank < other else reversed(turns):
                turn()
    return out


# The culprit


@mistake("find-the-culprit", "most-waited-for", expect="waits itself.*follow the arrow further")
def blames_the_popular_one(waits_for):
    waited = [rank for others in waits_for.values() for rank in others]
    return max(set(waited), key=waited.count)


@mistake("find-the-culprit", "first-idle-rank", expect="has finished and nobody waits for it")
def blames_the_first_idle(waits_for):
    return next((rank for rank, others in waits_for.items() if not others), None)


@mistake("find-the-culprit", "last-idle-rank", expect="has finished and nobody waits for it")
def blames_the_last_idle(waits_for):
    return next((rank for rank, others in reversed(waits_for.items()) if not others), None)


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


@mistake("find-the-culprit", "keys-are-waiters", expect="is waited for and waits for nobody: that is the one, not None")
def takes_every_key_for_a_waiter(waits_for):
    return next(iter({rank for others in waits_for.values() for rank in others} - set(waits_for)), None)


@mistake("find-the-culprit", "first-arrow-only", expect="for nobody: that is the one, not None|finished and nobody")
def follows_the_first_arrow(waits_for):
    rank, seen = next(iter(waits_for)), set()
    while waits_for[rank] and rank not in seen:
        seen.add(rank)
        rank = waits_for[rank][0]
    return None if waits_for[rank] else rank


@mistake("find-the-culprit", "a-list", expect="which is none of the ranks")
def blames_all_of_them(waits_for):
    awaited = {rank for others in waits_for.values() for rank in others}
    return [rank for rank, others in waits_for.items() if not others and rank in awaited] or None


@alternative("find-the-culprit", "follows-all-arrows")
def walks(waits_for):
    todo, seen = [rank for others in waits_for.values() for rank in others], set()
    while todo:
        rank = todo.pop()
        if not waits_for[rank]:
            return rank
        if rank not in seen:
            seen.add(rank)
            todo += waits_for[rank]
    return None


@alternative("find-the-culprit", "most-waited-for-of-the-idle")
def counts_the_waiting(waits_for):
    waited = [rank for others in waits_for.values() for rank in others if not waits_for[rank]]
    return max(set(waited), key=waited.count, default=None)
