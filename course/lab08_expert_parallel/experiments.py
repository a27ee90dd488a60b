"""Lab 08's measurements without a clock: FLOPs per token, bytes of a layer and across nodes, and three bugs."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from course.lab08_expert_parallel.rank_programs import Layer, local_gradients, one_process
from course.shared.measuring import count_flops, one_thread
from minillm import measure
from minillm.comm import Group, Link, Topology, launch
from minillm.model import ModelConfig, MoEConfig, Transformer, dense
from minillm.model.moe.router import drop_beyond
from minillm.parallel.expert_parallel import ExpertDispatch, NodeDispatch
from minillm.predict import model as shapes
from minillm.predict.training import moe

WORLD, NODES = 4, 2
EXPERT_COUNTS, TOP_K, SEQ = (2, 4, 8, 16, 32), 2, 32
SMALL = ModelConfig(64, 32, 64, 2, 4, max_seq_len=SEQ, moe=MoEConfig(8, TOP_K, 32))
EXPERTS, HIDDEN, TOKENS = 8, 16, 64  # of the layers whose bytes are counted; tokens of a rank
NODE_TOP_K = 4
NETWORK = Topology(WORLD // NODES, inter=Link(1e-3, 1e6, "between nodes"))  # emulated; inside a node as fast as it is


# FLOPs.


@dataclass(frozen=True)
class Size:
    """Of a model: all its parameters, and FLOPs of one token's forward pass, counted and by the formula."""

    parameters: int
    counted: float
    formula: float


@one_thread()
def sizes() -> dict[int, Size]:
    """By number of experts, of which a token activates TOP_K."""
    found, tokens = {}, torch.randint(SMALL.vocab_size, (1, SEQ), generator=torch.Generator().manual_seed(0))
    for count in EXPERT_COUNTS:
        config = replace(SMALL, moe=replace(SMALL.moe, num_experts=count))
        model = Transformer(config, attention=dense)
        with torch.no_grad():
            flops = count_flops(lambda model=model: model(tokens))
        parameters = sum(p.numel() for p in model.parameters())
        found[count] = Size(parameters, flops / SEQ, shapes.forward_flops(config, SEQ).total)
    return found


# Bytes.


@dataclass(frozen=True)
class LayerTraffic:
    """One rank's layer: collectives and bytes of rows, forward and in all."""

    forward: Counter
    both: Counter
    forward_bytes: int
    all_bytes: int


def balanced_choice(tokens: int) -> Tensor:
    """[tokens, TOP_K]: every expert is chosen equally often."""
    return (torch.arange(tokens)[:, None] + 3 * torch.arange(TOP_K)) % EXPERTS


def count_traffic(group: Group) -> LayerTraffic:
    """Forward and backward of a layer whose experts are chosen equally often."""
    torch.set_num_threads(1)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weights = torch.full((TOKENS, TOP_K), 1 / TOP_K, requires_grad=True)
    with measure.ledger() as led:
        out = ExpertDispatch(group, EXPERTS)(lambda rows, *_: rows.tanh(), x, balanced_choice(TOKENS), weights)()
        forward, sent = led.calls, led.bytes("all_to_all")
        out.square().sum().backward()
    return LayerTraffic(forward, led.calls, sent, led.bytes("all_to_all"))


def traffic() -> LayerTraffic:
    return launch(count_traffic, WORLD, device="cpu")[0]


# Two levels.


@dataclass(frozen=True)
class Journey:
    """A layer's rows there and back, forward only. inside, across: bytes this rank sends to ranks of its node and to
    others; out: the layer's output; calls: collectives by name."""

    inside: int
    across: int
    ledger_bytes: int
    seconds: float
    out: Tensor
    calls: Counter


