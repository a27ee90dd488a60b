"""Spoilers of lab 01, other shapes than one ring: trees, two levels and all-to-alls that people get wrong."""

import torch

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers

right = answers_of("01_collectives")

# Tree broadcast

tree_broadcast = KnownAnswers("tree-broadcast")

tree_broadcast.mistake(
    "powers-of-two-only",
    {"while distance < n": "while distance < 1 << (n.bit_length() - 1)"},
    expect="(?s)nothing arrived.*no power of two",
)
tree_broadcast.mistake(
    "sends-beyond-the-last", {" and place + distance < n": ""}, expect="(?s)for ever|ended with|stopped with"
)
tree_broadcast.mistake(
    "root-forgotten-in-peers",
    {"(group.rank + distance)": "(place + distance)", "(group.rank - distance)": "(place - distance)"},
    expect="(?s)ended with|for ever|stopped with",
)


@tree_broadcast.mistake("star", expect="this is a star: the root sends every message itself")
def root_does_it_all(x, group, root=0):
    if group.rank == root:
        for rank in range(group.world_size):
            if rank != root:
                group.send(x, rank)
    else:
        group.recv(x, root)
    return x


@tree_broadcast.mistake("chain", expect=r"4 rounds for 5 ranks where 3 are enough|3 rounds for 4 ranks where 2")
def from_hand_to_hand(x, group, root=0):
    n, place = group.world_size, (group.rank - root) % group.world_size
    if place > 0:
        group.recv(x, (group.rank - 1) % n)
    if place < n - 1:
        group.send(x, (group.rank + 1) % n)
    return x


