"""Seconds of a forward pass of a real model on a real GPU, by the roofline: the simulated clock of labs 14 and 15."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class StepCost:
    """A forward pass on a roofline: the larger of compute and memory traffic.

    flops: FLOP/s. bandwidth, link: bytes/s, of the device's memory and to the host. parameters: weights multiplied per
    token, weight_bytes: of them all. kv_bytes: keys and values of one token. pair_flops: of one query with one key, all
    layers and heads: 4·L·H·d. copy_s: what starting the copy of one block costs.
    """

    flops: float
    bandwidth: float
    link: float
    parameters: float
    weight_bytes: float
    kv_bytes: float
    pair_flops: float
    copy_s: float = 0.0

    def step(self, batch: Sequence[tuple[int, int]]) -> float:
        """Seconds of a pass. batch: (tokens computed before, tokens of this pass) of each sequence."""
        tokens = sum(count for _, count in batch)
        pairs = sum(count * start + count * (count + 1) / 2 for start, count in batch)
        keys = sum(start + count for start, count in batch)
        compute = (2 * self.parameters * tokens + self.pair_flops * pairs) / self.flops
        return max(compute, (self.weight_bytes + self.kv_bytes * keys) / self.bandwidth)

    def swap(self, blocks: int, block_size: int) -> float:
        """Seconds to move that many blocks one way."""
        return blocks * (block_size * self.kv_bytes / self.link + self.copy_s)

    def recompute(self, tokens: int) -> float:
        """Compute that a preempted sequence of so many tokens brings again; it hides where a step is memory-bound."""
        return (2 * self.parameters * tokens + self.pair_flops * tokens * (tokens + 1) / 2) / self.flops

    def crossover(self, block_size: int) -> float:
        """Tokens from which swapping out and in takes less than recomputing; 0: always.

        Recomputing costs 2P/F + the pairs, which grow with the length; swapping 2·(KV/link + copy/block) per token.
        """
        swapped = 2 * self.swap(1, block_size) / block_size
        linear = (2 * self.parameters + self.pair_flops / 2) / self.flops
        return max(0.0, (swapped - linear) * 2 * self.flops / self.pair_flops)


# Llama-3-8B in bf16 (32 layers, 32 heads, 8 kv heads of 128) on one H100 SXM: 989 TFLOP/s dense bf16, 3.35 TB/s, PCIe 5
# x16 at 64 GB/s each way (NVIDIA, H100 datasheet). Peaks: real kernels are slower, ratios are what to read. 7.50 of its
# 8.03 billion parameters are multiplied and read in every pass: of the embedding table only a row per token is.
H100_8B = StepCost(
    flops=989e12,
    bandwidth=3.35e12,
    link=64e9,
    parameters=7.505e9,
    weight_bytes=15.01e9,
    kv_bytes=2 * 32 * 8 * 128 * 2,
    pair_flops=4 * 32 * 32 * 128,
)

# Llama 3 70B in bf16, cut over four H100s: four times the rates, without what the cut costs.
FOUR_H100_70B = replace(
    H100_8B,
    flops=4 * H100_8B.flops,
    bandwidth=4 * H100_8B.bandwidth,
    parameters=69.5e9,
    weight_bytes=139e9,
    kv_bytes=2 * 80 * 8 * 128 * 2,
    pair_flops=4 * 80 * 64 * 128,
)
