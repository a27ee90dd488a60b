"""Factors that move difficulty between inputs and weights, and change nothing else: (W · diag(s)) (diag(1/s) x) = W x.

    AWQ          a weight that meets large inputs matters more: times s > 1 it is rounded on a finer grid
                 (Lin et al. 2023, §3.2).  s = mean|x|^α, the α of least output error, searched
    SmoothQuant  an input channel with outliers spoils the one scale that a token's inputs share: divided by s it does
                 not (Xiao et al. 2022, §4).  s = max|x|^α / max|w|^(1 - α), α = 1/2

1/s goes into what makes the inputs: the norm before, the rows of v_proj or of up_proj. Nothing is multiplied in use.
"""

import torch
from torch import Tensor

from minillm.quantize.calibrate import Group
from minillm.quantize.formats import Format

STEPS = 20  # α is searched in 0, 1/20 .. 1
LEAST = 1e-4  # of a factor, before they are centred on 1


def awq_factors(group: Group, format: Format) -> Tensor:
    """[in]: of the candidates under which no layer of the group has a larger output error than without factors, the
    one with the least mean error. Ones, if nothing is better."""
    inputs, weights = group.inputs, [layer.weight.float() for layer in group.layers.values()]
    ones = torch.ones(len(inputs.absolute), device=inputs.absolute.device)
    if group.divide is None or not inputs.rows:
        return ones
    plain = torch.tensor(_errors(group, weights, format, ones)).clamp(min=1e-30)
    size = group.reduce(inputs.absolute / inputs.rows, lambda parts, axis: parts.mean(axis)).clamp(min=LEAST)
    best, least = ones, 1.0
    for step in range(1, STEPS + 1):
        factors = _centred(size ** (step / STEPS))
        ratios = torch.tensor(_errors(group, weights, format, factors)) / plain
        if ratios.max() <= 1 and ratios.mean() < least:
            best, least = factors, float(ratios.mean())
    return best


def smooth_factors(group: Group) -> Tensor:
    """[in]: √(max|x| / max|w|)."""
    largest = torch.stack([layer.weight.float().abs().amax(0) for layer in group.layers.values()]).amax(0)
    if group.divide is None or not group.inputs.rows:
        return torch.ones_like(largest)
    of_inputs, of_weights = (
        group.reduce(each, lambda parts, axis: parts.amax(axis)).clamp(min=LEAST)
        for each in (group.inputs.largest, largest)
    )
    return _centred((of_inputs / of_weights).sqrt())


def rescale(group: Group, factors: Tensor) -> None:
    """Multiplies the layers' columns by the factors and divides their inputs, and the statistics of those, by them."""
    if group.divide is None:
        return
    group.divide(factors)
    for layer in group.layers.values():
        layer.weight.data = (layer.weight.float() * factors).to(layer.weight.dtype)
    inputs = group.inputs
    inputs.gram /= factors[:, None] * factors
    inputs.absolute, inputs.largest = inputs.absolute / factors, inputs.largest / factors


def _errors(group: Group, weights: list[Tensor], format: Format, factors: Tensor) -> list[float]:
    """The output error of each layer, if it is rounded to nearest under these factors."""
    found = []
    for weight in weights:
        scaled = weight * factors
        found.append(group.inputs.error((format.nearest(scaled, format.grid(scaled)) - scaled) / factors))
    return found


def _centred(factors: Tensor) -> Tensor:
    """Divided by √(largest · least), so that weights keep their size."""
    return factors / (factors.max() * factors.min()).sqrt()