@tree_broadcast.mistake("heap", expect="4 rounds for 7 ranks where 3.*two children each")
def two_children_each(x, group, root=0):
    n, place = group.world_size, (group.rank - root) % group.world_size
    if place:
        group.recv(x, ((place - 1) // 2 + root) % n)
    for child in (2 * place + 1, 2 * place + 2):
        if child < n:
            group.send(x, (child + root) % n)
    return x


@tree_broadcast.mistake("at-most-two-children", expect="4 rounds for 8 ranks where 3.*two children each")
def two_sends_each_at_the_earliest(x, group, root=0):
    n, place = group.world_size, (group.rank - root) % group.world_size
    reached, sends_left, edges = [0], [2], []
    while len(reached) < n:  # one round
        for parent in list(reached):
            if sends_left[parent] and len(reached) < n:
                edges.append((parent, len(reached)))
                sends_left[parent] -= 1
                sends_left.append(2)
                reached.append(len(reached))
    for parent, child in edges:
        if place == parent:
            group.send(x, (child + root) % n)
        elif place == child:
            group.recv(x, (parent + root) % n)
    return x


tree_broadcast.mistake(
    "root-ignored",
    {"(group.rank - root) % n": "group.rank"},
    expect=r"with root=\d ended with .*holds what rank 0 had|root is 0|from the root",
)


@tree_broadcast.mistake("everybody-tells-everybody", expect="messages for 4 ranks where 3 are enough")
def gossip(x, group, root=0):
    n, r = group.world_size, group.rank
    for _ in range(max(0, n - 1)):
        arriving = torch.empty_like(x)
        group.exchange(send=(x, (r + 1) % n), recv=(arriving, (r - 1) % n))
        if r != root:
            x.copy_(arriving)
    return x


tree_broadcast.mistake(
    "not-in-place",
    {"n = group.world_size": "n, x = group.world_size, x.clone()"},
    expect="returned another tensor: return x itself",
)
tree_broadcast.mistake(
    "three-rounds",
    {"while distance < n:": "while distance < min(n, 8):"},
    expect=r"rank [89] of (9|10) with root=0 ended with x unchanged: nothing arrived",
)
tree_broadcast.mistake("returns-nothing", {"return x": "return"}, expect=r"returned nothing \(None\)")


tree_broadcast.mistake(
    "float32-on-the-wire",
    {
        "group.send(x, (group": "group.send(x.float(), (group",
        "group.recv(x, (group.rank - distance) % n)": (
            "buffer = torch.empty(x.shape)\n            group.recv(buffer, (group.rank - distance) % n)\n"
            "            x.copy_(buffer)"
        ),
    },
    expect=r"rank \d of (9|10) with root=0 ended with wrong values .*digits only",
)


@tree_broadcast.alternative("halving")
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


@tree_broadcast.alternative("bits")
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

hierarchical_all_reduce = KnownAnswers("hierarchical-all-reduce")


@hierarchical_all_reduce.mistake("flat-ring", expect="one flat ring over all ranks")
def ignores_the_nodes(x, group, node, across):
    return right.all_reduce(x, group)


@hierarchical_all_reduce.mistake("whole-tensor-across", expect=r"take only your own 1/2 across")
def two_full_all_reduces(x, group, node, across):
    right.all_reduce(x, node)
    return right.all_reduce(x, across)


@hierarchical_all_reduce.mistake("leaders-only", expect=r"ranks \[1, 3, 5\] send nothing there")
def one_rank_per_node_crosses(x, group, node, across):
    right.all_reduce(x, node)
    if node.rank == 0:
        right.all_reduce(x, across)
    return right.broadcast(x, node)


hierarchical_all_reduce.mistake("never-crosses", {"all_reduce(mine, across)": ""}, expect="the nodes never met")
hierarchical_all_reduce.mistake(
    "all-ranks-for-across",
    {
        "all_reduce(mine, across)": (
            "n = group.world_size\n    mine = all_reduce(torch.cat([mine] * n), group).chunk(n)[0]"
        )
    },
    expect="wrong values in x",
)
hierarchical_all_reduce.mistake(
    "never-gathers", {"return x.copy_(all_gather(mine, node))": "return mine"}, expect="the exercise asks for x itself"
)
hierarchical_all_reduce.mistake(
    "not-in-place", {"x.copy_(all_gather(mine, node))": "all_gather(mine, node)"}, expect="did not write them into x"
)
hierarchical_all_reduce.mistake(
    "sums-in-float32",
    {"reduce_scatter(x, node)": "reduce_scatter(x.float(), node)"},
    expect="nodes of [24] ended with wrong values .*digits only",
)
hierarchical_all_reduce.alternative(
    "four-steps",
    {
        "all_reduce(mine, across)": "smaller = reduce_scatter(mine, across)",
        "all_gather(mine, node)": "all_gather(all_gather(smaller, across), node)",
    },
)


@hierarchical_all_reduce.alternative("all-reduce-in-the-node")
def adds_the_whole_tensor_in_the_node(x, group, node, across):
    right.all_reduce(x, node)
    mine = x.chunk(node.world_size)[node.rank].clone()
    return x.copy_(right.all_gather(right.all_reduce(mine, across), node))


# All-to-all

all_to_all = KnownAnswers("all-to-all")

all_to_all.mistake(
    "own-part-forgotten",
    {"empty_like": "zeros_like", "incoming[r].copy_(outgoing[r])": ""},
    expect="place 0 of it holds something that no rank ever had; place i is for",
)
all_to_all.mistake(
    "wrong-part", {"outgoing[to]": "outgoing[r]"}, expect=r"holds part \d of rank \d; place i is for part 0"
)
all_to_all.mistake("destroys-input", {"torch.empty_like(x)": "x"}, expect="changed its input .x|holds the wrong parts")


@all_to_all.mistake("gathers-then-slices", expect="times as many: send each rank only the part that is for it")
def gathers_everything(x, group):
    n = group.world_size
    return right.all_gather(x, group).view(n, n, -1)[:, group.rank].reshape(-1)


all_to_all.mistake(
    "blocking-sends",
    {
        "exchange(send=(outgoing[to], to), recv=(incoming": "send(outgoing[to], to)\n        group.recv(incoming",
        "source))": "source)",
    },
    expect=r"(?s)waits for.*Deadlock: these ranks are all in send",
)
all_to_all.mistake(
    "list",
    {"return out\n": "return list(incoming)\n"},
    expect="returned a list; the exercise asks for one part from every rank",
)


@all_to_all.mistake("float32-on-the-wire", expect=r"rank \d of [678] holds the wrong parts: .*digits only")
def sends_float32(x, group):
    n, r = group.world_size, group.rank
    outgoing, parts = x.chunk(n), {r: x.chunk(n)[r].float()}
    for s in range(1, n):
        parts[(r - s) % n] = torch.empty(outgoing[0].numel())
        group.exchange(send=(outgoing[(r + s) % n].float(), (r + s) % n), recv=(parts[(r - s) % n], (r - s) % n))
    return torch.cat([parts[rank] for rank in range(n)]).to(x.dtype)


@all_to_all.alternative("all-at-once")
def posts_everything_at_once(x, group):
    n, r = group.world_size, group.rank
    out = x.clone()
    others = [rank for rank in range(n) if rank != r]
    outgoing, incoming = x.chunk(n), out.chunk(n)
    group.exchange([(outgoing[rank], rank) for rank in others], [(incoming[rank], rank) for rank in others])
    return out


@all_to_all.alternative("receives-posted-first")
def posts_receives_and_sends(x, group):
    out = x.clone()
    outgoing, incoming = x.chunk(group.world_size), out.chunk(group.world_size)
    others = [rank for rank in range(group.world_size) if rank != group.rank]
    posted = [group.recv(incoming[rank], rank, async_op=True) for rank in others]
    posted += [group.send(outgoing[rank], rank, async_op=True) for rank in others]
    for work in posted:
        work.wait()
    return out


@all_to_all.alternative("pairs-in-order")
def lower_rank_sends_first(x, group):
    out = x.clone()
    outgoing, incoming = x.chunk(group.world_size), out.chunk(group.world_size)
    for other in range(group.world_size):
        if other != group.rank:
            turns = [lambda o=other: group.send(outgoing[o], o), lambda o=other: group.recv(incoming[o], o)]
            for turn in turns if group.rank < other else reversed(turns):
                turn()
    return out
