"""Spoilers of lab 01, rings: wrong collectives that people write, and right ones that look different."""

import torch
import torch.distributed as dist

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake

right = answers_of("01_collectives")


def all_but_one(n):
    return range(n - 1)


# Ring reduce-scatter


def sums(send=1, add=2, rounds=all_but_one, mine=0, copy=torch.clone, share=lambda n: 1):
    """A ring that sends chunk r-s-send, adds to chunk r-s-add and returns chunk r+mine."""

    def reduce_scatter(x, group):
        n, r = group.world_size, group.rank
        chunks = list(copy(x).chunk(n))
        arriving = torch.empty_like(chunks[0])
        for s in rounds(n):
            group.exchange(send=(chunks[(r - s - send) % n], (r + 1) % n), recv=(arriving, (r - 1) % n))
            chunks[(r - s - add) % n] += arriving
        return chunks[(r + mine) % n] / share(n)

    return reduce_scatter


RINGS = {
    "chunk-off-by-one": (sums(0, 1, mine=1), r"chunk \d \(its own is chunk \d\): off by one"),
    "only-n-minus-2-rounds": (sums(rounds=lambda n: range(1, n - 1)), "without rank"),
    "a-round-too-many": (sums(rounds=lambda n: range(n if n > 1 else 0)), "one round too many"),
    "adds-to-the-sent-chunk": (sums(add=1), "returned a wrong chunk"),
    "divides": (sums(share=lambda n: n), "divided by the 4 ranks"),
    "destroys-input": (sums(copy=lambda x: x), "changed its input x: work on a copy"),
}
for label, (ring, expect) in RINGS.items():
    mistake("ring-reduce-scatter", label, expect=expect)(ring)


@mistake("ring-reduce-scatter", "one-buffer-for-both", expect="returned a wrong chunk")
def receives_over_what_it_sends(x, group):
    n, r = group.world_size, group.rank
    chunks = list(x.clone().chunk(n))
    for s in range(n - 1):
        travelling = chunks[(r - s - 1) % n]
        group.exchange(send=(travelling, (r + 1) % n), recv=(travelling, (r - 1) % n))
        chunks[(r - s - 2) % n] += travelling
    return chunks[r]


@mistake("ring-reduce-scatter", "whole-tensor-every-round", expect="times as many: in each round send one chunk")
def sends_everything(x, group):
    n, r = group.world_size, group.rank
    total, travelling = x.clone(), x.clone()
    for _ in range(n - 1):
        arriving = torch.empty_like(x)
        group.exchange(send=(travelling, (r + 1) % n), recv=(arriving, (r - 1) % n))
        total += arriving
        travelling = arriving
    return total.chunk(n)[r]


@mistake("ring-reduce-scatter", "returns-the-whole-tensor", expect="its own chunk of the sum")
def forgets_to_cut(x, group):
    return right.all_reduce(x.clone(), group)


@mistake("ring-reduce-scatter", "blocking-sends", expect=r"(?s)waits for.*Deadlock: these ranks are all in send")
def everybody_sends_first(x, group):
    n, r = group.world_size, group.rank
    arriving = torch.empty_like(x.chunk(n)[0])
    group.send(x.chunk(n)[(r - 1) % n], (r + 1) % n)
    group.recv(arriving, (r - 1) % n)
    return arriving


@mistake("ring-reduce-scatter", "straight-to-the-owner", expect="which is not its neighbour")
def sends_each_chunk_to_its_owner(x, group):
    n, r = group.world_size, group.rank
    chunks = x.chunk(n)
    mine, arriving = chunks[r].clone(), torch.empty_like(chunks[r])
    for s in range(1, n):
        group.exchange(send=(chunks[(r + s) % n], (r + s) % n), recv=(arriving, (r - s) % n))
        mine += arriving
    return mine


@mistake("ring-reduce-scatter", "ready-made", expect="you called reduce_scatter")
def calls_the_group(x, group):
    return group.reduce_scatter(x)


@mistake("ring-reduce-scatter", "torch-distributed", expect="ledger saw no message")
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
    partial, arriving = x.chunk(n)[(r - 1) % n].clone(), torch.empty_like(x.chunk(n)[0])
    for s in range(n - 1):
        if r % 2 == 0:
            group.send(partial, (r + 1) % n)
        group.recv(arriving, (r - 1) % n)
        if r % 2:
            group.send(partial, (r + 1) % n)
        partial = arriving + x.chunk(n)[(r - s - 2) % n]
    return partial


@alternative("ring-reduce-scatter", "asynchronous, as [1, n]")
def posts_and_waits(x, group):
    n, r = group.world_size, group.rank
    rows = x.view(n, -1).clone()
    for s in range(n - 1):
        arriving = torch.empty_like(rows[0])
        send = (rows[(r - s - 1) % n], (r + 1) % n)
        group.exchange(send=send, recv=(arriving, (r - 1) % n), async_op=True).wait()
        rows[(r - s - 2) % n] += arriving
    return rows[r : r + 1]


# Ring all-gather


