"""Seconds of one training step of a layout, by cause: microbatches and the bubble between them, then what comes once.

    step         M · `Microbatch` + bubble + pp + dp + optimizer, put together by `assemble` for published runs (here)
                 and for the trainer of this repository (`trainer.py`); the two differ in what hides behind computation
    compute      matrix products and attention of the slowest stage, recomputation included (`compute.py`)
    elementwise  what norms, residuals, activations and the loss read and write
    tp, ep       collectives inside a layer
    cp           keys and values travel while the block at hand is computed
    bubble       (pp - 1) / chunks microbatches of the slowest stage
    pp           messages at the pipeline's two ends, and those of every microbatch and chunk in between
    dp           gradients and weights, behind the last backward (ZeRO 0, 1) or behind every microbatch (2, 3): in a
                 pipeline behind its forward too, as another microbatch's comes between two backwards. ZeRO-3 also
                 copies what it gathers and reduces, 16 bytes per parameter and microbatch
    optimizer    reading and writing the states once

Communication that runs beside computation is not free: its kernels take multiprocessors and memory bandwidth from the
other's. `_hidden` charges `Cluster.contention` of its time, and all of what is longer than the computation. Code
without overlap (`Stack.overlap`) waits for all of it, and so does tensor parallelism that leaves a node: it overlaps by
copies over the node's own links, a tile of a matrix product at a time. Assumed: layers alike, the fullest expert rank
`EXPERT_LOAD` above the mean. A link has a latency and a bandwidth.
"""

import math
from dataclasses import asdict, dataclass

from minillm.predict.model import causal_context
from minillm.predict.planner import compute
from minillm.predict.planner.architectures import Architecture
from minillm.predict.planner.clusters import Cluster
from minillm.predict.planner.compute import EXPERT_LOAD, MODERN, Stack
from minillm.predict.planner.layout import Layout, Path, axis_path, expert_path, gradient_path
from minillm.predict.planner.memory import ELEMENT, STATE, layers_per_stage, stage_parameters
from minillm.predict.training import pipeline

OPTIMIZER_TRAFFIC = 2 * (STATE.master + STATE.moments) + STATE.gradient + STATE.parameter  # bytes per parameter
STAGED = 16  # bytes per parameter that ZeRO-3 copies in a microbatch: two gathers into place, gradients out of it


@dataclass(frozen=True)
class Step:
    """Seconds by cause; their sum is the step."""

    compute: float
    elementwise: float
    tp: float
    cp: float
    ep: float
    bubble: float
    pp: float
    dp: float
    optimizer: float

    @property
    def seconds(self) -> float:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Microbatch:
    """Seconds that one microbatch takes in the slowest stage, forward and backward, by cause. dp: weights that are
    gathered and gradients that are reduced in every microbatch."""

    compute: float
    elementwise: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    dp: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(asdict(self).values())


def assemble(layout: Layout, each: Microbatch, *, pp: float, dp: float, optimizer: float, tp: float = 0.0) -> Step:
    """A step from its microbatches. pp, dp, optimizer, tp: seconds that come besides, once in a step."""
    count = layout.microbatches
    return Step(
        compute=count * each.compute,
        elementwise=count * each.elementwise,
        tp=count * each.tp + tp,
        cp=count * each.cp,
        ep=count * each.ep,
        bubble=bubble(layout, each.seconds),
        pp=pp,
        dp=count * each.dp + dp,
        optimizer=optimizer,
    )


def step(model: Architecture, layout: Layout, cluster: Cluster, seq: int, stack: Stack = MODERN) -> Step:
    """One step of `layout.batch` sequences of `seq` tokens."""
    device = cluster.device
    tokens = layout.micro_batch * math.ceil(seq / layout.cp)  # of a microbatch on one rank
    layers = layers_per_stage(model, layout)

    work = compute.layer(model, layout, device, seq, tokens, stack)
    products = layers * (work.matmul + work.attention) + compute.head(model, layout, device, tokens)
    elementwise = layers * work.elementwise
    busy = products + elementwise
    tp = layers * tensor_travel(model, layout, cluster, tokens)
    if stack.overlap and not axis_path(cluster, layout, "tp").crosses:
        tp = _hidden(tp, busy, cluster)
    cp = layers * _context(model, layout, cluster, tokens, work.attention)
    ep = layers * model.expert_layers / model.num_layers * _experts(model, layout, cluster, tokens)
    if layout.schedule == "dualpipe":  # behind the other direction's computation
        ep = _hidden(ep, busy, cluster)
    each = Microbatch(products, elementwise, tp, cp, ep)
    message = tokens * model.hidden_size * ELEMENT / layout.tp  # each rank sends a part, which is gathered in the node
    return assemble(
        layout,
        each,
        pp=_messages(layout, cluster, message, each.seconds if stack.overlap else 0.0),
        dp=_data(model, layout, cluster, each.seconds, stack.overlap),
        optimizer=_optimizer(model, layout, cluster),
    )


