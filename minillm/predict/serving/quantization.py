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


def bits_per_weight(bits: int, group: int, *, scale_bits: float = 16, zero_bits: float = 0) -> float:
    """Bits of a weight with its share of its group's scale and zero point. group: weights that share a scale; with one
    scale per output, all of its inputs. NF4 with double quantization: scale_bits 8 + 32 / 256."""
    _positive(bits=bits, group=group)
    return bits + (scale_bits + zero_bits) / group


def mean_squared_error(step: float) -> float:
    """Mean squared error of rounding to a multiple of `step`: Δ² / 12."""
    _positive(step=step)
    return step * step / 12


def decode_seconds(weights: float, batch: int, bits: float, flops: float, bandwidth: float) -> float:
    """Lower bound in seconds of one decode step of `batch` sequences. weights: how many; flops: FLOP/s; bandwidth:
    bytes/s of memory."""
    _positive(weights=weights, batch=batch, bits=bits, flops=flops, bandwidth=bandwidth)
    return max(weights * bits / 8 / bandwidth, 2 * batch * weights / flops)


def speedup(batch: int, bits: float, bits_before: float, flops: float, bandwidth: float) -> float:
    """Seconds of a decode step before quantization / after, if products take the same time with either."""
    return decode_seconds(1, batch, bits_before, flops, bandwidth) / decode_seconds(1, batch, bits, flops, bandwidth)


def batch_of_full_speedup(bits: float, flops: float, bandwidth: float) -> float:
    """The largest batch at which quantized weights are memory-bound, so that the speedup is the ratio of the bits."""
    _positive(bits=bits, flops=flops, bandwidth=bandwidth)
    return bits / 16 * flops / bandwidth


def batch_without_speedup(bits_before: float, flops: float, bandwidth: float) -> float:
    """The batch from which the original weights are compute-bound as well, so that quantizing gains nothing."""
    return batch_of_full_speedup(bits_before, flops, bandwidth)


def low_rank_error(singular_values: Sequence[float], rank: int) -> float:
    """‖W - W_r‖ (Frobenius) of the best matrix of that rank: the root of the summed squares of the singular values left
    out."""
    if not 0 <= rank <= len(singular_values):
        raise ValueError(f"rank {rank} must lie in 0 .. {len(singular_values)}, the number of singular values.")
    left_out = sorted(singular_values, reverse=True)[rank:]
    return math.sqrt(sum(value * value for value in left_out))


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} {value} must be above 0.")
