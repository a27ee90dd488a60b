"""Keys and values in 8 bits: a code for each number, and a scale for each token and kv head.

    as they are    [num_blocks, block_size, kv_heads, head_dim]                 2 or 4 bytes a number
    codes, scale   the same, 1 byte a number; [num_blocks, block_size, kv_heads], float32

Each key and value is rounded once, when it is written, by itself: what a query reads of it depends neither on its
neighbours, nor on the step or the piece of a prompt that wrote it, nor on who reads it. A scale for a whole block would
not do: the next token may need a larger one, and then every code of the block would have to change.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class RowFormat(Protocol):
    """How rows become codes. `minillm.quantize.kv.KV_FORMATS` has the two of 8 bits."""

    code_dtype: torch.dtype
    scale_dtype: torch.dtype

    def encode_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]: ...
    def decode_rows(self, codes: Tensor, scale: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class QuantizedPool:
    """The keys or the values of a layer, where a backend otherwise gets a tensor; `read_rows` reads either.

    codes: [num_blocks, block_size, kv_heads, head_dim]. scale: [num_blocks, block_size, kv_heads].
    """

    codes: Tensor
    scale: Tensor
    format: RowFormat

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def dtype(self) -> torch.dtype:
        return self.codes.dtype


def write_rows(pool: Tensor | QuantizedPool, slots: Tensor, rows: Tensor) -> None:
    """Puts rows [tokens, kv_heads, head_dim] into slots [tokens], rounded if the pool is quantized."""
    if isinstance(pool, Tensor):
        pool.flatten(0, 1).index_copy_(0, slots, rows)
        return
    codes, scale = pool.format.encode_rows(rows.to(torch.promote_types(rows.dtype, torch.float32)))
    pool.codes.flatten(0, 1)[slots] = codes
    pool.scale.flatten(0, 1)[slots] = scale.to(pool.scale.dtype)


def read_rows(pool: Tensor | QuantizedPool, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """[slots, kv_heads, head_dim], a copy of what lies in these slots."""
    if isinstance(pool, Tensor):
        return pool.flatten(0, 1).index_select(0, slots).to(dtype)
    codes, scale = (each.flatten(0, 1).index_select(0, slots) for each in (pool.codes, pool.scale))
    return pool.format.decode_rows(codes, scale.to(torch.promote_types(dtype, torch.float32))).to(dtype)
