"""Spoilers of lab 18: what people write in place of a decode layer, of sharded loading and of a pipeline's batches."""

import torch
import torch.nn.functional as F

from course.kit.exercises import KnownAnswers

# One token through a layer.

REDUCED = "x = x + group.all_reduce(part.o @ (weights @ values).flatten())"


decode_layer = KnownAnswers("decode-layer")

decode_layer.mistake(
    "attention is not added up",
    {REDUCED: "x = x + part.o @ (weights @ values).flatten()"},
    says="o's columns of one rank give a share of attention's output: add the shares up before the MLP reads them.",
)
decode_layer.mistake(
    "one all-reduce at the end",
    {
        REDUCED: "attended = part.o @ (weights @ values).flatten()\n    x = x + attended",
        "return x + group.all_reduce(part.down @ inner), keys, values":
        "return x - attended + group.all_reduce(attended + part.down @ inner), keys, values",
    },
    expect="y is wrong",
)  # fmt: skip
decode_layer.mistake(
    "the residual is added up as well",
    {REDUCED: "x = group.all_reduce(x + part.o @ (weights @ values).flatten())"},
    says="Every rank has the whole x already: summed over the ranks it counts several times.",
)
decode_layer.mistake(
    "the mean of the ranks",
    {REDUCED: 'x = x + group.all_reduce(part.o @ (weights @ values).flatten(), "avg")'},
    says="The ranks hold parts of one sum, so they are added, not averaged.",
)
decode_layer.mistake(
    "the new token does not see itself",
    {
        "weights = (query @ keys.transpose(1, 2) / d**0.5).softmax(dim=-1)":
        "weights = (query @ keys[:, :-1].transpose(1, 2) / d**0.5).softmax(dim=-1)",
        "(weights @ values)": "(weights @ values[:, :-1])",
    },
    says="The newest token attends to itself, too: its key and value are cached before attention.",
)  # fmt: skip
decode_layer.mistake(
    "the cache stays as it was",
    {"(part.down @ inner), keys, values": "(part.down @ inner), keys[:, :-1], values[:, :-1]"},
    expect="keys",
)
decode_layer.mistake(
    "heads in another order",
    {".view(len(keys), -1, d)": ".view(-1, len(keys), d).transpose(0, 1)"},
    says="Query heads stand in the order of the kv heads that they read: those of kv head 0 first.",
)
decode_layer.mistake(
    "x is gathered in between",
    {"inner = F.silu(": 'x = group.all_reduce(x.clone(), "avg")\n    inner = F.silu('},
    expect="two all-reduces of",
)
decode_layer.mistake(
    "two query heads to a kv head", {".view(len(keys), -1, d)": ".view(-1, 2, d)"}, expect="is invalid for input"
)
decode_layer.mistake(
    "exponentials of the scores as they are",
    {".softmax(dim=-1)": ".exp()\n    weights = weights / weights.sum(-1, keepdim=True)"},
    expect="the largest was not subtracted",
)


decode_layer.mistake(
    "a cache that is always float64",
    {"keys = torch.cat((keys, (part.k @ x)": "keys = torch.cat((keys.double(), (part.k @ x)"},
    expect="expected scalar type Float",
)
decode_layer.mistake(
    "the weights of q are scaled",
    {"d = part.head_dim": "d = part.head_dim\n    part.q.mul_(d**-0.5)", "keys.transpose(1, 2) / d**0.5": "keys.mT"},
    expect="part.q is another after your call",
)
decode_layer.alternative("a softmax in 32 bits", {".softmax(dim=-1)": ".softmax(dim=-1, dtype=torch.float32).to(x)"})


@decode_layer.alternative("torch's attention, kv heads repeated")
def by_torch(x, keys, values, part, group):
    d = part.head_dim
    keys = torch.cat((keys, (part.k @ x).view(-1, 1, d)), 1)
    values = torch.cat((values, (part.v @ x).view(-1, 1, d)), 1)
    query = (part.q @ x).view(1, -1, 1, d)
    seen = F.scaled_dot_product_attention(query, keys[None], values[None], enable_gqa=True)
    x = x + group.all_reduce(part.o @ seen.flatten())
    return x + group.all_reduce(part.down @ (F.silu(part.gate @ x) * (part.up @ x))), keys, values


# A rank's own bytes.

sharded_load = KnownAnswers("sharded-load")

