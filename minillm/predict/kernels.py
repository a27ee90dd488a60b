"""What a kernel costs: bytes read and written, FLOPs, launches, and the time that these allow.

    one kernel     max(bytes / bandwidth, FLOPs / peak)                    Williams et al. 2009, as in roofline.py
    a step         max(launches · launch_s, Σ of its kernels)              the host launches while the GPU computes

Fusing two kernels saves what one writes for the other to read, and a launch. `decode_layer` lists the kernels of a
layer in which every sequence brings one token, before and after minillm's fusing (`minillm/serve/run/optimise.py`).
`LADDER` is where numbers can be, from registers to another node.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from minillm.predict.model import Shape
from minillm.predict.roofline import matmul_flops, positive


@dataclass(frozen=True)
class Kernel:
    """read, written: bytes of memory traffic; launches: kernels that do this together."""

    name: str
    read: float
    written: float
    flops: float = 0.0
    launches: int = 1

    @property
    def bytes(self) -> float:
        return self.read + self.written

    def seconds(self, bandwidth: float, peak_flops: float = float("inf")) -> float:
        """The roofline's bound. bandwidth: bytes/s."""
        return max(self.bytes / bandwidth, self.flops / peak_flops)


@dataclass(frozen=True)
class Memory:
    """One rung of the ladder: bytes of a whole device (None: no fixed size), bytes per second of the whole device."""

    name: str
    bytes: float | None
    rate: float
    source: str


_DATASHEET = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_UNITS, _CLOCK = 132, 1.83e9  # streaming multiprocessors of an H100 SXM, and the clock behind its 989 TFLOP/s in bf16
LADDER = (
    Memory("registers", _UNITS * 256 * 1024, _UNITS * 128 * 12 * _CLOCK, "128 lanes read three numbers a clock"),
    Memory("shared memory", _UNITS * 228 * 1024, _UNITS * 128 * _CLOCK, "128 bytes a clock and unit"),
    Memory("L2 cache", 50e6, 5120 * _CLOCK, "5,120 bytes a clock (NVIDIA A100 whitepaper)"),
    Memory("HBM3", 80e9, 3.35e12, _DATASHEET),
    Memory("NVLink, one direction", None, 450e9, _DATASHEET),
    Memory("PCIe 5, one direction", None, 64e9, _DATASHEET),
    Memory("network of 400 Gbit/s", None, 50e9, "an adapter for each GPU"),
)


def elementwise(numbers: int, inputs: int, itemsize: int, *, name: str = "elementwise") -> Kernel:
    """One result per number from `inputs` arrays as large as it; an input that stays in a cache counts as none."""
    return Kernel(name, inputs * numbers * itemsize, numbers * itemsize, numbers)


def fused(kernels: Iterable[Kernel], kept: float, *, name: str) -> Kernel:
    """One kernel for several. kept: bytes of each intermediate, which is neither written nor read again: there is one
    between each two."""
    kernels = list(kernels)
    saved = kept * (len(kernels) - 1)
    read, written, flops = (sum(getattr(k, what) for k in kernels) for what in ("read", "written", "flops"))
    return Kernel(name, read - saved, written - saved, flops)


def tiled_matmul(m: int, k: int, n: int, tile_m: int, tile_n: int, itemsize: int) -> Kernel:
    """[m, k] @ [k, n] in tiles of the result: A is read once for each column of tiles, B once for each row of them
    (every request counted; what a cache holds between programs is saved)."""
    positive(tile_m=tile_m, tile_n=tile_n, itemsize=itemsize)
    read = m * k * -(-n // tile_n) + k * n * -(-m // tile_m)
    name = f"{m} x {k} x {n} in tiles of {tile_m} x {tile_n}"
    return Kernel(name, read * itemsize, m * n * itemsize, matmul_flops(m, k, n))


def step_seconds(kernels: Iterable[Kernel], bandwidth: float, peak_flops: float, launch_s: float) -> float:
    """At least so long: the host needs launch_s for each launch, meanwhile the device works on earlier ones."""
    kernels = list(kernels)
    launches = sum(kernel.launches for kernel in kernels)
    return max(launches * launch_s, sum(kernel.seconds(bandwidth, peak_flops) for kernel in kernels))


def decode_layer(shape: Shape, batch: int, context: int, itemsize: int = 2, *, fused: bool = False) -> list[Kernel]:
    """A layer's kernels while `batch` sequences bring one token each and read `context` keys. Dense SwiGLU layers."""
    positive(batch=batch, context=context, itemsize=itemsize)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

    def rows(name: str, read: int, written: int, launches: int = 1) -> Kernel:
        """So many numbers of each sequence."""
        return Kernel(name, batch * read * itemsize, batch * written * itemsize, batch * written, launches)

    def product(name: str, inputs: int, outputs: int, count: int = 1) -> Kernel:
        """count: products that read the same inputs, each in its own kernel."""
        read = inputs * outputs + count * batch * inputs
        return Kernel(name, read * itemsize, batch * outputs * itemsize, 2 * batch * inputs * outputs, count)

    norm, residual = rows("norm", hidden, hidden), rows("add", 2 * hidden, hidden)
    turned = q + kv
    keys = 2 * context * kv
    attend = rows("attention over the pages", keys + q, q, 2)
    return [
        norm,
        product("q k v", hidden, q + 2 * kv, 1 if fused else 3),
        rows("rotation", turned, turned) if fused else rows("rotation", 5 * turned, 4 * turned, 8),
        rows("keys and values to their page", 2 * kv, 2 * kv, 2),
        replace(attend, flops=4 * batch * context * q),
        product("output", q, hidden),
        residual,
        norm,
        product("gate, up", hidden, 2 * inner, 1 if fused else 2),
        rows("gate", 2 * inner, inner) if fused else rows("gate", 3 * inner, 2 * inner, 2),
        product("down", inner, hidden),
        residual,
    ]
