"""Clusters as a planner sees them: what a device computes and holds, and what its two kinds of links carry.

All rates are of one device and, for links, of one direction. Peaks are dense 16-bit tensor-core peaks. A matrix product
whose narrowest side has w elements reaches `achievable` · w / (w + HALF_WIDTH) of the peak. `achievable` of the A100
and the H100, HALF_WIDTH, CONTENTION and FP8_SPEEDUP are fitted to one half of the published runs (`fit.py`), and to
nothing else; other devices take the H100's share. `attention`: the share of the peak that a fused attention kernel
reaches, forward and backward together: Dao 2023, "FlashAttention-2", §4 (https://arxiv.org/abs/2307.08691) for the
A100, Shah et al. 2024, "FlashAttention-3", §4 (https://arxiv.org/abs/2407.08608) for the H100. MEMORY_SHARE: what
element-wise kernels reach of a memory's bandwidth.
"""

import difflib
import math
from dataclasses import dataclass

GIB = 1 << 30
HALF_WIDTH = 82  # elements at which a matrix product reaches half of its rate
CONTENTION = 0.053  # of the time of communication that runs beside computation, which slows it
FP8_SPEEDUP = 1.59  # of a matrix product in 8 bits, over 16
MEMORY_SHARE = 0.85


@dataclass(frozen=True)
class Device:
    """flops: FLOP/s in 16 bits, dense; memory: bytes; bandwidth: bytes/s of its memory; link: bytes/s to others of its
    node, one direction; achievable, attention: shares of `flops` that wide matrix products and attention reach;
    half_width, fp8_speedup: see above."""

    name: str
    flops: float
    memory: float
    bandwidth: float
    link: float
    achievable: float
    attention: float
    source: str = ""
    half_width: float = HALF_WIDTH
    fp8_speedup: float = FP8_SPEEDUP

    def matmul_rate(self, width: float, fp8: bool = False) -> float:
        """FLOP/s of matrix products whose narrowest side has `width` elements, in 16 or 8 bits."""
        share = self.achievable * width / (width + self.half_width)
        return self.flops * share * (self.fp8_speedup if fp8 else 1.0)

    @property
    def memory_rate(self) -> float:
        """Bytes/s that element-wise kernels read and write."""
        return self.bandwidth * MEMORY_SHARE


@dataclass(frozen=True)
class Cluster:
    """`gpus` devices, `per_node` of which share a node; network: bytes/s of one device to other nodes, one direction.

    latency: seconds a message takes inside a node and across; link_efficiency: share of a link's rate that large
    collectives reach; reserved: bytes of a device that the context, the communicators and the libraries take;
    fragmentation: share of what is left that the allocator loses. cards_per_ring: network cards of a node that one
    collective uses at most; None: one for each of its ranks there, as NCCL does with a ring for every card.
    two_level: whether all-reduces over several nodes first add up inside each of them. contention: see above.
    """

    device: Device
    gpus: int
    per_node: int = 8
    network: float = 50e9
    latency: tuple[float, float] = (8e-6, 25e-6)
    link_efficiency: float = 0.8
    reserved: float = 3 * GIB
    fragmentation: float = 0.05
    cards_per_ring: int | None = None
    two_level: bool = False
    contention: float = CONTENTION

    def __post_init__(self) -> None:
        rates = {"gpus": self.gpus, "per_node": self.per_node, "network": self.network}
        rates |= {
            name: getattr(self.device, name)
            for name in ("flops", "memory", "bandwidth", "link", "achievable", "attention")
        }
        for name, value in rates.items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} {value} of the cluster must be above 0.")
        if self.gpus > self.per_node and self.gpus % self.per_node:
            raise ValueError(
                f"{self.gpus} GPUs do not fill nodes of {self.per_node}: use a multiple of it, or set --per-node."
            )

    @property
    def usable(self) -> float:
        """Bytes of a device that a layout may fill."""
        return (self.device.memory - self.reserved) * (1 - self.fragmentation)

    @property
    def nodes(self) -> int:
        return max(1, self.gpus // self.per_node)


_A100 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_H100 = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_H200 = "https://www.nvidia.com/en-us/data-center/h200/"
_B200 = "https://www.nvidia.com/en-us/data-center/dgx-b200/"
_H800 = "DeepSeek-AI 2024, §3.1: https://arxiv.org/abs/2412.19437"

_L4 = "https://resources.nvidia.com/en-us-data-center-overview/l4-gpu-datasheet"

DEVICES = {
    "l4": Device("L4 24 GB", 121e12, 24 * GIB, 300e9, 32e9, 0.59, 0.45, _L4),
    "a100-40": Device("A100 SXM 40 GB", 312e12, 40 * GIB, 1.555e12, 300e9, 0.741, 0.6, _A100),
    "a100-80": Device("A100 SXM 80 GB", 312e12, 80 * GIB, 2.039e12, 300e9, 0.741, 0.6, _A100),
    "h100": Device("H100 SXM 80 GB", 989e12, 80 * GIB, 3.35e12, 450e9, 0.59, 0.45, _H100),
    "h200": Device("H200 SXM 141 GB", 989e12, 141e9, 4.8e12, 450e9, 0.59, 0.45, _H200),
    "h800": Device("H800 SXM 80 GB", 989e12, 80 * GIB, 3.35e12, 200e9, 0.59, 0.45, _H800),
    "b200": Device("B200 180 GB", 2250e12, 180e9, 8e12, 900e9, 0.59, 0.45, _B200),
}
NETWORKS = {"l4": 12.5e9, "a100-40": 25e9, "a100-80": 25e9, "h100": 50e9, "h200": 50e9, "h800": 50e9, "b200": 50e9}


def cluster(name: str, gpus: int, **changes) -> Cluster:
    """The preset `name` with `gpus` devices. changes: fields of `Cluster`. ValueError names the presets."""
    if name not in DEVICES:
        near = difflib.get_close_matches(name.lower(), DEVICES, n=3, cutoff=0.3) or list(DEVICES)
        raise ValueError(f"no cluster {name!r}: use {', '.join(near)}.")
    return Cluster(DEVICES[name], gpus, **{"network": NETWORKS[name], **changes})
