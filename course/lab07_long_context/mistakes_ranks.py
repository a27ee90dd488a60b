"""Spoilers of lab 07, on several ranks: orders that are not even, rings that stand still, heads in wrong places."""

import torch

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake

right = answers_of("07_long_context")

# A ring.

mistake(
    "ring-attention",
    "ranks below 0",
    {"attend(q, *block, (rank - step) % n)": "attend(q, *block, rank - step)"},
    expect="so take it modulo N",
)

# Who holds what.


@mistake(
    "zigzag-order",
    "contiguous parts",
    says="These are contiguous parts: the last rank's queries see 2N - 1 times as many keys as the first one's.",
)
def contiguous(seq, rank, world_size):
    return list(range(rank * seq // world_size, (rank + 1) * seq // world_size))


@mistake(
    "zigzag-order",
    "dealt out one by one",
    says="Positions dealt out in turn are nearly even, but rank r always has the later one of each round; and they "
    "lie in many stretches.",
)
def striped(seq, rank, world_size):
    return list(range(rank, seq, world_size))


mistake(
    "zigzag-order",
    "the late parts in the same direction",
    {"2 * world_size - 1 - rank": "world_size + rank"},
    says="Parts r and N + r: both grow with r, so the work does. The second part has to come from the other end.",
)
mistake(
    "zigzag-order",
    "the mirror part off by one",
    {"2 * world_size - 1 - rank": "2 * world_size - rank"},
    expect="there is no position",
)


@mistake("zigzag-order", "single positions from both ends", expect="two stretches")
def from_both_ends(seq, rank, world_size):
    pairs = [(p, seq - 1 - p) for p in range(rank, seq // 2, world_size)]
    return sorted(p for pair in pairs for p in pair)


mistake(
    "zigzag-order",
    "the late part first",
    {
        "*range(rank * size, (rank + 1) * size), *range(late * size, (late + 1) * size)": (
            "*range(late * size, (late + 1) * size), *range(rank * size, (rank + 1) * size)"
        )
    },
    expect="ascending",
)
mistake("zigzag-order", "only the early part", {", *range(late * size, (late + 1) * size)": ""}, expect="nobody holds")


@alternative("zigzag-order", "the middle parts to rank 0")
def from_the_middle(seq, rank, world_size):
    parts = torch.arange(seq).chunk(2 * world_size)
    return torch.cat([parts[world_size - 1 - rank], parts[world_size + rank]])


# The ring.


mistake(
    "ring-attention",
    "waits before it attends",
    {
        "async_op=True)": "async_op=True)\n            work.wait()",
        "            work.wait()\n            block": "            block",
    },
    expect="under way",
)
mistake(
    "ring-attention",
    "passes a block on after the last step",
    {
        "if step < n - 1:\n            arriving": "if n > 1:\n            arriving",
        "if step < n - 1:\n            work": "if n > 1:\n            work",
    },
    expect="after the last step nobody needs",
)
mistake(
    "ring-attention",
    "sends its own block every time",
    {
        "block, out, lse = torch.stack((k, v))": "own = torch.stack((k, v))\n    block, out, lse = own",
        "(block, right)": "(own, right)",
    },
    says="Every step sent the rank's own block again, so the neighbour's is all that ever arrives. Pass on what came.",
)
mistake(
    "ring-attention",
    "takes the block for that of the other side",
    {"(rank - step) % n": "(rank + step) % n"},
    says="The masks belong to other blocks: sent to the right, the block in step i began i ranks to the left, at "
    "(rank - i) % N.",
)
mistake(
    "ring-attention",
    "adds the partial outputs",
    {"merge(out, lse, part, part_lse)": "(out + part, lse)"},
    says="The partial outputs were added. Each is divided by the sum of its own block: merge them by their lse.",
)
mistake(
    "ring-attention",
    "the joint log-sum-exp is not kept",
    {"merge(out, lse, part, part_lse)": "(merge(out, lse, part, part_lse)[0], lse)"},
    says="From the second merge on the weights are wrong: keep the lse that merge returns, not that of the first "
    "block.",
)


mistake(
    "ring-attention",
    "its own block once more meanwhile",
    {
        "        part, part_lse = attend(q, *block": (
            "        if step:\n            attend(q, k, v, rank)\n        part, part_lse = attend(q, *block"
        )
    },
    expect="attends to the blocks .*: each is needed once",
)
mistake("ring-attention", "one dimension more", {"return out": "return out[None]"}, expect="the output is \\[1, ")


@mistake("ring-attention", "gathers everything", expect="you called all_gather")
def gathers(q, k, v, group, attend):
    keys, values = (group.all_gather(x).chunk(group.world_size) for x in (k, v))
    out, lse = attend(q, k, v, group.rank)
    for source in range(group.world_size):
        if source != group.rank:
            out, lse = right.merge(out, lse, *attend(q, keys[source], values[source], source))
    return out


@mistake("ring-attention", "everybody sends to everybody", expect="in a ring all send to one neighbour")
def to_everybody(q, k, v, group, attend):
    n, rank, block = group.world_size, group.rank, torch.stack((k, v))
    out, lse = None, None
    for step in range(n):
        arriving, work, source = block, None, (rank - step) % n
        if step < n - 1:
            arriving = torch.empty_like(block)
            to, come = (rank + step + 1) % n, (rank - step - 1) % n
            work = group.exchange(send=(torch.stack((k, v)), to), recv=(arriving, come), async_op=True)
        part = attend(q, *block, source)
        out, lse = part if step == 0 else right.merge(out, lse, *part)
        if work:
            work.wait()
        block = arriving
    return out


alternative(
    "ring-attention",
    "the ring in the other direction",
    {
        "right, left = (rank + 1) % n, (rank - 1) % n": "right, left = (rank - 1) % n, (rank + 1) % n",
        "(rank - step) % n": "(rank + step) % n",
    },
)


@alternative("ring-attention", "keys and values as two messages, outputs merged at the end")
def two_messages(q, k, v, group, attend):
    n, rank, parts = group.world_size, group.rank, []
    for step in range(n):
        works, arriving = [], [torch.empty_like(k), torch.empty_like(v)]
        if step < n - 1:
            for mine, theirs in zip((k, v), arriving, strict=True):
                send, recv = (mine.contiguous(), (rank + 1) % n), (theirs, (rank - 1) % n)
                works.append(group.exchange(send=send, recv=recv, async_op=True))
        parts.append(attend(q, k, v, (rank - step) % n))
        for work in works:
            work.wait()
        k, v = arriving if works else (k, v)
    lse = torch.stack([each for _, each in parts])
    return (lse.softmax(0)[..., None] * torch.stack([out for out, _ in parts])).sum(0)


# Heads for sequence.

mistake(
    "ulysses-exchange",
    "reshapes without a transposition",
    {
        "received.unflatten(0, (n, -1)).transpose(0, 1).flatten(1, 2)": (
            "received.reshape(x.shape[0] // n, -1, x.shape[2])"
        )
    },
    says="What arrives counts ranks first, then heads, then positions. A reshape to [heads / N, seq, d] reads it in "
    "that order: bring the ranks' dimension behind the heads first.",
)
mistake(
    "ulysses-exchange",
    "the way back without a transposition",
    {
        "parts = x.unflatten(1, (n, -1)).transpose(0, 1).contiguous()": (
            "parts = x.reshape(n * x.shape[0], -1, x.shape[2])"
        ),
        "group.all_to_all(parts).flatten(0, 1)": "group.all_to_all(parts).reshape(n * x.shape[0], -1, x.shape[2])",
    },
    says="On the way back all_to_all cut dimension 0, which counts heads here. What goes to each rank is its part of "
    "the sequence.",
)
mistake(
    "ulysses-exchange",
    "every N-th head",
    {
        "x.contiguous()": "x.unflatten(0, (-1, n)).transpose(0, 1).contiguous()",
        "received.unflatten(0, (n, -1)).transpose(0, 1)": "received.transpose(0, 1)",
    },
    says="This rank got every N-th head. The exercise asks for heads / N that follow each other, so that query heads "
    "stay with the kv heads they share.",
)
mistake(
    "ulysses-exchange",
    "gathers all and keeps its own",
    {
        "received = group.all_to_all(x.contiguous())": (
            "whole = group.all_gather(x[None]).transpose(0, 1).flatten(1, 2)"
        ),
        "received.unflatten(0, (n, -1)).transpose(0, 1).flatten(1, 2)": "whole.chunk(n, 0)[group.rank].clone()",
    },
    expect="are enough",
)
mistake(
    "ulysses-exchange",
    "nothing is exchanged",
    {
        "received = group.all_to_all(x.contiguous())": "",
        "received.unflatten(0, (n, -1)).transpose(0, 1).flatten(1, 2)": "x.chunk(n, 0)[group.rank]",
    },
    expect="the exercise asks for a tensor",
)


def _list_of_parts(x, group):
    parts = torch.stack(x.chunk(group.world_size, 0))  # [N, heads / N, seq / N, d]
    return torch.cat(list(group.all_to_all(parts)), 1)


def _by_permutation(x, group):
    heads, seq, dim = x.shape
    n = group.world_size
    parts = x.view(heads, n, seq // n, dim).permute(1, 0, 2, 3).reshape(n * heads, seq // n, dim)
    return group.all_to_all(parts)


alternative("ulysses-exchange", "a list of parts, joined")((_list_of_parts, _by_permutation))