def over_nodes(group: Group) -> dict[str, Journey]:
    """The same layer flat and in two levels; the slow link between nodes is emulated."""
    torch.set_num_threads(1)
    size = group.world_size // NODES
    node = [group.subgroup(range(at, at + size), f"node {at}") for at in range(0, group.world_size, size)]
    across = [group.subgroup(range(at, group.world_size, size), f"across {at}") for at in range(size)]
    own_node, own_across = node[group.rank // size], across[group.rank % size]
    draw = torch.Generator().manual_seed(group.rank)
    x, weights = torch.randn(TOKENS, HIDDEN, generator=draw), torch.rand(TOKENS, NODE_TOP_K, generator=draw)
    chosen = torch.rand(TOKENS, EXPERTS, generator=draw).argsort(1)[:, :NODE_TOP_K]
    each = EXPERTS // group.world_size
    factors = 1 + each * group.rank + torch.arange(each)

    def experts(rows: Tensor, counts: Tensor, _: list[int]) -> Tensor:
        return rows * factors.repeat_interleave(counts)[:, None]

    flat, two_level = ExpertDispatch(group, EXPERTS), NodeDispatch(own_node, own_across, EXPERTS)
    how = experts, x, chosen, weights
    return {
        "flat": _watched(group, size, lambda: flat(*how)()),
        "two levels": _watched(group, size, lambda: two_level(*how)(), own_node, own_across),
    }


def _watched(group: Group, size: int, layer: Callable[[], Tensor], *others: Group) -> Journey:
    sent: Counter[str] = Counter()
    with noting(sent, group.rank // size, size, group, *others), measure.ledger() as led, torch.no_grad():
        group.barrier()
        start = time.monotonic()
        out = layer()
        took = max(group.gather_objects(time.monotonic() - start))
    return Journey(sent["inside"], sent["across"], led.bytes("all_to_all"), took, out, led.calls)


@contextmanager
def noting(sent: Counter, own_node: int, size: int, *groups: Group) -> Iterator[None]:
    """Adds up the bytes that each group's all-to-alls send, by where they go, from the splits they are given."""
    for group in groups:
        _note(sent, own_node, size, group)
    try:
        yield
    finally:
        for group in groups:
            del group.all_to_all  # the method shows through again


def _note(sent: Counter, own_node: int, size: int, group: Group) -> None:
    send = group.all_to_all

    def all_to_all(x: Tensor, *args: Any, input_splits: Any = None, **how: Any) -> Any:
        splits = input_splits or [len(x) // group.world_size] * group.world_size
        row_bytes = x.nbytes // max(1, len(x))
        for place, rows in enumerate(splits):
            if place != group.rank:
                there = group.ranks[place] // size
                sent["inside" if there == own_node else "across"] += rows * row_bytes
        return send(x, *args, input_splits=input_splits, **how)

    group.all_to_all = all_to_all


def flat_and_two_levels() -> list[dict[str, Journey]]:
    return launch(over_nodes, WORLD, link=NETWORK, device="cpu")


def crossing_formula() -> dict[str, float]:
    """Bytes that a rank sends to other nodes on average, there and back, if its tokens choose at random. With two
    levels a row travels there with its k weights (4 bytes each) and k expert ids (8 bytes each)."""
    flat, two_level = moe.crossing_rows(EXPERTS, NODE_TOP_K, NODES)
    there, back = 4 * (HIDDEN + NODE_TOP_K) + 8 * NODE_TOP_K, 4 * HIDDEN
    return {"flat": TOKENS * flat * 2 * 4 * HIDDEN, "two levels": TOKENS * two_level * (there + back)}


# Bugs.


def average_over_replicas(router, experts, data, replicas):
    """Gradients of the mean over the batch, from those of each rank's own mean loss.

    data: all ranks that share the batch. replicas: those that hold the same experts as this one.
    """
    router = data.all_reduce(router) / data.world_size
    experts = replicas.all_reduce(experts) / replicas.world_size
    return router, experts


def expert_gradient_bug(group: Group) -> dict[int, dict[str, float]]:
    """By ep: how many times too large the shipped average is, and what Adam, SGD and clipping make of it."""
    torch.set_num_threads(1)
    found = {}
    for ep in (1, 2, 4):
        layer = _layer()
        starts = range(0, group.world_size, ep)
        neighbours = [group.subgroup(range(at, at + ep), f"ep{ep} {at}") for at in starts][group.rank // ep]
        strides = [range(at, group.world_size, ep) for at in range(ep)]
        replicas = [group.subgroup(ranks, f"ep{ep} alike {at}") for at, ranks in enumerate(strides)][group.rank % ep]
        each = EXPERTS // ep
        case = Layer(ep, *layer)
        shipped = average_over_replicas(*local_gradients(case, group.rank, neighbours), group, replicas)
        right_router, right_experts = one_process(case)
        own = right_experts[each * neighbours.rank :][:each]
        found[ep] = _compared(shipped, (right_router, own))
    return found


def _layer() -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    draw = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
    tokens, targets = ([normal(6, 4) for _ in range(WORLD)] for _ in range(2))
    return normal(EXPERTS, 4), normal(EXPERTS, 4, 4), tokens, targets


def _compared(shipped: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> dict[str, float]:
    found = {"experts": (shipped[1].norm() / right[1].norm()).item()}
    found["router"] = (shipped[0] - right[0]).abs().max().item()
    for name, make in (("Adam", torch.optim.Adam), ("SGD", torch.optim.SGD)):
        steps = [_step_of(gradient, make) for gradient in (shipped[1], right[1])]
        found[name] = (steps[0].norm() / steps[1].norm()).item()
    clipped = [gradients[0] / torch.cat([g.flatten() for g in gradients]).norm() for gradients in (shipped, right)]
    found["clipped router"] = (clipped[0].norm() / clipped[1].norm()).item()
    return found


def _step_of(gradient: Tensor, make: Any) -> Tensor:
    """The first update of weights of zero."""
    weight = torch.zeros_like(gradient, requires_grad=True)
    weight.grad = gradient.clone()
    make([weight], lr=0.1).step()
    return weight.detach()


def expert_gradient_bug_on_ranks() -> list[dict[int, dict[str, float]]]:
    return launch(expert_gradient_bug, WORLD, device="cpu")


def neighbours_in_the_batch(tokens: int = 32, factor: float = 1.0) -> dict[str, int]:
    """A sequence's choices that survive, beside one batch neighbour and beside another: how many differ, when places
    are shared by the batch and when each sequence has its own."""
    draw = torch.Generator().manual_seed(0)
    mine, one, other = (torch.rand(tokens, EXPERTS, generator=draw).argsort(1)[:, :TOP_K] for _ in range(3))
    found = {}
    for name in ("shared by the batch", "of each sequence"):
        kept = []
        for neighbour in (one, other):
            batch = torch.stack([neighbour, mine])
            rows = batch.flatten(0, 1)[None] if name.startswith("shared") else batch
            capacity = moe.capacity(rows.shape[1], TOP_K, EXPERTS, factor)
            kept.append(drop_beyond(rows, EXPERTS, capacity).view_as(batch)[1])
        found[name] = int((kept[0] != kept[1]).sum())
    return found
