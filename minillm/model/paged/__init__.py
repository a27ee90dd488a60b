"""Attention over keys and values that lie in blocks. Reading path:

    cache.py     the blocks of all layers, and the attention function of one forward pass over a flat batch
    tables.py    block tables that stay from step to step: only what changes goes to the device
    backend.py   what a backend is, and which one is taken where
    gather.py    keys are copied together for torch's kernel; takes everything, the default where no kernel does
    loop.py      block by block with a running softmax: the reference that a kernel is compared with

On a CPU, in place of gather.py:

    cpp.py         when the C++ kernel is taken; the default where there is a compiler
    decode.cpp     the kernel, which reads keys where they lie

On a GPU, in place of gather.py:

    split.py       how the programs of a kernel share a step's queries and keys
    triton.py      the kernel, which reads keys where they lie; the default
    flashinfer.py  FlashInfer's kernels, where that package is installed

Where some layers have a sliding window and others see everything, by_window.py lets each attend in blocks of its kind.

A quantized cache, with keys and values in 8 bits: quantized.py says what lies in the blocks and how it is written and
read, cache.py allocates it, gather.py and triton.py read it, ../../quantize/kv.py names the formats.
"""

from minillm.model.paged.backend import Backend, default_backend
from minillm.model.paged.cache import PagedAttention, PagedBatch, PagedCache, paged_attention
from minillm.model.paged.gather import Gathered, gathered
from minillm.model.paged.loop import block_by_block

__all__ = [
    "Backend",
    "Gathered",
    "PagedAttention",
    "PagedBatch",
    "PagedCache",
    "block_by_block",
    "default_backend",
    "gathered",
    "paged_attention",
]