sharded_load.mistake(
    "read whole, then cut",
    {
        "part[name] = file.read(name, columns=slice(rank * width, (rank + 1) * width))":
        "part[name] = file.read(name)[:, rank * width : (rank + 1) * width]",
    },
    expect="cut what you ask the file for",
)  # fmt: skip
sharded_load.mistake(
    "kv heads are cut as if there were enough", {"share = min(world_size, kv_heads)": "share = world_size"}, expect="kv"
)
sharded_load.mistake(
    "kv heads in turn",
    {"place = rank * share // world_size": "place = rank % share"},
    says="Neighbours share a kv head: ranks 0 and 1 of four have head 0 of two, as their query heads are its.",
)
sharded_load.mistake(
    "all kv heads on every rank", {"place = rank * share // world_size": "place, share = 0, 1"}, expect="kv"
)
sharded_load.mistake("no padding", {"part[name] = F.pad(part[name], (0, 0, 0, missing))": "pass"}, expect="embedding")
sharded_load.mistake("rounded down", {"count = -(-rows // share)": "count = rows // share"}, expect="embedding")
sharded_load.mistake(
    "norms are cut as well", {'if kind == "whole":': 'if kind == "whole" and rank == 0:'}, expect="norm"
)
sharded_load.mistake(
    "always two ranks a head",
    {"place = rank * share // world_size": "place = rank // 2 if share < world_size else rank"},
    expect="8 ranks, (1 kv head|2 kv heads)",
)
sharded_load.mistake(
    "zeros in float32",
    {"F.pad(part[name], (0, 0, 0, missing))": "torch.cat((part[name], torch.zeros(missing, columns)))"},
    expect="is torch.float32, and the file holds torch.float16",
)
sharded_load.mistake(
    "all of the padding on the last rank",
    {"missing = count - len(part[name])": "missing = (rank == world_size - 1) * (count * world_size - rows)"},
    expect="embedding",
)


@sharded_load.alternative("a slice by kind, then one read")
def by_slices(file, cuts, kv_heads, rank, world_size):
    part = {}
    for name, kind in cuts.items():
        rows, columns = file.shape(name)
        if kind == "kv":
            d, here = rows // kv_heads, max(1, kv_heads // world_size)
            first = rank * kv_heads // world_size
            part[name] = file.read(name, slice(first * d, (first + here) * d))
        elif kind == "columns":
            part[name] = file.read(
                name, slice(None), slice(rank * columns // world_size, (rank + 1) * columns // world_size)
            )
        elif kind == "whole":
            part[name] = file.read(name)
        else:
            count = (rows + world_size - 1) // world_size
            read = file.read(name, slice(rank * count, min(rows, (rank + 1) * count)))
            part[name] = torch.cat((read, read.new_zeros(count - len(read), columns)))
    return part


# Batches of a pipeline.

next_batch = KnownAnswers("next-batch")

next_batch.mistake(
    "a sequence twice in the pipeline",
    {"[name for name in running if name not in busy][:share]": "running[:share]"},
    expect="its newest token is still in the pipeline",
)
next_batch.mistake(
    "only the last batch counts",
    {"for batch in in_flight for name in batch": "for batch in in_flight[-1:] for name in batch"},
    expect="its newest token is still in the pipeline",
)
next_batch.mistake(
    "everybody at once",
    {"[name for name in running if name not in busy][:share]": "[name for name in running if name not in busy]"},
    expect="sequences in one batch: at most",
)
next_batch.mistake(
    "the share of those that are ready",
    {"share = -(-len(running) // stages)": "share = -(-(len(running) - len(busy)) // stages)"},
    expect="starts, and .* should",
)
next_batch.mistake("rounded down", {"-(-len(running) // stages)": "len(running) // stages"}, expect="should|idles")
next_batch.mistake(
    "one batch too many",
    {"len(in_flight) >= stages": "len(in_flight) > stages"},
    expect="as many batches as stages are in flight",
)
next_batch.mistake(
    "at most sixteen",
    {"-(-len(running) // stages)": "min(16, -(-len(running) // stages))"},
    expect="a stage's share is half of them",
)
next_batch.mistake(
    "looked up in the text of the list",
    {"name not in busy": "name not in str(in_flight)"},
    expect="a stage's share is half of them",
)
next_batch.mistake(
    "newest first",
    {"if name not in busy][:share]": "if name not in busy][::-1][:share]"},
    says="The newest come first, so that the one that has waited longest may wait for ever.",
)


@next_batch.alternative("step by step")
def step_by_step(running, in_flight, stages):
    batch = []
    if len(in_flight) < stages:
        for name in running:
            if len(batch) * stages < len(running) and all(name not in each for each in in_flight):
                batch.append(name)
    return batch