def gathers(into=lambda r, s: r - s - 1, rounds=all_but_one, own=True):
    """A ring that receives into place `into(r, s)`."""

    def all_gather(x, group):
        n, r = group.world_size, group.rank
        out = x.new_full((n * x.numel(),), -1.0)
        chunks = out.chunk(n)
        if own:
            chunks[r].copy_(x)
        for s in rounds(n):
            arriving = torch.empty_like(x)
            group.exchange(send=(chunks[(r - s) % n], (r + 1) % n), recv=(arriving, (r - 1) % n))
            chunks[into(r, s) % n].copy_(arriving)
        return out

    return all_gather


GATHERS = {
    "chunk-off-by-one": (gathers(into=lambda r, s: r - s - 2), "gathered wrongly: place"),
    "a-round-too-many": (gathers(rounds=lambda n: range(n if n > 1 else 0)), "one round too many"),
    "own-place-empty": (gathers(own=False), "something that no rank ever had"),
}
for label, (ring, expect) in GATHERS.items():
    mistake("ring-all-gather", label, expect=expect)(ring)


@mistake("ring-all-gather", "arrival-order", expect=r"place \d of it holds rank \d's tensor, not rank")
def as_they_come(x, group):
    n, r = group.world_size, group.rank
    parts = [x]
    for _ in range(n - 1):
        arriving = torch.empty_like(x)
        group.exchange(send=(parts[-1], (r + 1) % n), recv=(arriving, (r - 1) % n))
        parts.append(arriving)
    return torch.cat(parts)


@mistake("ring-all-gather", "whole-buffer-every-round", expect="times as many: pass on only the chunk")
def passes_everything_on(x, group):
    n, r = group.world_size, group.rank
    out = x.new_zeros(n * x.numel())
    out.chunk(n)[r].copy_(x)
    for _ in range(n - 1):
        arriving = torch.empty_like(out)
        group.exchange(send=(out, (r + 1) % n), recv=(arriving, (r - 1) % n))
        out = torch.maximum(out, arriving)
    return out


@mistake("ring-all-gather", "straight-to-everybody", expect="which is not its neighbour")
def tells_every_rank(x, group):
    n, r = group.world_size, group.rank
    parts = [torch.empty_like(x) for _ in range(n)]
    parts[r] = x.clone()
    for s in range(1, n):
        group.exchange(send=(x, (r + s) % n), recv=(parts[(r - s) % n], (r - s) % n))
    return torch.cat(parts)


@mistake("ring-all-gather", "list", expect="returned a list; the exercise asks for all ranks' tensors")
def returns_the_parts(x, group):
    return list(right.all_gather(x, group).chunk(group.world_size))


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


@mistake("ring-all-reduce", "no-division", expect="it is the sum, 4 times the mean: divide")
def forgets_the_mean(x, group, op="sum"):
    return x.copy_(right.all_gather(right.reduce_scatter(x, group), group))


@mistake("ring-all-reduce", "always-divides", expect="it is the mean, but op is 'sum'")
def ignores_op(x, group, op="sum"):
    return right.all_reduce(x, group, "avg")


@mistake("ring-all-reduce", "divides-twice", expect="divided by 4 once more")
def divides_before_and_after(x, group, op="sum"):
    right.all_reduce(x, group, op)
    return x.div_(group.world_size) if op == "avg" else x


@mistake("ring-all-reduce", "divides-by-4", expect=r"rank \d of 3 with op=\"avg\" ended with wrong values")
def assumes_four_ranks(x, group, op="sum"):
    right.all_reduce(x, group)
    return x.div_(4) if op == "avg" else x


@mistake("ring-all-reduce", "not-in-place", expect="did not write them into x")
def leaves_x_as_it_was(x, group, op="sum"):
    mine = right.reduce_scatter(x, group)
    return right.all_gather(mine / group.world_size if op == "avg" else mine, group)


@mistake("ring-all-reduce", "returns-nothing", expect=r"returned nothing \(None\): return x as well")
def forgets_to_return(x, group, op="sum"):
    right.all_reduce(x, group, op)


@mistake("ring-all-reduce", "gathers-everything", expect="times as many: reduce-scatter first")
def gathers_and_adds(x, group, op="sum"):
    total = right.all_gather(x, group).view(group.world_size, -1).sum(0)
    return x.copy_(total / group.world_size if op == "avg" else total)


@mistake("ring-all-reduce", "no-gather", expect="in place")
def keeps_its_own_chunk_only(x, group, op="sum"):
    mine = right.reduce_scatter(x, group)
    x.chunk(group.world_size)[group.rank].copy_(mine / group.world_size if op == "avg" else mine)
    return x


@mistake("ring-all-reduce", "owners-instead-of-a-ring", expect="which is not its neighbour")
def one_owner_per_chunk(x, group, op="sum"):
    mine = sends_each_chunk_to_its_owner(x, group)
    return x.copy_(tells_every_rank(mine / group.world_size if op == "avg" else mine, group))


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


@alternative("ring-all-reduce", "divides-first")
def divides_before_adding(x, group, op="sum"):
    return right.all_reduce(x.div_(group.world_size) if op == "avg" else x, group)
