"""Spoilers of lab 01, half a ring: wrong collectives that people write, and right ones that look different."""

import torch
import torch.distributed as dist

from course.kit.exercises import KnownAnswers

# Ring reduce-scatter

ring_reduce_scatter = KnownAnswers("ring-reduce-scatter")

ring_reduce_scatter.mistake(
    "chunk-off-by-one",
    {"r - s - 1": "r - s", "r - s - 2": "r - s - 1", "chunks[r]": "chunks[(r + 1) % n]"},
    expect=r"chunk \d \(its own is chunk \d\): off by one",
)
ring_reduce_scatter.mistake("only-n-minus-2-rounds", {"range(n - 1)": "range(1, n - 1)"}, expect="without rank")
ring_reduce_scatter.mistake(
    "a-round-too-many", {"range(n - 1)": "range(n if n > 1 else 0)"}, expect="one round too many"
)
ring_reduce_scatter.mistake("adds-to-the-sent-chunk", {"r - s - 2": "r - s - 1"}, expect="returned a wrong chunk")
ring_reduce_scatter.mistake("divides", {"return chunks[r]": "return chunks[r] / n"}, expect="divided by the 4 ranks")
ring_reduce_scatter.mistake("destroys-input", {"x.clone()": "x"}, expect="changed its input .x., which")
ring_reduce_scatter.mistake(
    "one-buffer-for-both",
    {"recv=(arriving": "recv=(chunks[(r - s - 1) % n]", "+= arriving": "+= chunks[(r - s - 1) % n]"},
    expect="returned a wrong chunk",
)


@ring_reduce_scatter.mistake("whole-tensor-every-round", expect="times as many: in each round send one chunk")
def sends_everything(x, group):
    n, r = group.world_size, group.rank
    total, travelling = x.clone(), x.clone()
    for _ in range(n - 1):
        arriving = torch.empty_like(x)
        group.exchange(send=(travelling, (r + 1) % n), recv=(arriving, (r - 1) % n))
        total += arriving
        travelling = arriving
    return total.chunk(n)[r]


ring_reduce_scatter.mistake(
    "returns-the-whole-tensor", {"return chunks[r]": "return torch.cat(chunks)"}, expect="its own chunk of the sum"
)
ring_reduce_scatter.mistake(
    "blocking-sends",
    {
        "group.exchange(send=(chunks[(r - s - 1) % n], (r + 1) % n), recv=(arriving, (r - 1) % n))": (
            "group.send(chunks[(r - s - 1) % n], (r + 1) % n)\n        group.recv(arriving, (r - 1) % n)"
        )
    },
    expect=r"(?s)waits for.*Deadlock: these ranks are all in send",
)


@ring_reduce_scatter.mistake("straight-to-the-owner", expect="which is not its neighbour")
def sends_each_chunk_to_its_owner(x, group):
    n, r = group.world_size, group.rank
    chunks = x.chunk(n)
    mine, arriving = chunks[r].clone(), torch.empty_like(chunks[r])
    for s in range(1, n):
        group.exchange(send=(chunks[(r + s) % n], (r + s) % n), recv=(arriving, (r - s) % n))
        mine += arriving
    return mine


@ring_reduce_scatter.mistake("ready-made", expect="you called reduce_scatter")
def calls_the_group(x, group):
    return group.reduce_scatter(x)


@ring_reduce_scatter.mistake("element-by-element", expect=r"a rank sent \d+ messages \(N=4\) where 3 are enough")
def one_number_per_message(x, group):
    n, r = group.world_size, group.rank
    chunks = x.clone().chunk(n)
    for s in range(n - 1):
        for leaving, kept in zip(chunks[(r - s - 1) % n].split(1), chunks[(r - s - 2) % n].split(1), strict=True):
            arriving = torch.empty_like(kept)
            group.exchange(send=(leaving, (r + 1) % n), recv=(arriving, (r - 1) % n))
            kept += arriving
    return chunks[r]


@ring_reduce_scatter.mistake("torch-distributed", expect="a collective of torch.distributed: let messages")
def calls_torch(x, group):
    x = x.clone()
    dist.all_reduce(x, group=group.process_group)
    return x.chunk(group.world_size)[group.rank]


ring_reduce_scatter.alternative(
    "other-direction",
    {
        "(r - s - 1) % n], (r + 1) % n": "(r + s + 1) % n], (r - 1) % n",
        "(arriving, (r - 1) % n)": "(arriving, (r + 1) % n)",
        "r - s - 2": "r + s + 2",
    },
)


@ring_reduce_scatter.alternative("taking-turns")
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


@ring_reduce_scatter.alternative("asynchronous, as [1, n]")
def posts_and_waits(x, group):
    n, r = group.world_size, group.rank
    rows = x.view(n, -1).clone()
    for s in range(n - 1):
        arriving = torch.empty_like(rows[0])
        send = (rows[(r - s - 1) % n], (r + 1) % n)
        group.exchange(send=send, recv=(arriving, (r - 1) % n), async_op=True).wait()
        rows[(r - s - 2) % n] += arriving
    return rows[r : r + 1]


