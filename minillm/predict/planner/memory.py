"""Bytes on the fullest rank of a layout, by kind.

    weights, gradients, optimizer    16-bit weights, 32-bit gradients, masters and two moments: 18 bytes per parameter,
                                     cut by ZeRO over dp x cp (experts: over the ranks that hold the same)
    activations                      per token and layer, times the microbatches that a stage has in flight
    buffers                          logits and their gradient, pipeline messages, gathered layers under ZeRO-3

16-bit elements that a layer keeps per token, with a fused attention kernel and without dropout:
    between regions   4·h                        inputs and outputs of both norms
    attention         q + 2·kv + output          queries, keys, values, and what the projection reads
    MLP               3·f gated, 2·f plain
Tensor parallelism divides the last two lines, sequence parallelism the first too: for a GPT layer 32 of the 34·s·b·h
bytes of Korthikanti et al. 2022, §4 (https://arxiv.org/abs/2205.05198), whose other two are dropout masks.

One moment is enough here: such code allocates its gradients once, so the peak comes when the last microbatch in flight
is at the loss. Norms, biases and padding are left out. `training/memory.py` gives the same breakdown, moment by moment
and to the byte, for this repository's trainer on the CPU, whose kernels keep other tensors.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from minillm.predict.model import ADAM_MIXED_FP32_GRADIENTS
from minillm.predict.planner.architectures import Architecture
from minillm.predict.planner.layout import Layout
from minillm.predict.training import pipeline
from minillm.predict.training.moe import rank_state

STATE = ADAM_MIXED_FP32_GRADIENTS
ELEMENT = 2  # bytes of an activation
LOGIT = 4 + 2  # a logit in 32 bits and its gradient in 16


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def memory(model: Architecture, layout: Layout, seq: int, logit: int = LOGIT) -> Memory:
    """Bytes of the fullest rank, which lies in the first stage (most microbatches in flight) or in the last
    (logits). logit: bytes that the loss holds per logit at its peak."""
    stages = {0, layout.pp - 1}
    return max((stage_memory(model, layout, seq, stage, logit) for stage in stages), key=lambda each: each.total)


def layers_per_stage(model: Architecture, layout: Layout, stage: int | None = None) -> int:
    """Layers of a stage, or of the one with most. Where they do not divide, the first and the last stage, which hold
    the embedding and the head, are the first to have one less, as in Llama 3."""
    slots = layout.pp * layout.chunks
    most = -(-model.num_layers // slots)
    missing = most * slots - model.num_layers
    short = stage is not None and layout.pp > 1 and missing > (0 if stage == 0 else 1)
    return layout.chunks * most - (short and stage in (0, layout.pp - 1))


def stage_parameters(model: Architecture, layout: Layout, stage: int) -> tuple[float, float]:
    """(dense, routed experts) of one rank before ZeRO cuts them."""
    layers = layers_per_stage(model, layout, stage)
    tables = (stage == 0) + (stage == layout.pp - 1 and not (model.tie_embeddings and layout.pp == 1))
    dense = layers * (model.attention_parameters + model.mean_mlp_parameters) + tables * model.table
    experts = layers * model.expert_layers / model.num_layers * model.expert_parameters / layout.ep
    copies = pipeline.parameter_copies(layout.schedule)
    return copies * dense / layout.tp, copies * experts / layout.tp


def token_bytes(model: Architecture, layout: Layout) -> float:
    """Bytes that one layer keeps per token of a microbatch, before context parallelism divides the tokens."""
    return _token_bytes(model, layout.tp, layout.sequence, layout.recompute == "light")


@lru_cache(maxsize=4096)
def _token_bytes(model: Architecture, tp: int, sequence: bool, light: bool) -> float:
    wide = (3 if model.gated else 2) - light
    keys = model.query_width if model.latent else model.num_kv_heads * model.head_dim
    values = model.value_width if model.latent else model.num_kv_heads * model.head_dim
    projected = 0 if light and model.latent else model.query_width + keys + values
    attention = projected + model.value_width
    compressed = model.latent.query_rank + model.latent.kv_rank if model.latent else 0
    inner = model.top_k + model.shared_experts
    experts = inner * wide * model.expert_intermediate + 2 * model.top_k * model.hidden_size
    dense_layers = model.num_layers - model.expert_layers
    mlp = (dense_layers * wide * model.intermediate_size + model.expert_layers * experts) / model.num_layers
    between = (2 if light else 4) * model.hidden_size + compressed
    return ELEMENT * (between / (tp if sequence else 1) + (attention + mlp) / tp)


def in_flight(layout: Layout, stage: int) -> float:
    """Microbatches of a whole stage whose activations are held at the peak."""
    if layout.pp == 1:
        return 1
    if layout.schedule == "dualpipe":
        return min(pipeline.in_flight_dualpipe(layout.pp), layout.microbatches)
    if layout.chunks > 1:
        return pipeline.in_flight_interleaved(layout.pp, layout.chunks, layout.microbatches, stage)
    return pipeline.in_flight_1f1b(layout.pp, stage, layout.microbatches)


def stage_memory(model: Architecture, layout: Layout, seq: int, stage: int, logit: int = LOGIT) -> Memory:
    """Bytes of a rank of one pipeline stage. logit: see `memory`."""
    dense, experts = stage_parameters(model, layout, stage)
    group = layout.dp * layout.cp
    state = rank_state(dense, experts, group, layout.ep, layout.zero, STATE)

    tokens = layout.micro_batch * math.ceil(seq / layout.cp)
    layers, per_layer = layers_per_stage(model, layout, stage), tokens * token_bytes(model, layout)
    full, split = layout.recompute == "full", layout.tp if layout.sequence else 1
    stream = tokens * model.hidden_size * ELEMENT / split
    kept = layers * (stream if full else per_layer) * in_flight(layout, stage)
    activations = kept + (per_layer if full else 0)

    buffers = 4 * stream if layout.pp > 1 else 0.0
    if stage == layout.pp - 1:
        buffers += tokens * model.vocab_size / layout.tp * logit
    if layout.zero == 3 and group > 1:
        buffers += 2 * (dense + experts) / layers * (STATE.parameter + STATE.gradient)
    return Memory(state.parameter, state.gradient, state.optimizer, activations, buffers)
