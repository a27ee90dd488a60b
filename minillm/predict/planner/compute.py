"""Seconds of one layer's work on one rank that is no communication: matrix products, attention, and memory traffic.

    matrix products   2 FLOPs per parameter and token, forward once and backward twice, at `Device.matmul_rate`
    attention         one kernel that never writes the scores; without it, 13 bytes per score forward and 19 backward
    element-wise      bytes that norms, residuals, rotary embedding and the activation move / `Device.memory_rate`

16-bit elements that a token's forward pass reads and writes in one layer, each kernel once in and once out:

    two norms           4·h                          divided by tp under sequence parallelism, like the next line
    two residual sums   6·h, and 1·h for dropout     bias, dropout and sum in one kernel
    rotary embedding    2·(q + kv)                   divided by tp, like the next lines
    activation          3·f gated, 2·f plain         experts: as many f as a token activates, and 6·k·h for their order

Backward moves twice as much. Code that runs norms, rotary embedding and activation operator by operator, some of it in
32 bits, moves `UNFUSED` times as much (counted for a Llama layer: 60·h + 16·q + 10·f + 12·h bytes instead of 20·h +
4·q + 6·f). Bytes of unfused attention per score: product written, softmax in and out, dropout in, out and mask, product
read; backward the gradients of the same. Narayanan et al. 2021, §4.2 (which kernels are fused), Dao et al. 2022,
"FlashAttention", §2 (https://arxiv.org/abs/2205.14135).
"""

from dataclasses import dataclass

from minillm.predict.model import causal_context
from minillm.predict.planner.architectures import Architecture
from minillm.predict.planner.clusters import Device
from minillm.predict.planner.layout import Layout
from minillm.predict.planner.memory import ELEMENT

SCORE_FORWARD, SCORE_BACKWARD = 13, 19  # bytes per score that attention without a fused kernel moves
LOSS = 18  # bytes per logit: written, softmax and loss in 32 bits, its gradient written and read twice
UNFUSED = 2.7
EXPERT_LOAD = 1.1  # tokens of the fullest expert rank / the mean


@dataclass(frozen=True)
class Stack:
    """The training code. flash: attention in one kernel; if not, `recomputes_scores` says whether backward makes the
    scores again (selective recomputation). overlap: collectives run beside computation. fused: norms, rotary embedding
    and activation are a kernel each. fp8: matrix products in 8 bits."""

    flash: bool = True
    overlap: bool = True
    fused: bool = True
    recomputes_scores: bool = False
    fp8: bool = False


MODERN = Stack()
MEGATRON_2021 = Stack(flash=False, overlap=False)
MEGATRON_2022 = Stack(flash=False, overlap=False, recomputes_scores=True)
PYTORCH = Stack(fused=False)


@dataclass(frozen=True)
class Work:
    """Seconds of one microbatch in one layer, forward and backward."""

    matmul: float
    attention: float
    elementwise: float

    @property
    def seconds(self) -> float:
        return self.matmul + self.attention + self.elementwise


def layer(model: Architecture, layout: Layout, device: Device, seq: int, tokens: int, stack: Stack = MODERN) -> Work:
    """One layer's work, forward and backward, on `tokens` tokens: those of a microbatch on one rank."""
    passes = 4 if layout.recompute == "full" else 3
    rate = device.matmul_rate(_narrowest(model, layout), stack.fp8)
    spread = EXPERT_LOAD if model.active_expert_parameters and layout.ep > 1 else 1
    matmul = 2 * model.active_layer * tokens * passes * spread / layout.tp / rate
    if stack.flash:
        flops = model.attention_flops(causal_context(seq)) * passes
        attention = flops * tokens / layout.tp / (device.flops * device.attention)
    else:
        forward = passes - 2 + stack.recomputes_scores
        scores = model.num_heads * seq * tokens / layout.tp
        flops = model.attention_flops(seq) * (forward + 2) * tokens / layout.tp
        attention = flops / rate + scores * (forward * SCORE_FORWARD + SCORE_BACKWARD) / device.memory_rate
    again = layout.recompute == "light"  # norms and activations are made once more
    moved = ELEMENT * elements(model, layout, dropout=not stack.flash) * (1 if stack.fused else UNFUSED)
    return Work(matmul, attention, moved * (passes + again) * tokens / device.memory_rate)


def head(model: Architecture, layout: Layout, device: Device, tokens: int) -> float:
    """Seconds of a microbatch's logits and loss, forward and backward, which are always in 16 and 32 bits."""
    rate = device.matmul_rate(_narrowest(model, layout))
    moved = LOSS * tokens * model.vocab_size / layout.tp
    return 3 * 2 * model.table * tokens / layout.tp / rate + moved / device.memory_rate


def elements(model: Architecture, layout: Layout, dropout: bool = False) -> float:
    """Elements that one token's forward pass moves in one layer, beside matrix products and attention."""
    outside = (10 + dropout) * model.hidden_size
    keys = model.query_width if model.latent else model.num_kv_heads * model.head_dim
    rotary = 2 * (model.query_width + 2 * keys)
    dense = model.num_layers - model.expert_layers
    met = model.top_k + model.shared_experts
    wide = dense * model.intermediate_size + model.expert_layers * met * model.expert_intermediate
    activation = (3 if model.gated else 2) * wide / model.num_layers
    ordered = 6 * model.top_k * model.hidden_size * model.expert_layers / model.num_layers
    return outside / (layout.tp if layout.sequence else 1) + (rotary + activation + ordered) / layout.tp


def _narrowest(model: Architecture, layout: Layout) -> float:
    """The smallest side of a layer's matrix products on one rank: a slice of the hidden size, or an expert's width."""
    return min(model.hidden_size, model.expert_intermediate or model.hidden_size) / layout.tp
