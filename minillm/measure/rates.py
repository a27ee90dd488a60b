"""Raw rates of this machine, measured: matmul FLOP/s, memory bytes/s, and the line through a link's samples.

Peaks are the best of several runs (what the hardware can do), link times come in as medians (what a rank will see).
Sources: McCalpin's STREAM triad (1995) for memory, Hockney (1994) for the link's t = alpha + bytes / beta.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class LinkFit:
    """t = latency_s + bytes / bandwidth_bytes_per_s, for one round of a ring of `world_size` ranks on this machine.

    error: root mean square of the relative errors of the line; 0.1 says that it misses a sample by about 10 %.
    samples: the (bytes, seconds) it was fitted to.
    """

    world_size: int
    latency_s: float
    bandwidth_bytes_per_s: float
    error: float
    samples: tuple[tuple[int, float], ...]

    def seconds(self, size: float) -> float:
        """Predicted seconds of one round with messages of `size` bytes."""
        return self.latency_s + size / self.bandwidth_bytes_per_s


def fit_link(world_size: int, samples: Sequence[tuple[int, float]]) -> LinkFit:
    """Weighted least squares with weights 1/t^2: relative errors count alike, so small messages fix alpha.

    Raises ValueError for fewer than two sizes, times that are not positive, or times that do not grow with size.
    """
    if len({size for size, _ in samples}) < 2 or any(seconds <= 0 for _, seconds in samples):
        raise ValueError(f"{len(samples)} samples of {world_size} ranks: a line needs two sizes and times above zero")
    weights = [1 / seconds**2 for _, seconds in samples]
    total = sum(weights)
    mean_size = sum(w * size for w, (size, _) in zip(weights, samples, strict=True)) / total
    mean_time = sum(w * seconds for w, (_, seconds) in zip(weights, samples, strict=True)) / total
    spread = sum(w * (size - mean_size) ** 2 for w, (size, _) in zip(weights, samples, strict=True))
    both = sum(w * (size - mean_size) * (t - mean_time) for w, (size, t) in zip(weights, samples, strict=True))
    slope = both / spread
    if slope <= 0:
        raise ValueError(f"times of {world_size} ranks do not grow with size, so no bandwidth fits; measure again")
    latency = max(0.0, mean_time - slope * mean_size)
    errors = [(latency + slope * size) / seconds - 1 for size, seconds in samples]
    error = math.sqrt(sum(e * e for e in errors) / len(errors))
    return LinkFit(world_size, latency, 1 / slope, error, tuple((int(size), float(t)) for size, t in samples))


def matmul_flops(dtype: str = "float32", threads: int = 1, sizes: Sequence[int] = (512, 1024)) -> float:
    """Best FLOP/s of square matmuls on the CPU; `dtype` is torch's name, `sizes` their edges."""
    import torch

    best = 0.0
    with _threads(threads):
        for n in sizes:
            a, b = (torch.randn(n, n).to(getattr(torch, dtype)) for _ in range(2))
            out = torch.empty_like(a)
            best = max(best, 2 * n**3 / _best_seconds(lambda a=a, b=b, out=out: torch.mm(a, b, out=out)))
    return best


def memory_bandwidth(threads: int, size: int = 128 * 2**20) -> float:
    """Best bytes/s of the triad a = b + s * c over three arrays of `size` bytes: two are read, one is written."""
    import torch

    with _threads(threads):
        a, b, c = (torch.ones(size // 4) for _ in range(3))
        return 3 * a.nbytes / _best_seconds(lambda: torch.add(b, c, alpha=0.5, out=a))


def gpu_matmul_flops(dtype: str, n: int) -> float:
    """Best FLOP/s of [n, n] @ [n, n] on the current GPU; fp32 without TF32, PyTorch's default."""
    import torch

    a, b = (torch.randn(n, n, device="cuda").to(getattr(torch, dtype)) for _ in range(2))
    return 2 * n**3 / _best_seconds(lambda: torch.mm(a, b), torch.cuda.synchronize)


def gpu_memory_bandwidth(size: int) -> float:
    """Best bytes/s of a copy of `size` bytes inside the current GPU's memory: read once, written once."""
    import torch

    a = torch.ones(size // 4, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.nbytes / _best_seconds(lambda: b.copy_(a), torch.cuda.synchronize)


def _best_seconds(
    work: Callable[[], object], finish: Callable[[], object] = lambda: None, budget_s: float = 0.3
) -> float:
    """Shortest of 3 to 30 runs of `work` after one to warm up, within about `budget_s`."""
    work()
    finish()
    seconds, deadline = [], time.perf_counter() + budget_s
    while len(seconds) < 3 or (len(seconds) < 30 and time.perf_counter() < deadline):
        start = time.perf_counter()
        work()
        finish()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
