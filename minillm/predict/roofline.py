"""The roofline: how fast an operation can run, from its arithmetic intensity alone.

    FLOP/s                 ridge = peak_flops / bandwidth
      peak |           _______________   compute-bound: more intensity buys nothing
           |         /:
           |       /  :                  memory-bound: speed = bandwidth * intensity
           |_____/____:_______________
                    ridge        intensity, FLOP per byte of memory traffic

Source: Williams, Waterman, Patterson, "Roofline: An Insightful Visual Performance Model for Multicore Architectures",
Communications of the ACM 52(4), 2009. Peaks are FLOP/s, bandwidth is bytes/s, intensity is FLOP/byte.
"""

from __future__ import annotations


def attainable(intensity: float, peak_flops: float, bandwidth: float) -> float:
    """FLOP/s at most: min(peak_flops, bandwidth * intensity) (Williams et al. 2009)."""
    positive(peak_flops=peak_flops, bandwidth=bandwidth)
    if intensity < 0:
        raise ValueError(f"intensity is {intensity} FLOP/byte; it cannot be negative")
    return min(peak_flops, bandwidth * intensity)


def ridge_point(peak_flops: float, bandwidth: float) -> float:
    """FLOP/byte at which memory-bound turns compute-bound: peak_flops / bandwidth (Williams et al. 2009)."""
    positive(peak_flops=peak_flops, bandwidth=bandwidth)
    return peak_flops / bandwidth


def matmul_flops(m: int, k: int, n: int) -> int:
    """FLOPs of [m, k] @ [k, n]: one multiplication and one addition per term, 2mkn."""
    positive(m=m, k=k, n=n)
    return 2 * m * k * n


def matmul_bytes(m: int, k: int, n: int, itemsize: int) -> int:
    """Least memory traffic of [m, k] @ [k, n] in bytes: both inputs read once, the output written once.

    (mk + kn + mn) * itemsize: the compulsory traffic of an ideal cache (Williams et al. 2009); real kernels move more.
    """
    positive(m=m, k=k, n=n, itemsize=itemsize)
    return (m * k + k * n + m * n) * itemsize


def matmul_intensity(m: int, k: int, n: int, itemsize: int) -> float:
    """FLOP per byte of [m, k] @ [k, n]: 2mkn / ((mk + kn + mn) * itemsize).

    With m tokens and a large square weight this tends to 2m / itemsize: decoding one token in bf16 does about one FLOP
    per byte. It is less where inputs and outputs are as large as the weight: 2048 tokens through [4096, 4096] do 1,024.
    """
    return matmul_flops(m, k, n) / matmul_bytes(m, k, n, itemsize)


def positive(**values: float) -> None:
    """ValueError that names the first value which is not above zero."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} is {value}; give a number above zero")
