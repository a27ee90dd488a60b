"""Spoilers of lab 07, on several ranks: orders that are not even, rings that stand still."""

import torch

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers

right = answers_of("07_long_context")

# A ring.

ring_attention = KnownAnswers("ring-attention")

ring_attention.mistake(
    "ranks below 0",
    {"attend(q, *block, (rank - step) % n)": "attend(q, *block, rank - step)"},
    expect="so take it modulo N",
)

# Who holds what.

zigzag_order = KnownAnswers("zigzag-order")


@zigzag_order.mistake(
    "contiguous parts",
    says="These are contiguous parts: the last rank's queries see 2N - 1 times as many keys as the first one's.",
)
def contiguous(seq, rank, world_size):
    return list(range(rank * seq // world_size, (rank + 1) * seq // world_size))


@zigzag_order.mistake(
    "dealt out one by one",
    says="Positions dealt out in turn are nearly even, but rank r always has the later one of each round; and they "
    "lie in many stretches.",
)
def striped(seq, rank, world_size):
    return list(range(rank, seq, world_size))


zigzag_order.mistake(
    "the late parts in the same direction",
    {"2 * world_size - 1 - rank": "world_size + rank"},
    says="Parts r and N + r: both grow with r, so the work does. The second part has to come from the other end.",
)
zigzag_order.mistake(
    "the mirror part off by one", {"2 * world_size - 1 - rank": "2 * world_size - rank"}, expect="there is no position"
)


@zigzag_order.mistake("single positions from both ends", expect="two stretches")
def from_both_ends(seq, rank, world_size):
    pairs = [(p, seq - 1 - p) for p in range(rank, seq // 2, world_size)]
    return sorted(p for pair in pairs for p in pair)


zigzag_order.mistake(
    "the late part first",
    {
        "*range(rank * size, (rank + 1) * size), *range(late * size, (late + 1) * size)": (
            "*range(late * size, (late + 1) * size), *range(rank * size, (rank + 1) * size)"
        )
    },
    expect="ascending",
)
zigzag_order.mistake("only the early part", {", *range(late * size, (late + 1) * size)": ""}, expect="nobody holds")


@zigzag_order.alternative("the middle parts to rank 0")
def from_the_middle(seq, rank, world_size):
    parts = torch.arange(seq).chunk(2 * world_size)
    return torch.cat([parts[world_size - 1 - rank], parts[world_size + rank]])


# The ring.


ring_attention.mistake(
    "waits before it attends",
    {
        "async_op=True)": "async_op=True)\n            work.wait()",
        "            work.wait()\n            block": "            block",
    },
    expect="under way",
)
ring_attention.mistake(
    "passes a block on after the last step",
    {
        "if step < n - 1:\n            arriving": "if n > 1:\n            arriving",
        "if step < n - 1:\n            work": "if n > 1:\n            work",
    },
    expect="after the last step nobody needs",
)
ring_attention.mistake(
    "sends its own block every time",
    {
        "block, out, lse = torch.stack((k, v))": "own = torch.stack((k, v))\n    block, out, lse = own",
        "(block, right)": "(own, right)",
    },
    says="Every step sent the rank's own block again, so the neighbour's is all that ever arrives. Pass on what came.",
)
ring_attention.mistake(
    "takes the block for that of the other side",
    {"(rank - step) % n": "(rank + step) % n"},
    says="The masks belong to other blocks: sent to the right, the block in step i began i ranks to the left, at "
    "(rank - i) % N.",
)
ring_attention.mistake(
    "adds the partial outputs",
    {"merge(out, lse, part, part_lse)": "(out + part, lse)"},
    says="The partial outputs were added. Each is divided by the sum of its own block: merge them by their lse.",
)
ring_attention.mistake(
    "the joint log-sum-exp is not kept",
    {"merge(out, lse, part, part_lse)": "(merge(out, lse, part, part_lse)[0], lse)"},
    says="From the second merge on the weights are wrong: keep the lse that merge returns, not that of the first "
    "block.",
)


ring_attention.mistake(
    "its own block once more meanwhile",
    {
        "        part, part_lse = attend(q, *block": (
            "        if step:\n            attend(q, k, v, rank)\n        part, part_lse = attend(q, *block"
        )
    },
    expect="attends to the blocks .*: each is needed once",
)
ring_attention.mistake(
    "one buffer for both",
    {"recv=(arriving, left)": "recv=(block, left)", "            block = arriving\n": ""},
    expect="receives into a block that is still being sent",
)
ring_attention.mistake(
    "the mean of the outputs",
    {"merge(out, lse, part, part_lse)": "((out * step + part) / (step + 1), lse)"},
    says="The outputs were averaged. Each is divided by the sum of its own block, and a block with larger scores has "
    "the larger share: merge them by their lse.",
)


@ring_attention.mistake("reads before it waits", expect="attends to a block that is still on its way")
def reads_too_early(q, k, v, group, attend):
    n, rank, block, out, works = group.world_size, group.rank, torch.stack((k, v)), (), []
    for step in range(n):
        arriving, source = torch.empty_like(block), (rank - step) % n
        if step < n - 1:
            send, recv = (block, (rank + 1) % n), (arriving, (rank - 1) % n)
            works.append(group.exchange(send=send, recv=recv, async_op=True))
        part = attend(q, *block, source)
        out, block = right.merge(*out, *part) if out else part, arriving
    for work in works:
        work.wait()
    return out[0]


@ring_attention.mistake("keeps all blocks", expect="received blocks at once, as a gather would")
def keeps_all(q, k, v, group, attend):
    n, rank, blocks, out = group.world_size, group.rank, [torch.stack((k, v))], ()
    for step in range(n):
        if step < n - 1:
            arriving = torch.empty_like(blocks[-1])
            send, recv = (blocks[-1], (rank + 1) % n), (arriving, (rank - 1) % n)
            work = group.exchange(send=send, recv=recv, async_op=True)
        part = attend(q, *blocks[-1], (rank - step) % n)
        out = right.merge(*out, *part) if out else part
        if step < n - 1:
            work.wait()
            blocks.append(arriving)
    return out[0]


ring_attention.mistake("one dimension more", {"return out": "return out[None]"}, expect="the output is \\[1, ")


@ring_attention.mistake("gathers everything", expect="you called all_gather")
def gathers(q, k, v, group, attend):
    keys, values = (group.all_gather(x).chunk(group.world_size) for x in (k, v))
    out, lse = attend(q, k, v, group.rank)
    for source in range(group.world_size):
        if source != group.rank:
            out, lse = right.merge(out, lse, *attend(q, keys[source], values[source], source))
    return out


@ring_attention.mistake("everybody sends to everybody", expect="in a ring all send to one neighbour")
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


ring_attention.alternative(
    "the ring in the other direction",
    {
        "right, left = (rank + 1) % n, (rank - 1) % n": "right, left = (rank - 1) % n, (rank + 1) % n",
        "(rank - step) % n": "(rank + step) % n",
    },
)


@ring_attention.alternative("keys and values as two messages, outputs merged at the end")
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
