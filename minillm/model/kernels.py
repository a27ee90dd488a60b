"""What every Triton kernel of the model needs: triton itself if it is installed, and which inputs a kernel takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # comes with torch for CUDA on Linux; the CPU's torch is without
    triton = tl = None

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UNLIMITED = (1 << 31) - 1  # the window of a model that has none
TILE_BYTES = 16 << 10  # of queries, of keys and of values: what a program keeps close to its compute unit


def kernel(*varying: str) -> Callable[[Callable], Callable]:
    """triton.jit. Arguments named in `varying` change from call to call, so Triton does not specialise the kernel on
    them."""
    return (lambda function: function) if triton is None else partial(triton.jit, do_not_specialize=varying)


def factors(dtype: torch.dtype):
    """What tl.dot multiplies: the inputs as they are. The interpreter takes bfloat16 for integers (triton#11584)."""
    if dtype is torch.bfloat16 and triton.knobs.runtime.interpret:
        return tl.float32
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def has_kernel(x: Tensor) -> bool:
    """Whether kernels run here and take this tensor: on a GPU, or in Triton's interpreter, and not in float64."""
    return triton is not None and x.dtype in DTYPES and (x.is_cuda or triton.knobs.runtime.interpret)


def check_kernel(name: str, instead: str, **inputs: Tensor) -> None:
    """ValueError if the kernel `name` cannot run here, or not on these inputs. instead: what the message recommends."""
    first = next(iter(inputs.values()))
    if triton is None:
        raise ValueError(f"{name} needs the package triton: `pip install triton`, or use {instead}.")
    if not (first.is_cuda or triton.knobs.runtime.interpret):
        raise ValueError(
            f"{name} runs on a CUDA GPU, not on {first.device}: use {instead}, or set TRITON_INTERPRET=1 before Python "
            "starts to run it in Triton's interpreter."
        )
    if first.dtype not in DTYPES or any(each.dtype != first.dtype for each in inputs.values()):
        found = " and ".join(f"{what} of {each.dtype}" for what, each in inputs.items())
        raise ValueError(f"{found}: {name} takes float32, bfloat16 or float16 for all; use {instead} for others.")
