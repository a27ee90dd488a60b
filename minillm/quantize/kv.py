"""Keys and values in 8 bits: which formats there are, and what they cost without an engine around them.

The engine's cache is `minillm/model/paged/quantized.py`; `LLM(model, kv_dtype="int8")` switches it on.
"""

import torch
from torch import Tensor

from minillm.model.attention.causal import sdpa
from minillm.quantize.formats import Float8, Format, Int

# A scale in float32 costs 4 of head_dim + 4 bytes; with it int8 is off by half a step at most, to float32's rounding.
KV_FORMATS: dict[str, Format] = {"int8": Int(scale_dtype=torch.float32), "fp8": Float8(scale_dtype=torch.float32)}


def kv_format_named(kv_dtype: str | None, backend: object = None) -> Format | None:
    """None = keys and values as the model computes them. ValueError for a name that is unknown, and for a backend that
    reads no codes."""
    if kv_dtype is None:
        return None
    if not isinstance(kv_dtype, str) or kv_dtype not in KV_FORMATS:
        raise ValueError(f"kv_dtype {kv_dtype!r} is unknown: use {', '.join(map(repr, KV_FORMATS))} or None.")
    if not getattr(backend, "reads_codes", True):
        raise ValueError(f"kv_dtype {kv_dtype!r}: {type(backend).__name__} reads no codes, leave kv_dtype or it out.")
    return KV_FORMATS[kv_dtype]


def rounded_rows(format: Format, rows: Tensor) -> Tensor:
    """Each row [..., size] as a cache of this format gives it back."""
    codes, scale = format.encode_rows(rows.to(torch.promote_types(rows.dtype, torch.float32)))
    return format.decode_rows(codes, scale).to(rows.dtype)


class RoundedKeysAndValues:
    """`model(tokens, attention=RoundedKeysAndValues(format))`: the logits that an engine with such a cache computes."""

    def __init__(self, format: Format):
        self.format = format

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        return sdpa(q, rounded_rows(self.format, k), rounded_rows(self.format, v), **options)
