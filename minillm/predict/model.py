"""What a transformer of a given shape weighs, computes and caches: closed forms, equal to a counted run.

    parameters   attention  L·(2·H·d + 2·H_kv·d)·h     mlp  L·3·h·f     embedding, head  V·h each (one if tied)
                 a mixture of experts in place of an mlp    h·E + 3·h·f_e·(E + shared), of which a token activates
                 h·E + 3·h·f_e·(k + shared): the active ones
    FLOPs        2 per matmul parameter and token forward, 4 backward; attention scores apart, they grow with context
    KV cache     2·L·H_kv·d·b bytes per token
    training     16 bytes per parameter with Adam, in float32 and in mixed precision alike

L layers, h hidden size, f intermediate size, H heads, H_kv kv heads, d head dimension, V vocabulary, b bytes per
element, E experts of width f_e, k of them per token. A shape is any object with `ModelConfig`'s attributes.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class Shape(Protocol):
    """The part of `minillm.model.ModelConfig` these formulas read."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tie_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    sliding_window: int | None
    output_bias: bool
    mlp_bias: bool
    qk_norm_over_heads: bool
    norm_placement: str
    moe: "ExpertShape | None"


class ExpertShape(Protocol):
    """The part of `minillm.model.MoEConfig` these formulas read."""

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_experts: int
    dense_layers: tuple[int, ...]
    normalize: bool
    bias_update_rate: float | None

    def capacity(self, seq: int) -> int | None: ...


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters by part, over all layers. head: 0 when it is the embedding (tied). mlp: all experts."""

    embedding: int
    attention: int
    biases: int
    mlp: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.biases + self.mlp + self.norms + self.head


@dataclass(frozen=True)
class Flops:
    """FLOPs of one token. matmul: with the weights. attention: queries with keys, probabilities with values."""

    matmul: float
    attention: float

    @property
    def total(self) -> float:
        return self.matmul + self.attention


@dataclass(frozen=True)
class StateBytes:
    """Bytes that one parameter costs in training, by kind (without activations)."""

    parameter: int
    gradient: int
    master: int
    moments: int

    @property
    def total(self) -> int:
        return self.parameter + self.gradient + self.master + self.moments

    def per_rank(self, parameters: int, world_size: int, stage: int) -> int:
        """Bytes on one of `world_size` ranks under ZeRO `stage` (0 = replicated); shards are padded to equal size.

        Stage 1 divides master and moments, 2 gradients too, 3 parameters too (Rajbhandari et al. 2020, §5).
        """
        if stage not in (0, 1, 2, 3) or world_size < 1:
            raise ValueError(f"ZeRO stage {stage} on {world_size} ranks: use stage 0 to 3 on at least 1 rank.")
        sharded = sum((self.master + self.moments, self.gradient, self.parameter)[:stage])
        return (self.total - sharded) * parameters + sharded * -(-parameters // world_size)


ADAM_FP32 = StateBytes(parameter=4, gradient=4, master=0, moments=8)
ADAM_MIXED = StateBytes(parameter=2, gradient=2, master=4, moments=8)
ADAM_MIXED_FP32_GRADIENTS = StateBytes(parameter=2, gradient=4, master=4, moments=8)
ADAM_PURE = StateBytes(parameter=2, gradient=2, master=0, moments=4)  # stands still: see `train.precision`


def parameters(shape: Shape) -> Parameters:
    """Parameters by part; `.total` is the sum of `numel` over the model's parameters."""
    h, layers = shape.hidden_size, shape.num_layers
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    block_norms = 4 if shape.norm_placement == "both" else 2
    head_norms = (q + kv if shape.qk_norm_over_heads else 2 * shape.head_dim) if shape.qk_norm else 0
    biases = shape.qkv_bias * (q + 2 * kv) + shape.output_bias * h + shape.mlp_bias * (2 * shape.intermediate_size + h)
    return Parameters(
        embedding=shape.vocab_size * h,
        attention=layers * (2 * h * q + 2 * h * kv),
        biases=layers * biases,
        mlp=_mlp(shape, None if shape.moe is None else shape.moe.num_experts),
        norms=(block_norms * layers + 1) * h + layers * head_norms,
        head=0 if shape.tie_embeddings else shape.vocab_size * h,
    )


def matmul_parameters(shape: Shape) -> int:
    """Weights that multiply a token: the head counts also when it is tied, the embedding (a look-up) never.

    Of experts the active ones alone: those the token chooses, dropless, and the shared ones.
    """
    active = _mlp(shape, None if shape.moe is None else shape.moe.top_k)
    return parameters(shape).attention + active + shape.vocab_size * shape.hidden_size


