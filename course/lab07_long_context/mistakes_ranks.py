"""Spoilers of lab 07, on several ranks: orders that are not even, rings that stand still, heads in wrong places."""

import torch

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake

right = answers_of("07_long_context")

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


@mistake(
    "zigzag-order",
    "the late parts in the same direction",
    says="Parts r and N + r: both grow with r, so the work does. The second part has to come from the other end.",
)
def same_direction(seq, rank, world_size):
    size = seq // (2 * world_size)
    late = world_size + rank
    return [*range(rank * size, (rank + 1) * size), *range(late * size, (late + 1) * size)]


@mistake("zigzag-order", "the mirror part off by one", expect="there is no position")
def off_by_one(seq, rank, world_size):
    size = seq // (2 * world_size)
    late = 2 * world_size - rank
    return [*range(rank * size, (rank + 1) * size), *range(late * size, (late + 1) * size)]


@mistake("zigzag-order", "single positions from both ends", expect="two stretches")
def from_both_ends(seq, rank, world_size):
    pairs = [(p, seq - 1 - p) for p in range(rank, seq // 2, world_size)]
    return sorted(p for pair in pairs for p in pair)


@mistake("zigzag-order", "the late part first", expect="ascending")
def late_first(seq, rank, world_size):
    positions = right.zigzag(seq, rank, world_size)
    return positions[len(positions) // 2 :] + positions[: len(positions) // 2]


@mistake("zigzag-order", "only the early part", expect="nobody holds")
def early_only(seq, rank, world_size):
    size = seq // (2 * world_size)
    return list(range(rank * size, (rank + 1) * size))


@alternative("zigzag-order", "the middle parts to rank 0")
def from_the_middle(seq, rank, world_size):
    parts = torch.arange(seq).chunk(2 * world_size)
    return torch.cat([parts[world_size - 1 - rank], parts[world_size + rank]])


# The ring.


def _ring(q, k, v, group, attend, *, steps=0, direction=1, waits=False, forward=True, source=-1, join=None):
    """The reference with its parts exchangeable. steps: messages more than N - 1; source: the block's way per step."""
    n, rank, join = group.world_size, group.rank, join or right.merge
    block, out, lse = torch.stack((k, v)), None, None
    own = block
    for step in range(n):
        arriving, work = torch.empty_like(block), None
        if step < n - 1 + steps and n > 1:
            to, come = (rank + direction) % n, (rank - direction) % n
            work = group.exchange(send=(block if forward else own, to), recv=(arriving, come), async_op=True)
            if waits:
                work.wait()
        part, part_lse = attend(q, *block, (rank + source * step) % n)
        out, lse = (part, part_lse) if step == 0 else join(out, lse, part, part_lse)
        if work:
            work.wait()
            block = arriving
    return out


@mistake("ring-attention", "waits before it attends", expect="under way")
def waits_first(q, k, v, group, attend):
    return _ring(q, k, v, group, attend, waits=True)


@mistake("ring-attention", "passes a block on after the last step", expect="after the last step nobody needs")
def one_too_many(q, k, v, group, attend):
    return _ring(q, k, v, group, attend, steps=1)


@mistake(
    "ring-attention",
    "sends its own block every time",
    says="Every step sent the rank's own block again, so the neighbour's is all that ever arrives. Pass on what came.",
)
def never_passes_on(q, k, v, group, attend):
    return _ring(q, k, v, group, attend, forward=False)


@mistake(
    "ring-attention",
    "takes the block for that of the other side",
    says="The masks belong to other blocks: sent to the right, the block in step i began i ranks to the left, at "
    "(rank - i) % N.",
)
def wrong_source(q, k, v, group, attend):
    return _ring(q, k, v, group, attend, source=1)


@mistake(
    "ring-attention",
    "adds the partial outputs",
    says="The partial outputs were added. Each is divided by the sum of its own block: merge them by their lse.",
)
def adds_outputs(q, k, v, group, attend):
    return _ring(q, k, v, group, attend, join=lambda out, lse, part, part_lse: (out + part, lse))


@mistake(
    "ring-attention",
    "the joint log-sum-exp is not kept",
    says="From the second merge on the weights are wrong: keep the lse that merge returns, not that of the first "
    "block.",
)
def old_lse(q, k, v, group, attend):
    def join(out, lse, part, part_lse):
        return right.merge(out, lse, part, part_lse)[0], lse

    return _ring(q, k, v, group, attend, join=join)


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


@alternative("ring-attention", "the ring in the other direction")
def leftwards(q, k, v, group, attend):
    return _ring(q, k, v, group, attend, direction=-1, source=1)


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


def _reshaped(x, group):
    return group.all_to_all(x).reshape(x.shape[0] // group.world_size, -1, x.shape[2])


def _reshaped_back(x, group):
    heads = group.world_size * x.shape[0]
    return group.all_to_all(x.reshape(heads, -1, x.shape[2])).reshape(heads, -1, x.shape[2])


def _every_nth_head(x, group):
    parts = x.unflatten(0, (-1, group.world_size)).transpose(0, 1).contiguous()
    return group.all_to_all(parts).transpose(0, 1).flatten(1, 2)


def _gathered(x, group):
    whole = group.all_gather(x[None]).transpose(0, 1).flatten(1, 2)
    return whole.chunk(group.world_size, 0)[group.rank].clone()


def _own_heads(x, group):
    return x.chunk(group.world_size, 0)[group.rank]


mistake(
    "ulysses-exchange",
    "reshapes without a transposition",
    says="What arrives counts ranks first, then heads, then positions. A reshape to [heads / N, seq, d] reads it in "
    "that order: bring the ranks' dimension behind the heads first.",
)((_reshaped, right.to_sequence))

mistake(
    "ulysses-exchange",
    "the way back without a transposition",
    says="On the way back all_to_all cut dimension 0, which counts heads here. What goes to each rank is its part of "
    "the sequence.",
)((right.to_heads, _reshaped_back))

mistake(
    "ulysses-exchange",
    "every N-th head",
    says="This rank got every N-th head. The exercise asks for heads / N that follow each other, so that query heads "
    "stay with the kv heads they share.",
)((_every_nth_head, right.to_sequence))

mistake("ulysses-exchange", "gathers all and keeps its own", expect="are enough")((_gathered, right.to_sequence))

mistake("ulysses-exchange", "nothing is exchanged", expect="the exercise asks for a tensor")(
    (_own_heads, right.to_sequence)
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
