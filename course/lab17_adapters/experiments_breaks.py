"""Adapters as they go wrong: what six programs leave behind in their logs, four of them with a bug.

B not zero at the start             outputs before training are not the base's
alpha / r forgotten after merge     the merged layer is not the trained one
adapter missing in the hash         a prompt is continued on blocks of another adapter
gradients reduced twice             on ranks, the gradient's norm is not that of one process
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

RIGHT, START, MERGE, HASH, TWICE = VERDICTS = (
    "right", "B not zero at the start", "alpha / r forgotten after merge", "adapter missing in the hash",
    "gradients reduced twice",
)  # fmt: skip
BUGS = {"A": RIGHT, "B": MERGE, "C": HASH, "D": RIGHT, "E": TWICE, "F": START}
BLOCK = 4


@dataclass(frozen=True)
class Seen:
    """What one program logged.

    base, first: outputs of the frozen layer, and of the layer with its adapter before training; adapted, merged: after
    training, with the adapter apart, and merged. All in `dtype`, whose rounding they have. requests: in their order,
    (adapter, tokens of the prompt, how many of them came from the cache). norms: {"A", "B"}: norm of the gradient after
    the first step in which B is not 0, (in one process, over all ranks).
    """

    base: Tensor
    first: Tensor
    adapted: Tensor
    merged: Tensor
    requests: tuple[tuple[str | None, tuple[int, ...], int], ...]
    norms: dict[str, tuple[float, float]]

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype


def run(bug: str, dtype: torch.dtype, world_size: int, rank: int = 4, inputs: int = 24) -> Seen:
    """The program with one bug, or none. Its layer has world_size · 8 outputs, its alpha is not its rank."""
    outputs = 8 * world_size
    weight, x = torch.randn(outputs, inputs) / inputs**0.5, torch.randn(16, inputs)
    a, trained = torch.rand(rank, inputs) * 0.4 - 0.2, torch.randn(outputs, rank)
    start = torch.randn(outputs, rank) if bug == START else torch.zeros(outputs, rank)
    scale = random.choice((0.5, 2.0, 4.0))
    weight, x, a, trained, start = (each.to(dtype) for each in (weight, x, a, trained, start))

    def layer(b: Tensor) -> Tensor:
        return x @ weight.T + scale * ((x @ a.T) @ b.T)

    update = (1.0 if bug == MERGE else scale) * (trained.float() @ a.float())
    merged = (weight.float() + update).to(dtype)
    norms = gradient_norms(x.float(), a.float(), trained.float(), world_size, 2 if bug == TWICE else 1)
    return Seen(x @ weight.T, layer(start), layer(trained), x @ merged.T, requests(bug == HASH), norms)


def gradient_norms(x: Tensor, a: Tensor, b: Tensor, world_size: int, times: int) -> dict[str, tuple[float, float]]:
    """Of a column layer's adapter, cut into parts: A's shares summed `times` times over, B's parts left alone, or,
    where the sum runs twice, summed as well."""
    dy = torch.randn(len(x), len(b))
    parts = list(zip(dy.chunk(world_size, 1), b.chunk(world_size), strict=True))
    shares = [(part @ rows).T @ x for part, rows in parts]
    own = [part.T @ (x @ a.T) for part, _ in parts]
    whole_a, whole_b = (dy @ b).T @ x, dy.T @ (x @ a.T)
    summed_a = sum(shares) * world_size ** (times - 1)  # what is the same on all ranks is added world_size times
    kept_b = own if times == 1 else [sum(own)] * world_size
    return {
        "A": (float(whole_a.norm()), float(summed_a.norm())),
        "B": (float(whole_b.norm()), float(torch.cat(kept_b).norm())),
    }


def requests(forgets: bool) -> tuple[tuple[str | None, tuple[int, ...], int], ...]:
    """Prompts with a common beginning through a cache of blocks, which knows adapters, or forgets them: always, or only
    where an adapter is met for the first time, such as after it was loaded again."""
    beginning = tuple(random.choices(range(1000), k=3 * BLOCK))
    order: list[str | None] = [*random.sample(("red", "blue", None), 3), *random.choices(("red", "blue", None), k=3)]
    only_new = random.random() < 0.5
    if forgets and only_new:
        order[2:] = [*order[:2], order[0], order[2]]
    cached: set[tuple] = set()
    found, met = [], set()
    for index, adapter in enumerate(order):
        tokens = beginning
        if adapter in met or index == len(order) - 1 or random.random() < 0.5:
            tokens += tuple(random.choices(range(1000), k=random.randint(2, 2 * BLOCK)))
        hit, knows = 0, not forgets or (only_new and index < len(order) - 1)
        while hit + BLOCK < len(tokens):
            owners = {adapter} if knows else {*order}
            if not any((owner, tokens[: hit + BLOCK]) in cached for owner in owners):
                break
            hit += BLOCK
        found.append((adapter, tokens, hit))
        met.add(adapter)
        cached |= {(adapter, tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)}
    return tuple(found)


def all_programs(dtype: torch.dtype = torch.bfloat16, world_size: int = 4, seed: int = 0) -> dict[str, Seen]:
    """The six programs, always the same."""
    state = random.getstate()
    random.seed(seed)
    try:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            return {name: run(bug, dtype, world_size) for name, bug in BUGS.items()}
    finally:
        random.setstate(state)
