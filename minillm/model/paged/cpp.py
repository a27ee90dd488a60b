"""Paged attention on a CPU by a C++ kernel, `decode.cpp`, which reads keys where they lie. The default there.

The compiler makes it for this processor once; it is kept in the cache folder (`minillm/model/compiler.py`). What it is
not made for is left to `gathered`: pieces of prompts, where copying keys together is little beside the products;
caches in 8 bits, models in other dtypes than float32, capped scores; and everything where there is no compiler.
"""

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minillm.model.attention.causal import Attend
from minillm.model.compiler import shared_library
from minillm.model.paged.gather import GatheredDecode, gathered

SOURCE = Path(__file__).with_name("decode.cpp")
DTYPE = torch.float32  # of what the kernel takes
FEW = 4  # queries of a sequence up to which each reads its keys for itself
UNLIMITED = 1 << 62  # a window


class CppDecode:
    """A backend of `paged_attention`, shapes as there. ValueError where the kernel cannot be compiled."""

    def __call__(self, q, k_pool, v_pool, block_table, query_lens, context_lens, **options) -> Tensor:
        return self.prepare(q, k_pool, block_table, query_lens, context_lens, **options)(q, k_pool, v_pool)

    def prepare(
        self, q, k_pool, block_table, query_lens, context_lens, *, window: int | None, soft_cap: float | None = None
    ) -> Attend:
        lens, contexts = np.array(query_lens), np.array(context_lens)
        rest = np.flatnonzero(lens > FEW)
        if not takes(q, k_pool, soft_cap) or len(rest) == len(lens):
            options = {"window": window, "soft_cap": soft_cap}
            return gathered.prepare(q, k_pool, block_table, query_lens, context_lens, **options)
        row_of = np.arange(len(lens)).repeat(lens)
        tokens = np.arange(len(row_of))
        keys = tokens + (contexts - lens.cumsum())[row_of] + 1
        few = lens[row_of] <= FEW
        work = torch.from_numpy(np.stack((tokens, row_of, keys))[:, few])
        mine = _Decode.of(q, k_pool, block_table, work, window)
        if not len(rest):
            return mine
        of_rest = torch.from_numpy(tokens[~few])
        sizes = (block_table[torch.from_numpy(rest)], lens[rest].tolist(), contexts[rest].tolist())
        others = gathered.prepare(q.index_select(0, of_rest), k_pool, *sizes, window=window)

        def attend(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
            return mine(q, k_pool, v_pool).index_copy_(0, of_rest, others(q.index_select(0, of_rest), k_pool, v_pool))

        return attend

    def fixed(self, size: int, kv_heads: int, device: torch.device) -> GatheredDecode:
        """Replays are for GPUs; on a CPU they only serve tests, which record torch's operations."""
        return gathered.fixed(size, kv_heads, device)


def takes(q: Tensor, k_pool: object, soft_cap: float | None) -> bool:
    """Whether the kernel computes this; the rest is for `gathered`."""
    alike = isinstance(k_pool, Tensor) and k_pool.dtype == q.dtype == DTYPE and q.device.type == "cpu"
    return alike and soft_cap is None and k_pool.is_contiguous()


def missing() -> str:
    """Why the kernel cannot be used here, in one sentence; "" = it can."""
    return made if isinstance(made := _library(), str) else ""


class _Step(ctypes.Structure):
    """What a pass's layers have in common, as in `decode.cpp`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tables", "work")),
        *((name, ctypes.c_int64) for name in ("items", "kv_heads", "group", "head_dim", "block_size", "table_width")),
        *((name, ctypes.c_int64) for name in ("window", "threads")),
    ]


@dataclass(frozen=True)
class _Decode:
    """What a layer does. work: [3, items], int64: the place of each query in the flat row, its row of the tables, its
    keys. read: the tensors whose memory `step` names."""

    kernel: ctypes._CFuncPtr
    step: _Step
    read: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, q: Tensor, k_pool: Tensor, tables: Tensor, work: Tensor, window: int | None) -> "_Decode":
        if isinstance(library := _library(), str):
            raise ValueError(f"{library} Or use backend=gathered.")
        tables, work = tables.contiguous(), work.contiguous()
        (_, block_size, kv_heads, head_dim), heads = k_pool.shape, q.shape[1]
        sizes = (work.shape[1], kv_heads, heads // kv_heads, head_dim, block_size, tables.shape[1])
        limits = (UNLIMITED if window is None else window, torch.get_num_threads())
        step = _Step(tables.data_ptr(), work.data_ptr(), *sizes, *limits)
        return cls(library.paged_decode, step, (tables, work))

    def __call__(self, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        q = q.contiguous()
        if not k_pool.is_contiguous() or not v_pool.is_contiguous() or not q.dtype == k_pool.dtype == v_pool.dtype:
            raise ValueError(
                f"k_pool is {k_pool.dtype} with strides {k_pool.stride()}, v_pool {v_pool.dtype} with "
                f"{v_pool.stride()}: cpp_decode wants both {q.dtype} and contiguous."
            )
        y = torch.empty_like(q)
        pointers = (each.data_ptr() for each in (q, k_pool, v_pool, y))
        self.kernel(*map(ctypes.c_void_p, pointers), ctypes.byref(self.step))
        return y


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The compiled kernel, or why there is none."""
    try:
        return shared_library(SOURCE)
    except ValueError as failure:
        return str(failure)


cpp_decode = CppDecode()
