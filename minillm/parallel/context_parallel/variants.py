"""The variants by name, and a model that is told which positions its tokens have.

    name      attention                                        order of the positions
    ring      RingAttention                                    contiguous
    zigzag    RingAttention                                    zigzag: equal causal work on every rank
    ulysses   UlyssesAttention                                 contiguous
    hybrid    UlyssesAttention in a node, a ring across nodes  zigzag across, contiguous inside
    gather    GatherAttention                                  zigzag

    mesh = Mesh(group, dp=2, cp=4)
    attention = context_attention("zigzag", mesh.cp)
    model = context_parallel(Transformer(config), attention)
    model(tokens[:, attention.positions(seq)], targets=...)     # this rank's part of every sequence

Everything besides attention looks at one token at a time, so it needs no change, but for routers that count a
sequence's tokens: those ask the other ranks which experts theirs chose. The loss is a sum over this rank's tokens, and
gradients are added up over the ranks of `cp` as they are over those of `dp`.
"""

import math
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.model.moe import Router, RouterLosses
from minillm.parallel.context_parallel.exchange import GatherAttention, UlyssesAttention, check_ulysses
from minillm.parallel.context_parallel.order import ContextAttention
from minillm.parallel.context_parallel.ring import RingAttention

CONTEXTS = ("ring", "zigzag", "ulysses", "hybrid", "gather")

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def context_attention(context: str, group: Group, across: Group | None = None, **how: Any) -> ContextAttention:
    """The attention function of a variant, one of `CONTEXTS`.

    group: the ranks that a sequence is cut over; of a hybrid those of a node, and `across` those with the same place in
    the other nodes. how: tile, overlap (of rings), segments.
    """
    check_context(context)
    if context in ("ring", "zigzag"):
        return RingAttention(group, "contiguous" if context == "ring" else "zigzag", **how)
    if context == "hybrid":
        if across is None:
            raise ValueError("context 'hybrid' needs two groups: pass across=, the ranks between nodes.")
        ring = RingAttention(across, "zigzag", **how)
        return UlyssesAttention(group, inside=ring, segments=how.get("segments"))
    return (UlyssesAttention if context == "ulysses" else GatherAttention)(group, **how)


def context_parallel(module: AnyModule, attention: ContextAttention) -> AnyModule:
    """Makes a Transformer, or a pipeline's part of one, compute on this rank's positions of every sequence, in place.

    Its tokens are then [batch, seq / attention.world_size], those at `attention.positions(seq)`. Positions of padding
    beyond the model's context count as its last.
    """
    module.attention = attention
    module.positions_of = partial(_positions, attention, module.config.max_seq_len)
    module.router_losses_of = partial(RouterLosses, sum_over_parts=attention.sum, parts=attention.world_size)
    for router in module.modules():
        if isinstance(router, Router):
            router.whole, router.own = attention.whole, attention.own
    return module


def _positions(attention: ContextAttention, max_seq_len: int, count: int, device: torch.device) -> Tensor:
    return attention.positions_on(count * attention.world_size, device).clamp(max=max_seq_len - 1)


def check_context(context: str) -> None:
    if context not in CONTEXTS:
        raise ValueError(f"context {context!r} is unknown: use one of {', '.join(CONTEXTS)}.")


def sequence_multiple(context: str, world_size: int, node: int = 1) -> int:
    """The number that a sequence's length has to be a multiple of. node: of a hybrid, ranks of a Ulysses group."""
    check_context(context)
    rings = world_size // node if context == "hybrid" else world_size
    halves = 2 if context in ("zigzag", "hybrid", "gather") and rings > 1 else 1
    return math.lcm(halves * rings, world_size)


def check_context_heads(context: str, heads: int, kv_heads: int, world_size: int, node: int = 1) -> None:
    """ValueError if heads cannot be exchanged for sequence. heads, kv_heads: of one tensor-parallel rank."""
    if context in ("ulysses", "hybrid"):
        check_ulysses(heads, kv_heads, node if context == "hybrid" else world_size)
