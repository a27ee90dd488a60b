"""Quantization: bytes, then error, then speed.

    bits per weight    b + (scale + zero point) / group
    error of rounding  Δ² / 12 on the mean, Δ / 2 at most, for steps of Δ        6.02 dB less noise with every bit
    decode step        max(bytes of weights / bandwidth, 2 · batch · weights / FLOP/s)

    speedup    bits before / bits after │ while both wait for memory
                                        │ falls from `batch_of_full_speedup` on: the quantized weights wait no longer
                                      1 │ from `batch_without_speedup` on: nor do the others, and both compute the same

Error: Bennett 1948, "Spectra of quantized signals" (https://doi.org/10.1002/j.1538-7305.1948.tb01340.x), for steps that
are small beside the spread of the weights. Speed: the roofline (`predict.roofline`). Low rank: Eckart and Young 1936
(https://doi.org/10.1007/BF02288367).
"""

import math
from collections.abc import Sequence

from minillm.predict.roofline import positive


def bits_per_weight(bits: int, group: int, *, scale_bits: float = 16, zero_bits: float = 0) -> float:
    """Bits of a weight with its share of its group's scale and zero point. group: weights that share a scale; with one
    scale per output, all of its inputs. NF4 with double quantization: scale_bits 8 + 32 / 256."""
    positive(bits=bits, group=group)
    return bits + (scale_bits + zero_bits) / group


def mean_squared_error(step: float) -> float:
    """Mean squared error of rounding to a multiple of `step`: Δ² / 12."""
    positive(step=step)
    return step * step / 12


def nearest_output_error(step: float, second_moments: Sequence[float]) -> float:
    """Σ_j Δ²/12 · H_jj: mean square error of one output under rounding to nearest, if the errors of its weights are
    independent. second_moments: mean of x_j², the diagonal of H = mean of x xᵀ."""
    return mean_squared_error(step) * sum(second_moments)


def gptq_output_error(step: float, pivots: Sequence[float]) -> float:
    """Σ_j Δ²/12 / U_jj²: the same under GPTQ, pivots: the diagonal of the upper Cholesky factor U of H⁻¹ = Uᵀ U.

    Column j is off by w - ŵ, at most Δ/2, from what the columns before it left, and adds ((w - ŵ) / U_jj)² to the error
    of the output (Frantar et al. 2022, equation 2). So Σ_j Δ²/4 / U_jj², three times this, is an upper bound. 1 / U_jj²
    is the part of x_j that the inputs after it do not explain, hence never above H_jj.
    """
    if not all(pivot > 0 for pivot in pivots):
        raise ValueError("pivots must be above 0: they are the diagonal of a Cholesky factor.")
    return mean_squared_error(step) * sum(1 / pivot**2 for pivot in pivots)


def decode_seconds(weights: float, batch: int, bits: float, flops: float, bandwidth: float) -> float:
    """Lower bound in seconds of one decode step of `batch` sequences. weights: how many; flops: FLOP/s; bandwidth:
    bytes/s of memory."""
    positive(weights=weights, batch=batch, bits=bits, flops=flops, bandwidth=bandwidth)
    return max(weights * bits / 8 / bandwidth, 2 * batch * weights / flops)


def speedup(batch: int, bits: float, bits_before: float, flops: float, bandwidth: float) -> float:
    """Seconds of a decode step before quantization / after, if products take the same time with either."""
    return decode_seconds(1, batch, bits_before, flops, bandwidth) / decode_seconds(1, batch, bits, flops, bandwidth)


def batch_of_full_speedup(bits: float, flops: float, bandwidth: float) -> float:
    """The largest batch at which quantized weights are memory-bound, so that the speedup is the ratio of the bits."""
    positive(bits=bits, flops=flops, bandwidth=bandwidth)
    return bits / 16 * flops / bandwidth


def batch_without_speedup(bits_before: float, flops: float, bandwidth: float) -> float:
    """The batch from which the original weights are compute-bound as well, so that quantizing gains nothing."""
    return batch_of_full_speedup(bits_before, flops, bandwidth)


def cache_bits_per_number(bits: int, head_dim: int, *, scale_bits: float = 16) -> float:
    """Of keys and values with a scale for each token and head: the pool holds 16 / this times as many tokens."""
    return bits_per_weight(bits, head_dim, scale_bits=scale_bits)


def low_rank_error(singular_values: Sequence[float], rank: int) -> float:
    """‖W - W_r‖ (Frobenius) of the best matrix of that rank: the root of the summed squares of the singular values left
    out."""
    if not 0 <= rank <= len(singular_values):
        raise ValueError(f"rank {rank} must lie in 0 .. {len(singular_values)}, the number of singular values.")
    left_out = sorted(singular_values, reverse=True)[rank:]
    return math.sqrt(sum(value * value for value in left_out))


def low_rank_saves(outputs: int, inputs: int) -> int:
    """The largest rank whose two factors, [out, r] and [r, in], hold fewer numbers than the matrix."""
    positive(outputs=outputs, inputs=inputs)
    return (outputs * inputs - 1) // (outputs + inputs)
