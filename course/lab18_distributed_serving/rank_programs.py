"""Lab 18's rank programs: one token through a decode layer that is cut over ranks, with the learner's function.

q, k, v, gate, up: rows of this rank (whole heads, whole inner numbers)      x, y: whole on every rank
o, down: columns of this rank                                                keys, values: of this rank's kv heads
"""

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from course.shared.groups import on_groups
from course.shared.sharding import by_case, list_calls
from course.shared.trials import run
from minillm import measure
from minillm.comm import Group


@dataclass(frozen=True)
class LayerPart:
    """A rank's part of a layer. q: [heads · d, h]; k, v: [kv heads · d, h]; o: [h, heads · d]; gate, up: [f, h];
    down: [h, f], with the heads and inner numbers of this rank."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    head_dim: int

    def of(self, rank: int, world_size: int) -> "LayerPart":
        """One rank's part of a whole layer."""
        cut = {
            each.name: getattr(self, each.name).chunk(world_size, 1 if each.name in ("o", "down") else 0)[rank]
            for each in fields(self)
            if each.name != "head_dim"
        }
        return LayerPart(**cut, head_dim=self.head_dim)


@dataclass(frozen=True)
class Token:
    """A decoding sequence's newest token at a layer. x: [h]; keys, values: [kv heads, tokens before, d]; all of one
    dtype, float32 on one rank and float64 on more."""

    world_size: int
    x: Tensor
    keys: Tensor
    values: Tensor
    layer: LayerPart

    @classmethod
    def draw(cls, world_size: int) -> "Token":
        kv_heads = {1: 4, 3: 3}.get(world_size, 2 * world_size)  # on a rank: four, one or two
        per_head, d = 2 + world_size % 2, random.choice((2, 3))
        h, f, tokens = random.randint(5, 9), world_size * random.randint(2, 4), random.randint(3, 9)
        q, kv = kv_heads * per_head * d, kv_heads * d
        shapes = ((q, h), (kv, h), (kv, h), (h, q), (f, h), (f, h), (h, f))
        dtype = torch.float32 if world_size == 1 else torch.float64
        layer = LayerPart(*(torch.randn(shape, dtype=dtype) for shape in shapes), d)
        keys, values = (torch.randn(kv_heads, tokens, d, dtype=dtype) for _ in range(2))
        if world_size == 3:
            keys *= 1e9  # scores whose exponential no float64 holds, so far apart that float32 tells them apart
        x = torch.randn(h, dtype=dtype) / h**0.5  # scores of about 1: every token counts
        return cls(world_size, x, keys, values, layer)

    def part(self, rank: int) -> tuple[Tensor, Tensor, Tensor, LayerPart]:
        """What one rank is given."""
        keys, values = (each.chunk(self.world_size)[rank].clone() for each in (self.keys, self.values))
        return self.x.clone(), keys, values, self.layer.of(rank, self.world_size)

    @cached_property
    def alone(self) -> tuple[Tensor, Tensor, Tensor]:
        """y [h], keys and values with the new token, in one process, by torch's own attention."""
        layer, d = self.layer, self.layer.head_dim
        keys, values = (
            torch.cat((cached, (weight @ self.x).view(-1, 1, d)), 1)
            for cached, weight in ((self.keys, layer.k), (self.values, layer.v))
        )
        query = (layer.q @ self.x).view(1, -1, 1, d)
        seen = F.scaled_dot_product_attention(query, keys[None], values[None], enable_gqa=True)
        x = self.x + layer.o @ seen.flatten()
        return x + layer.down @ (F.silu(layer.gate @ x) * (layer.up @ x)), keys, values


@dataclass(frozen=True)
class Decoded:
    """results: what the learner returned; bytes that this rank sent; calls by name, and the sizes of their tensors;
    changed: names of the weights that are others after the call."""

    results: Any
    bytes: int
    calls: str
    sizes: list[int]
    changed: list[str]


def decode_on_ranks(group: Group, learner: Callable, cases: Sequence[Token]) -> list[Decoded | None]:
    def run_case(case: Token, part: Group) -> Decoded:
        given = case.part(part.rank)
        before = deepcopy(given[3])
        with measure.ledger() as led:
            results = learner(*given, part)
        sizes = [torch.Size(event.shape).numel() for event in led.events]
        weights = [each.name for each in fields(before) if each.name != "head_dim"]
        changed = [name for name in weights if not torch.equal(getattr(before, name), getattr(given[3], name))]
        return Decoded(results, led.bytes(), list_calls(led.calls), sizes, changed)

    return on_groups(group, cases, run_case)


def try_cases(learner: Callable, cases: Sequence[Token]) -> list[list[Decoded]]:
    """By case and rank."""
    return by_case(run(decode_on_ranks, max(case.world_size for case in cases), learner, cases), cases)
