"""What an attention backend is, and which one an engine takes. The package's docstring lists them."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from minillm.model.attention.causal import Attend
from minillm.model.paged import cpp
from minillm.model.paged.gather import gathered


class Backend(Protocol):
    """Attention of a whole batch, its shapes as in `paged_attention`, which has checked them.

    What is the same in all layers can be done once a pass: a backend with a method
    `prepare(q, k_pool, block_table, query_lens, context_lens, *, window) -> Attend` is asked for that instead.
    soft_cap (see `dense`) is only handed over if the model has one.
    One that has a method `fixed(size, kv_heads, device) -> FixedDecode` can be replayed as a CUDA graph.
    """

    def __call__(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        block_table: Tensor,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        *,
        window: int | None,
        soft_cap: float | None = None,
    ) -> Tensor: ...


class FixedDecode(Protocol):
    """Attention of always equally many sequences with one query each, which takes every length from device memory.

    plan_size: how many whole numbers a step's plan has.
    """

    plan_size: int

    def plan(self, rows: np.ndarray, context_lens: np.ndarray) -> np.ndarray:
        """[plan_size], int64. rows: each sequence's row of the tables; context_lens: its keys, the new one too."""

    def prepare(
        self, q: Tensor, k_pool: Tensor, tables: Tensor, plan: Tensor, *, window: int | None, **options
    ) -> Attend:
        """What a layer does. tables: [rows, blocks], of all sequences. plan: what `plan` returned, on the device: only
        what is computed from it there may differ from step to step."""


def default_backend(device: torch.device, dtype: torch.dtype = torch.float32) -> Backend:
    """On a CUDA GPU the Triton kernel, where triton is installed; on a CPU the C++ kernel, where there is a compiler;
    each if it takes this dtype. Else `gathered`."""
    if torch.device(device).type == "cuda" and find_spec("triton") is not None:
        from minillm.model.kernels import DTYPES
        from minillm.model.paged.triton import triton_split_kv

        if dtype in DTYPES:
            return triton_split_kv
    if torch.device(device).type == "cpu" and dtype is cpp.DTYPE and not cpp.missing():
        return cpp.cpp_decode
    return gathered