def _mlp(shape: Shape, experts: int | None) -> int:
    """Weights of all layers' MLPs, counting `experts` of each mixture's and the router, which every token meets."""
    h, moe = shape.hidden_size, shape.moe
    if moe is None:
        return shape.num_layers * 3 * h * shape.intermediate_size
    mixture = h * moe.num_experts + 3 * h * moe.intermediate_size * (experts + moe.shared_experts)
    dense = len(moe.dense_layers)
    return dense * 3 * h * shape.intermediate_size + (shape.num_layers - dense) * mixture


def forward_flops(shape: Shape, context: float) -> Flops:
    """FLOPs per token of a forward pass: 2 per matmul parameter, and 4·L·H·d per key that its query meets.

    context: keys per query. `seq` for dense score matrices, which is what a FLOP counter counts; `causal_context(seq)`
    for what a causal kernel has to compute; the cached length for one decoded token.
    """
    return Flops(2 * matmul_parameters(shape), 4 * shape.num_layers * shape.num_heads * shape.head_dim * context)


def training_flops(shape: Shape, context: float, *, recompute: bool = False) -> Flops:
    """FLOPs per token of forward and backward: 3 forwards, so 6 per matmul parameter (Kaplan et al. 2020, §2.1).

    Backward multiplies twice, for the gradients of inputs and of weights. recompute: every block runs forward once more
    (the head does not). A fused attention kernel computes its scores a second time in backward; that is not counted.
    """
    forward = forward_flops(shape, context)
    if not recompute:
        return Flops(3 * forward.matmul, 3 * forward.attention)
    head = 2 * shape.vocab_size * shape.hidden_size
    return Flops(4 * forward.matmul - head, 4 * forward.attention)


def causal_context(seq: int, window: int | None = None) -> float:
    """Mean number of keys a query meets in a causal sequence: (seq + 1) / 2 without a window."""
    window = min(window or seq, seq)
    return (window * (window + 1) / 2 + (seq - window) * window) / seq


def kv_bytes_per_token(shape: Shape, bytes_per_element: int = 2, *, scale_bytes: int = 0) -> int:
    """Bytes the cache grows by per token: a key and a value of every kv head in every layer, each with its scale.

    scale_bytes: of one scale, if the cache is quantized with one for each token and head (1 byte an element, then).
    """
    return 2 * shape.num_layers * shape.num_kv_heads * (shape.head_dim * bytes_per_element + scale_bytes)


def windowed_blocks(window: int, block_size: int, step_tokens: int = 1) -> int:
    """Blocks of layers with a sliding window that a sequence holds at most: of the window - 1 keys before a step
    and of the step's tokens, wherever in a block they begin."""
    return (window - 1 + step_tokens + block_size - 2) // block_size + 1


def bits_per_byte(nats_per_token: float, tokens: int, text_bytes: int) -> float:
    """Loss in bits per byte of text: nats/token / ln 2 * tokens/bytes. Unlike nats/token it does not depend on the
    tokenizer, so models with different vocabularies compare. With characters for bytes it is bits per character."""
    return nats_per_token / math.log(2) * tokens / text_bytes


def entropy(counts: Iterable[float]) -> float:
    """Entropy in nats of a distribution given by counts: the loss of the best model that ignores all context."""
    counts = [count for count in counts if count > 0]
    total = sum(counts)
    return sum(count / total * math.log(total / count) for count in counts)


@dataclass(frozen=True)
class Bill:
    """days of wall clock, device-hours, megawatt-hours and money in the price's currency."""

    days: float
    device_hours: float
    energy_mwh: float
    money: float


def bill(
    flops: float, devices: int, peak_flops: float, mfu: float, *, watts: float, pue: float, price_per_hour: float
) -> Bill:
    """The bill of a run of `flops` model FLOPs on `devices` devices that really do peak_flops · mfu per second each.

    mfu: the useful share of the peak, failures and restarts included. watts: of a device. pue (power usage
    effectiveness): what cooling and conversion add, 1.1 in a good data centre.
    """
    for name, value in {"flops": flops, "devices": devices, "peak_flops": peak_flops, "watts": watts}.items():
        if not value > 0:
            raise ValueError(f"{name} {value} must be above 0.")
    if not 0 < mfu <= 1 or pue < 1 or price_per_hour < 0:
        raise ValueError(
            f"mfu {mfu} lies in 0 .. 1, pue {pue} is 1 or more, price_per_hour {price_per_hour} at least 0."
        )
    seconds = flops / (devices * peak_flops * mfu)
    hours = devices * seconds / 3600
    return Bill(seconds / 86400, hours, hours * watts * pue / 1e6, hours * price_per_hour)
