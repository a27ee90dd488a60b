"""Lab 16's arithmetic: an 8B model on an H100 in three formats, a 70B model on one card, ways to leave weights out."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from course.shared.step_cost import H100_8B, StepCost
from minillm.predict.planner.architectures import architecture
from minillm.predict.serving import quantization as predict
from minillm.quantize import Int
from minillm.quantize.prune import low_rank, magnitude_mask, two_of_four_mask

INT4_BITS = predict.bits_per_weight(4, 128)
HEAD_8B = 128256 * 4096  # weights of the output head, which stay in 16 bits

# The 8B model as it is, with 4-bit weights and 16-bit products, and with 8-bit weights and inputs. An H100 multiplies
# numbers of 8 bits twice as fast (1,979 TFLOP/s, NVIDIA's datasheet), so such a weight counts as half of one of 16. The
# head and attention's products stay in 16 bits.
PLAIN = H100_8B
LAYERS_8B = H100_8B.parameters - HEAD_8B
EIGHT = replace(H100_8B, weight_bytes=LAYERS_8B + HEAD_8B * 2, parameters=LAYERS_8B / 2 + HEAD_8B)


def with_bits(bits: float) -> StepCost:
    """The 8B model with weights of so many bits and products of 16."""
    return replace(H100_8B, weight_bytes=LAYERS_8B * bits / 8 + HEAD_8B * 2)


FOUR = with_bits(INT4_BITS)


def prompt_seconds(cost: StepCost, tokens: int) -> float:
    """Seconds of a prompt of the 8B model. Only its last token goes through the head."""
    return replace(cost, parameters=cost.parameters - HEAD_8B * (1 - 1 / tokens)).step([(0, tokens)])


def knee(cost: StepCost, context: int = 0) -> float:
    """Sequences from which a decode step is limited by compute; infinity where their caches always take longer."""
    weights = cost.weight_bytes / cost.bandwidth
    memory = cost.kv_bytes * (context + 1) / cost.bandwidth
    compute = (2 * cost.parameters + cost.pair_flops * (context + 1)) / cost.flops
    return weights / (compute - memory) if compute > memory else math.inf


@dataclass(frozen=True)
class Plan:
    """A 70B model on one card. Bytes of the weights, of what is left for the cache, of one token in it; step: seconds
    of a decode step of all `sequences`."""

    name: str
    weights: float
    cache: float
    per_token: float
    sequences: int
    step: float


def plans(memory: float = 80e9, free: float = 0.1, activations: float = 2e9, context: int = 32_768) -> list[Plan]:
    """Llama 3 70B with each format of weights and cache."""
    model = architecture("llama-3-70b")
    tables = 2 * model.table
    layers, room = model.parameters - tables, memory * (1 - free) - activations
    rows = model.num_layers * model.num_kv_heads * 2  # keys and values of a token, one row for each head
    eight = predict.cache_bits_per_number(8, model.head_dim, scale_bits=32)
    found = []
    for weights, bits in (("16 bits", 16), ("8 bits", 8), ("4 bits", INT4_BITS)):
        held = layers * bits / 8 + tables * 2
        for cache, number_bits in (("16 bits", 16), ("8 bits", eight)):
            per_token = rows * model.head_dim * number_bits / 8
            left = max(0.0, room - held)
            sequences = int(left // (per_token * context))
            read = held - model.table * 2 + sequences * context * per_token  # of the embedding only a row per token
            found.append(Plan(f"{weights}, {cache}", held, left, per_token, sequences, read / H100_8B.bandwidth))
    return found


def half_rank(weight: Tensor) -> int:
    """The rank whose two factors hold half as many numbers as the weight."""
    return weight.numel() // (2 * sum(weight.shape))


def _int4(weight: Tensor, gram: Tensor) -> Tensor:
    format = Int(bits=4, group=128)
    return format.nearest(weight, format.grid(weight))


def _low_rank(weight: Tensor, gram: Tensor | None) -> Tensor:
    left, right = low_rank(weight, half_rank(weight), gram)
    return left @ right


# (name, bits per weight of a model in 16 bits, what becomes of a weight given Σ x xᵀ of its inputs)
WAYS: tuple[tuple[str, float, Callable[[Tensor, Tensor], Tensor]], ...] = (
    ("int4, groups of 128", INT4_BITS, _int4),
    ("2:4, by size", 9.0, lambda weight, gram: weight * two_of_four_mask(weight)),
    ("2:4, by size and inputs (Wanda)", 9.0, lambda w, gram: w * two_of_four_mask(w, gram.diagonal().sqrt())),
    (
        "half of each output's weights left out, by size",
        16.0,
        lambda weight, gram: weight * magnitude_mask(weight, 0.5),
    ),
    ("rank for half the numbers, SVD", 8.0, lambda weight, gram: _low_rank(weight, None)),
    ("the same, for these inputs (SVD-LLM)", 8.0, _low_rank),
)
