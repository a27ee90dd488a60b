"""Lab 25's arithmetic: a decode step of Llama 3 8B on an H100, by its kernels."""

from minillm.predict import kernels
from minillm.predict.kernels import Kernel
from minillm.predict.planner.architectures import architecture

BANDWIDTH, PEAK = 3.35e12, 989e12  # bytes/s and bf16 FLOP/s (NVIDIA H100 SXM datasheet)
LAYERS, HIDDEN, VOCABULARY = 32, 4096, 128256
LAUNCH_S = 15e-6  # assumed: what an operation costs the host in plain PyTorch, Python and dispatch included
GRAPH_S = 1e-6  # assumed: between two kernels of a recorded graph
PLAIN, FUSED, RECORDED = "plain torch", "fused", "fused and recorded"


def step(batch: int, context: int, fused: bool) -> list[Kernel]:
    """Kernels of a step: the layers and the output head. The few others, once a step, are left out: embedding, last
    norm, angles of the rotation, sampling."""
    layer = kernels.decode_layer(architecture("llama-3-8b"), batch, context, fused=fused)
    head = Kernel("head", 2 * VOCABULARY * HIDDEN, 2 * batch * VOCABULARY, 2 * batch * HIDDEN * VOCABULARY)
    return [*layer * LAYERS, head]


def step_seconds(batch: int, context: int, how: str, launch_s: float = LAUNCH_S) -> float:
    """how: PLAIN, FUSED or RECORDED."""
    cost = GRAPH_S if how == RECORDED else launch_s
    return kernels.step_seconds(step(batch, context, how != PLAIN), BANDWIDTH, PEAK, cost)


def launches(fused: bool) -> int:
    """Of a step."""
    return sum(kernel.launches for kernel in step(1, 1, fused))


def bytes_s(batch: int, context: int, fused: bool) -> float:
    """Seconds of a step if launches cost nothing."""
    return kernels.step_seconds(step(batch, context, fused), BANDWIDTH, PEAK, 0.0)


def first_batch_without_waiting(context: int, fused: bool, launch_s: float = LAUNCH_S) -> int:
    """The smallest batch whose bytes take as long as its launches."""
    host = launches(fused) * launch_s
    low, high = 1, 1 << 20
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if bytes_s(middle, context, fused) >= host else (middle + 1, high)
    return low
