"""Seconds of one training step of a layout, by cause.

    compute    FLOPs of the slowest stage / (peak · achievable), recomputation included
    tp, ep     collectives inside a layer, which nothing hides (DualPipe hides ep behind the other direction's compute)
    cp         keys and values travel while the block at hand is computed: only what is longer than that counts
    bubble     (pp - 1) / chunks microbatches of the slowest stage
    pp         messages at the pipeline's two ends, and what is longer than a microbatch's compute in between
    dp         gradients and weights; hidden behind the last backward (ZeRO 0, 1), or behind every microbatch (2, 3):
               in a pipeline behind its forward too, as another microbatch's comes between two backwards
    optimizer  reading and writing the states once

Assumed: layers alike, the fullest expert rank `EXPERT_LOAD` above the mean. A link has a latency and a bandwidth.
"""

import math
from dataclasses import asdict, dataclass

from minillm.predict.model import causal_context
from minillm.predict.planner.architectures import Architecture
from minillm.predict.planner.clusters import Cluster
from minillm.predict.planner.layout import Layout, Path, axis_path, expert_path, gradient_path
from minillm.predict.planner.memory import ELEMENT, STATE, layers_per_stage, stage_parameters
from minillm.predict.training import pipeline

EXPERT_LOAD = 1.1  # tokens of the fullest expert rank / the mean
OPTIMIZER_TRAFFIC = 2 * (STATE.master + STATE.moments) + STATE.gradient + STATE.parameter  # bytes per parameter


@dataclass(frozen=True)
class Step:
    """Seconds by cause; their sum is the step."""

    compute: float
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


def step(model: Architecture, layout: Layout, cluster: Cluster, seq: int) -> Step:
    """One step of `layout.batch` sequences of `seq` tokens."""
    device = cluster.device
    rate = device.matmul_rate(_narrowest(model, layout))
    tokens = layout.micro_batch * math.ceil(seq / layout.cp)  # of a microbatch on one rank
    context, layers = causal_context(seq), layers_per_stage(model, layout)

    passes = 4 if layout.recompute == "full" else 3
    imbalance = 1 + (EXPERT_LOAD - 1) * (model.active_expert_parameters > 0 and layout.ep > 1)
    attention = model.attention_flops(context) * tokens * passes / layout.tp / (device.flops * device.attention)
    matmul = 2 * model.active_layer * tokens * passes * imbalance / layout.tp / rate
    head = 3 * 2 * model.table * tokens / layout.tp / rate
    compute = layers * (attention + matmul) + head

    tp = layers * _tensor(model, layout, cluster, tokens)
    cp = layers * _context(model, layout, cluster, tokens, attention)
    ep = layers * model.expert_layers / model.num_layers * _experts(model, layout, cluster, tokens)
    if layout.schedule == "dualpipe":
        ep = max(0.0, ep - compute)
    microbatch = compute + tp + cp + ep
    message = tokens * model.hidden_size * ELEMENT / (layout.tp if layout.sequence else 1)
    return Step(
        compute=layout.microbatches * compute,
        tp=layout.microbatches * tp,
        cp=layout.microbatches * cp,
        ep=layout.microbatches * ep,
        bubble=bubble(layout, microbatch),
        pp=_messages(layout, axis_path(cluster, layout, "pp"), message, microbatch),
        dp=_data(model, layout, cluster, microbatch),
        optimizer=_optimizer(model, layout, cluster),
    )


def mfu(model: Architecture, layout: Layout, cluster: Cluster, seq: int, seconds: float) -> float:
    """Model FLOPs of a step per second, over the peak of all devices; attention counted as a causal kernel computes."""
    flops = layout.batch * seq * model.training_flops(causal_context(seq))
    return flops / seconds / cluster.gpus / cluster.device.flops


def _narrowest(model: Architecture, layout: Layout) -> float:
    """The smallest side of a layer's matrix products on one rank: a slice of the hidden size, or an expert's width."""
    return min(model.hidden_size, model.expert_intermediate or model.hidden_size) / layout.tp


def bubble(layout: Layout, microbatch: float) -> float:
    """Seconds that a stage waits in a step. microbatch: seconds of one in a stage, forward and backward."""
    if layout.schedule == "dualpipe":  # forward, input and weight gradients a third each
        third = microbatch / 3
        return max(0.0, pipeline.dualpipe_idle(layout.pp, third, 2 * third, third))
    return (layout.pp - 1) / layout.chunks * microbatch


def _messages(layout: Layout, way: Path, message: float, microbatch: float) -> float:
    if layout.pp == 1:
        return 0.0
    each = way.message(message)
    late = max(0.0, 2 * layout.chunks * each - microbatch)
    return 2 * (layout.pp - 1) * each + layout.microbatches * late


def _tensor(model: Architecture, layout: Layout, cluster: Cluster, tokens: int) -> float:
    """Two all-reduces forward and two backward per layer, or as many reduce-scatters and all-gathers."""
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
    return max(0.0, travel - attention)


def _experts(model: Architecture, layout: Layout, cluster: Cluster, tokens: int) -> float:
    """Four all-to-alls per layer: a token once to every node that has one of its experts, then on to each inside it."""
    if layout.ep == 1:
        return 0.0
    way = expert_path(cluster, layout)
    nodes = layout.ep // way.in_node
    row = tokens / layout.tp * model.hidden_size * ELEMENT * EXPERT_LOAD
    visited = nodes * (1 - (1 - 1 / nodes) ** model.top_k)  # of the nodes, in the mean
    across = row * visited * (nodes - 1) / nodes / (cluster.network * cluster.link_efficiency) if nodes > 1 else 0.0
    inside = row * model.top_k * (way.in_node - 1) / way.in_node / (cluster.device.link * cluster.link_efficiency)
    return 4 * (max(across, inside) + way.latency)


def _data(model: Architecture, layout: Layout, cluster: Cluster, microbatch: float) -> float:
    way = gradient_path(cluster, layout)
    if way.size == 1:
        return 0.0
    dense, experts = stage_parameters(model, layout, 0)
    replicas = Path(max(1, way.size // layout.ep), 1, way.bandwidth, way.latency)

    def travel(itemsize: int) -> float:
        return way.ring(dense * itemsize) + (replicas.ring(experts * itemsize) if replicas.size > 1 else 0.0)

    reduce, gather = travel(STATE.gradient), travel(STATE.parameter)
    backward = microbatch * 2 / 3
    if layout.zero == 3:
        late = max(0.0, gather - microbatch / 3) + max(0.0, gather + reduce - backward)
        return layout.microbatches * late
    if layout.zero == 2:
        hidden = microbatch if layout.pp > 1 else backward
        return layout.microbatches * max(0.0, reduce - hidden) + gather
    return max(0.0, reduce - backward) + gather


def _optimizer(model: Architecture, layout: Layout, cluster: Cluster) -> float:
    dense, experts = stage_parameters(model, layout, 0)
    group = layout.dp * layout.cp if layout.zero else 1
    held = dense / group + experts / max(1, group // layout.ep if layout.zero else 1)
    return OPTIMIZER_TRAFFIC * held / cluster.device.bandwidth