ring_reduce_scatter.mistake(
    "buffer-of-float32", {"torch.empty_like(chunks[0])": "torch.empty(chunks[0].numel())"}, expect="float64"
)


ring_reduce_scatter.mistake(
    "float32-on-the-wire",
    {
        "torch.empty_like(chunks[0])": "torch.empty(chunks[0].numel())",
        "send=(chunks[(r - s - 1) % n],": "send=(chunks[(r - s - 1) % n].float(),",
    },
    expect="returned a wrong chunk: it is right to float32's digits only",
)


@ring_reduce_scatter.alternative("half-of-each-chunk-each-way")
def both_directions(x, group):
    n, r = group.world_size, group.rank
    halves = [chunk.clone().tensor_split(2) for chunk in x.chunk(n)]
    for s in range(n - 1):
        for half, way in enumerate((1, -1)):
            arriving = torch.empty_like(halves[0][half])
            leaving = halves[(r - way * (s + 1)) % n][half]
            group.exchange(send=(leaving, (r + way) % n), recv=(arriving, (r - way) % n))
            halves[(r - way * (s + 2)) % n][half].add_(arriving)
    return torch.cat(halves[r])


ring_reduce_scatter.alternative("eager", {"recv=(arriving, (r - 1) % n))": "recv=(arriving, (r - 1) % n), eager=True)"})


# Ring all-gather

ring_all_gather = KnownAnswers("ring-all-gather")

ring_all_gather.mistake("at-most-five-ranks", {"range(n - 1)": "range(min(4, n - 1))"}, expect=r"rank \d of [678]")
ring_all_gather.mistake(
    "chunk-off-by-one", {"new_empty": "new_zeros", "r - s - 1": "r - s - 2"}, expect="gathered wrongly: place"
)
ring_all_gather.mistake("a-round-too-many", {"range(n - 1)": "range(n if n > 1 else 0)"}, expect="one round too many")
ring_all_gather.mistake(
    "own-place-empty", {"new_empty": "new_zeros", "chunks[r].copy_(x)": ""}, expect="something that no rank ever had"
)


@ring_all_gather.mistake("arrival-order", expect=r"place \d of it holds rank \d's tensor, not rank")
def as_they_come(x, group):
    n, r = group.world_size, group.rank
    parts = [x]
    for _ in range(n - 1):
        arriving = torch.empty_like(x)
        group.exchange(send=(parts[-1], (r + 1) % n), recv=(arriving, (r - 1) % n))
        parts.append(arriving)
    return torch.cat(parts)


@ring_all_gather.mistake("whole-buffer-every-round", expect="times as many: pass on only the chunk")
def passes_everything_on(x, group):
    n, r = group.world_size, group.rank
    out = x.new_zeros(n * x.numel())
    out.chunk(n)[r].copy_(x)
    for _ in range(n - 1):
        arriving = torch.empty_like(out)
        group.exchange(send=(out, (r + 1) % n), recv=(arriving, (r - 1) % n))
        out = torch.maximum(out, arriving)
    return out


@ring_all_gather.mistake("straight-to-everybody", expect="which is not its neighbour")
def tells_every_rank(x, group):
    n, r = group.world_size, group.rank
    parts = [torch.empty_like(x) for _ in range(n)]
    parts[r] = x.clone()
    for s in range(1, n):
        group.exchange(send=(x, (r + s) % n), recv=(parts[(r - s) % n], (r - s) % n))
    return torch.cat(parts)


ring_all_gather.mistake(
    "list", {"return out": "return list(chunks)"}, expect="returned a list; the exercise asks for all ranks' tensors"
)


@ring_all_gather.mistake("float32-on-the-wire", expect=r"rank \d of [678] gathered wrongly: .*digits only")
def passes_float32_on(x, group):
    n, r = group.world_size, group.rank
    out = x.new_empty(n * x.numel())
    out.chunk(n)[r].copy_(x)
    travelling = x.float()
    for s in range(n - 1):
        arriving = torch.empty(x.numel())
        group.exchange(send=(travelling, (r + 1) % n), recv=(arriving, (r - 1) % n))
        out.chunk(n)[(r - s - 1) % n].copy_(arriving)
        travelling = arriving
    return out


@ring_all_gather.alternative("both-ways")
def two_half_rings(x, group):
    n, r = group.world_size, group.rank
    parts = {r: x}
    for way, rounds in ((1, n // 2), (-1, (n - 1) // 2)):
        for s in range(rounds):
            arriving = torch.empty_like(x)
            group.exchange(send=(parts[(r - way * s) % n], (r + way) % n), recv=(arriving, (r - way) % n))
            parts[(r - way * (s + 1)) % n] = arriving
    return torch.cat([parts[rank] for rank in range(n)])


@ring_all_gather.alternative("taking-turns-leftwards")
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
