"""Runs lab 18's decode layer and a hand-over between ranks on any number of processes.

python 18_distributed_serving.py                                   4 ranks on this machine
torchrun --nproc-per-node 4 18_distributed_serving.py              the same under torchrun
torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \\
    --rdzv-endpoint HOST:29500 18_distributed_serving.py           on each of two nodes

With a GPU for each rank the tensors live on the GPUs and NCCL carries the messages.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from course.kit import Row, row
from course.kit.torchrun import attempt, run
from minillm.comm import Group
from minillm.measure import ledger
from minillm.predict import comms

HIDDEN, HEAD, INNER, CACHED = 12, 4, 5, 6  # of a rank: INNER inner numbers, 1 kv head
LAYERS, BLOCKS, BLOCK = 3, 2, 8  # of a hand-over: layers, blocks of a request, numbers in a block
Judged = tuple[int, int, bool]  # bytes sent, collectives or messages, right values


def decode_layer(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    part: dict[str, Tensor],
    group: Group,
) -> tuple[Tensor, Tensor, Tensor]:
    """x: [h], the same on every rank; keys, values: [kv heads, tokens, d] of this rank; part: its
    rows of q, k, v, gate and up, its columns of o and down.
    -> (y [h], keys, values with the new token behind)."""
    raise NotImplementedError


def hand_over(
    layers: list[Tensor] | None,
    blocks: list[list[int]] | None,
    pool: Tensor,
    group: Group,
) -> None:
    """An even rank prefilled for the odd one behind it: layers, [blocks, numbers] each; blocks
    None. An odd rank decodes: blocks[layer] are those that it set aside in pool, [blocks of the
    pool, numbers], where the layer's rows go, in their order; layers None. The last of an odd
    number of ranks has nothing to do: both are None."""
    raise NotImplementedError


# What follows runs and judges it.


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def try_layer(group: Group) -> Judged:
    """One token through a cut layer, beside the whole one in one process."""
    n, rank = group.world_size, group.rank
    q, kv, inner = 2 * n * HEAD, n * HEAD, INNER * n
    outputs = {"q": q, "k": kv, "v": kv, "gate": inner, "up": inner}
    shapes = {name: (count, HIDDEN) for name, count in outputs.items()}
    shapes |= {"o": (HIDDEN, q), "down": (HIDDEN, inner)}
    whole = {name: draw(seed, *shape) / 4 for seed, (name, shape) in enumerate(shapes.items())}
    x, keys, values = draw(20, HIDDEN), draw(21, n, CACHED, HEAD), draw(22, n, CACHED, HEAD)
    columns = ("o", "down")
    part = {name: each.chunk(n, int(name in columns))[rank] for name, each in whole.items()}
    part = {name: each.to(group.device) for name, each in part.items()}
    given = [each.to(group.device) for each in (x, keys.chunk(n)[rank], values.chunk(n)[rank])]
    with ledger() as led:
        y, new_keys, new_values = decode_layer(*given, part, group)
    right, right_keys, right_values = alone(x, keys, values, whole)
    found = (y, new_keys, new_values)
    wanted = (right, right_keys.chunk(n)[rank], right_values.chunk(n)[rank])
    close = all(torch.allclose(a.cpu(), b, rtol=1e-9) for a, b in zip(found, wanted, strict=True))
    return led.bytes(), led.calls.total(), close


def alone(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    layer: dict[str, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """By torch's own attention, in one process."""
    keys = torch.cat((keys, (layer["k"] @ x).view(-1, 1, HEAD)), 1)
    values = torch.cat((values, (layer["v"] @ x).view(-1, 1, HEAD)), 1)
    query = (layer["q"] @ x).view(1, -1, 1, HEAD)
    seen = F.scaled_dot_product_attention(query, keys[None], values[None], enable_gqa=True)
    x = x + layer["o"] @ seen.flatten()
    return x + layer["down"] @ (F.silu(layer["gate"] @ x) * (layer["up"] @ x)), keys, values


def try_hand_over(group: Group) -> Judged:
    """Layers of a request into blocks that stand in another order in every layer's pool."""
    device, pair = group.device, group.rank // 2
    layers = [draw(100 * pair + layer, BLOCKS, BLOCK) for layer in range(LAYERS)]
    pool = torch.zeros(LAYERS * BLOCKS + 2, BLOCK, dtype=torch.float64)
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(pair)).tolist()
    blocks = [order[layer * BLOCKS : (layer + 1) * BLOCKS] for layer in range(LAYERS)]
    decodes = group.rank % 2 == 1
    prefills = not decodes and group.rank + 1 < group.world_size
    there = pool.to(device, copy=True)
    with ledger() as led:
        sent = [layer.to(device) for layer in layers] if prefills else None
        hand_over(sent, blocks if decodes else None, there, group)
    wanted = pool.clone()
    if decodes:
        for ids, rows in zip(blocks, layers, strict=True):
            wanted[ids] = rows
    messages = sum(event.messages for event in led.events)
    return led.bytes(), messages, torch.equal(there.cpu(), wanted)


PARTS = {"decode layer": try_layer, "hand-over": try_hand_over}


def rank_program(group: Group) -> dict[str, Any]:
    """Each part once, judged; None if not written yet."""
    return attempt(PARTS, group)


def judge(name: str, ranks: list[Judged]) -> Iterator[Row]:
    n = len(ranks)
    sent, calls, right = zip(*ranks, strict=True)
    if name == "decode layer":
        total = 2 * comms.ring_all_reduce(HIDDEN, 8, n).total_bytes
        yield row(f"{name}: bytes sent by all ranks", total, sum(sent), "B")
        yield row(f"{name}: all-reduces", 2, max(calls))
        yield row(f"{name}: as in one process, on every rank", True, all(right))
    else:
        total = n // 2 * LAYERS * BLOCKS * BLOCK * 8
        yield row(f"{name}: bytes sent by all ranks", total, sum(sent), "B")
        yield row(f"{name}: in the blocks set aside, and nowhere else", True, all(right))


if __name__ == "__main__":
    run("lab 18", rank_program, judge)
