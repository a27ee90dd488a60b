"""Paged attention by FlashInfer (Ye et al. 2025), if `flashinfer-python` is installed: its kernels, our blocks.

    LLM(model, backend=FlashInfer())

Its plan wants the blocks of all sequences in one row, with the place where each sequence begins; it is made once a pass
for all layers that are alike. https://docs.flashinfer.ai/api/attention.html
"""

from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from minillm.model.attention.causal import Attend
from minillm.model.paged.tables import to_device

WORKSPACE_BYTES = 128 << 20  # what its documentation recommends; all layers share it
TENSOR_CORE_GROUP = 4  # query heads of a key head from which its decoding is faster on tensor cores
DTYPES = (torch.float16, torch.bfloat16)


class FlashInfer:
    """A backend of `paged_attention`, shapes as there. ValueError without the package, and for other dtypes."""

    reads_codes = False  # of a `QuantizedPool`
    workspace_bytes = WORKSPACE_BYTES  # that it allocates in its first pass

    def __init__(self):
        if find_spec("flashinfer") is None:
            raise ValueError(
                "FlashInfer needs the package flashinfer: `pip install flashinfer-python`, or leave backend out."
            )
        self._workspace: Tensor | None = None
        self._wrappers: dict[tuple, object] = {}  # each keeps one plan, so one for each kind of layer
        self._copied: dict[tuple, torch.cuda.Event] = {}  # when the last plan of each has left the host

    def __call__(self, q, k_pool, v_pool, block_table, query_lens, context_lens, **options) -> Tensor:
        return self.prepare(q, k_pool, block_table, query_lens, context_lens, **options)(q, k_pool, v_pool)

    def prepare(
        self,
        q: Tensor,
        k_pool: Tensor,
        block_table: Tensor,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        *,
        window: int | None,
        soft_cap: float | None = None,
    ) -> Attend:
        if q.dtype not in DTYPES or k_pool.dtype != q.dtype:
            raise ValueError(
                f"queries of {q.dtype} and keys of {k_pool.dtype}: FlashInfer takes float16 or bfloat16 for both; "
                "load the model with one of them, or leave backend out."
            )
        block_size, kv_heads, head_dim = k_pool.shape[1:]
        contexts = np.array(context_lens)
        counts = -(-contexts // block_size)
        ends = counts.cumsum()
        sequence = np.arange(len(counts)).repeat(counts)
        column = np.arange(len(sequence)) - (ends - counts)[sequence]
        [places] = to_device([sequence * block_table.shape[1] + column], q.device)
        decodes = max(query_lens) == 1
        kind = (window, soft_cap, decodes, q.shape[1] // kv_heads)
        wrapper = self._wrapper(q.device, *kind)
        if kind in self._copied:  # a plan is copied from one pinned buffer, which the next plan overwrites
            self._copied[kind].synchronize()
        sizes = (  # what it reads on the host is given there: it would fetch it from the GPU and wait
            _starts(counts),
            block_table.flatten()[places].int(),
            torch.tensor(contexts - (counts - 1) * block_size, dtype=torch.int32),
            q.shape[1],
            kv_heads,
            head_dim,
            block_size,
        )
        options = {"window_left": -1 if window is None else window - 1, "logits_soft_cap": soft_cap}
        options |= {"q_data_type": q.dtype, "kv_data_type": q.dtype}
        if decodes:
            wrapper.plan(*sizes, **options)
        else:
            wrapper.plan(_starts(query_lens), *sizes, causal=True, **options)
        if q.is_cuda:
            self._copied[kind] = recorded_event()
        return lambda q, k_pool, v_pool: wrapper.run(q, (k_pool, v_pool))

    def _wrapper(self, device: torch.device, *kind):
        """A kernel of its own for steps of single tokens. fa2: on a Hopper GPU "auto" takes fa3, which mini-sglang
        found slower (https://github.com/sgl-project/mini-sglang)."""
        import flashinfer

        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        if kind not in self._wrappers:
            *_, decodes, group = kind
            if decodes:
                options = {"use_tensor_cores": group >= TENSOR_CORE_GROUP, "backend": "fa2"}
                wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD", **options)
            else:
                wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="fa2")
            self._wrappers[kind] = wrapper
        return self._wrappers[kind]


def recorded_event() -> torch.cuda.Event:
    """It is over once all that was launched on the current stream so far is."""
    event = torch.cuda.Event()
    event.record()
    return event


def _starts(counts: Sequence[int]) -> Tensor:
    """[n + 1], int32, on the host: where each sequence begins, and the end of the last."""
    return torch.tensor([0, *np.cumsum(counts).tolist()], dtype=torch.int32)