def _hidden(communication: float, computation: float, cluster: Cluster) -> float:
    """Seconds that communication adds to computation beside which it runs."""
    return cluster.contention * min(communication, computation) + max(0.0, communication - computation)


def mfu(model: Architecture, layout: Layout, cluster: Cluster, seq: int, seconds: float) -> float:
    """Model FLOPs of a step per second, over the peak of all devices; attention counted as a causal kernel computes."""
    flops = layout.batch * seq * model.training_flops(causal_context(seq))
    return flops / seconds / cluster.gpus / cluster.device.flops


def bubble(layout: Layout, microbatch: float) -> float:
    """Seconds that a stage waits in a step. microbatch: seconds of one in a stage, forward and backward."""
    if layout.schedule == "dualpipe":  # forward, input and weight gradients a third each
        third = microbatch / 3
        return max(0.0, pipeline.dualpipe_idle(layout.pp, third, 2 * third, third))
    return (layout.pp - 1) / layout.chunks * microbatch


def _messages(layout: Layout, cluster: Cluster, message: float, microbatch: float) -> float:
    """microbatch: seconds of computation behind which its messages travel."""
    if layout.pp == 1:
        return 0.0
    each = axis_path(cluster, layout, "pp").message(message)
    return 2 * (layout.pp - 1) * each + layout.microbatches * _hidden(2 * layout.chunks * each, microbatch, cluster)


def tensor_travel(model: Architecture, layout: Layout, cluster: Cluster, tokens: int) -> float:
    """Seconds that one layer's messages take in a microbatch, by themselves: two all-reduces forward and two backward,
    or as many reduce-scatters and all-gathers."""
    whole = tokens * model.hidden_size * ELEMENT
    per_pass = 2 * 2 * axis_path(cluster, layout, "tp").ring(whole)
    return per_pass * (3 if layout.recompute == "full" else 2)


def _context(model: Architecture, layout: Layout, cluster: Cluster, tokens: int, attention: float) -> float:
    """cp - 1 rounds of a ring: keys and values forward, and with their gradients backward, behind attention."""
    if layout.cp == 1:
        return 0.0
    kv = tokens * model.kv_bytes(ELEMENT) / model.num_layers / min(layout.tp, model.num_kv_heads)
    way = axis_path(cluster, layout, "cp")
    travel = (layout.cp - 1) * (way.message(kv) + way.message(2 * kv))
    return _hidden(travel, attention, cluster)


def _experts(model: Architecture, layout: Layout, cluster: Cluster, tokens: int) -> float:
    """Four all-to-alls per layer: a token once to every node that has one of its experts, then on to each inside it."""
    if layout.ep == 1:
        return 0.0
    way = expert_path(cluster, layout)
    nodes = layout.ep // way.in_node
    row = tokens / layout.tp * model.hidden_size * ELEMENT * EXPERT_LOAD
    visited = nodes * (1 - (1 - 1 / nodes) ** model.top_k)  # of the nodes, on average
    across = row * visited * (nodes - 1) / nodes / (cluster.network * cluster.link_efficiency) if nodes > 1 else 0.0
    inside = row * model.top_k * (way.in_node - 1) / way.in_node / (cluster.device.link * cluster.link_efficiency)
    return 4 * (max(across, inside) + way.latency)


def _data(model: Architecture, layout: Layout, cluster: Cluster, microbatch: float, overlap: bool) -> float:
    way = gradient_path(cluster, layout)
    if way.size == 1:
        return 0.0
    dense, experts = stage_parameters(model, layout, 0)
    replicas = Path(max(1, way.size // layout.ep), 1, way.bandwidth, way.latency)

    def travel(itemsize: int) -> float:
        return way.ring(dense * itemsize) + (replicas.ring(experts * itemsize) if replicas.size > 1 else 0.0)

    reduce, gather = travel(STATE.gradient), travel(STATE.parameter)
    forward, backward = (microbatch / 3, microbatch * 2 / 3) if overlap else (0.0, 0.0)
    if layout.zero == 3:
        copied = STAGED * (dense + experts) / cluster.device.memory_rate
        late = _hidden(gather, forward, cluster) + _hidden(gather + reduce, backward, cluster)
        return layout.microbatches * (late + copied)
    if layout.zero == 2:
        behind = forward + backward if layout.pp > 1 else backward
        return layout.microbatches * _hidden(reduce, behind, cluster) + _hidden(gather, forward, cluster)
    return _hidden(reduce, backward, cluster) + _hidden(gather, forward, cluster)


def _optimizer(model: Architecture, layout: Layout, cluster: Cluster) -> float:
    dense, experts = stage_parameters(model, layout, 0)
    group = layout.dp * layout.cp if layout.zero else 1
    held = dense / group + experts / max(1, group // layout.ep if layout.zero else 1)
    return OPTIMIZER_TRAFFIC * held / cluster.device.bandwidth
