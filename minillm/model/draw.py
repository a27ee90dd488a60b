"""Random numbers by counter: number i of a sample is a hash of (seed, i) and of nothing else.

A sample's draws therefore do not depend on the batch it is in, on preemption, or on the device, and no generator state
has to be kept or moved. The hash is splitmix64 (Steele et al. 2014, §4); Salmon et al. 2011 has the idea.
"""

import torch
from torch import Tensor

_MASK, _GOLDEN, _SAMPLES = (1 << 64) - 1, 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
COLDEST, HOTTEST = 1e-6, 1e30  # beyond them float32 overflows; drawing has long been greedy, or even


class Draw:
    """The draws of one sample, one after the other. count: how many were taken."""

    __slots__ = ("_start", "count")

    def __init__(self, seed: int):
        self._start, self.count = _mix(seed & _MASK), 0

    def uniform(self) -> float:
        """The next number, from [0, 1), with 53 random bits."""
        self.count += 1
        return (_mix((self._start + self.count * _GOLDEN) & _MASK) >> 11) * 2.0**-53

    def choose(self, probabilities: Tensor) -> int:
        """The index at which the running sum of probabilities (any scale, [n]) passes the next number."""
        sums = probabilities.double().cumsum(0)
        place = torch.searchsorted(sums, self.uniform() * sums[-1], right=True)
        return int(place.clamp(max=int(torch.searchsorted(sums, sums[-1]))))  # never behind the last one above 0


def softmax_at(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) over the last dimension, for any temperature above 0."""
    scaled = (logits - logits.amax(-1, keepdim=True)) / min(max(temperature, COLDEST), HOTTEST)
    return torch.softmax(scaled, dim=-1)


def sample_seed(seed: int, index: int) -> int:
    """The seed of a request's sample `index`. Sample 0 has the request's own; no other is close to any request's."""
    return seed if index == 0 else _mix((_mix(seed ^ _SAMPLES) + index * _SAMPLES) & _MASK) >> 1


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
