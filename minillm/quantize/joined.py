"""Layers that share an input, multiplied in one call: query, key and value; gate and up.

    codes of q, k and v, [out, in] each   ->   one tensor, of which each layer's codes are a part: none is kept twice

Where one sequence is decoded, a product of a small model takes less time than the call for it: 24 calls instead of 42
for six layers, and the inputs are rounded to bfloat16 once. Results are the same to the bit.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from minillm.model.transformer import Transformer, apply_linears
from minillm.quantize import kernels
from minillm.quantize.linear import QuantizedLinear


def join_layers(model: Transformer) -> None:
    """In place, for the attention and the MLP of every block; layers that cannot be joined stay apart."""
    for module in model.modules():
        if getattr(module, "linears", None) is apply_linears:
            module.linears = JoinedLinears()


class JoinedLinears:
    """Takes the place of `apply_linears`. What it has joined is made anew when a layer has changed: it was moved, has
    loaded other codes, or multiplies by another kernel. Layers that somebody watches by hooks are called one by one."""

    def __init__(self):
        self._made_of: list[Callable | None] = []
        self._multiply: Callable[[Tensor], Tensor] | None = None  # None: the layers stay apart
        self._sizes: list[int] = []

    def __call__(self, x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling():  # a compiled pass has no calls to save, and rounds its inputs once
            return apply_linears(x, *layers)
        if [getattr(layer, "multiply", None) for layer in layers] != self._made_of:
            self._join(layers)
        watched = [layer for layer in layers if layer._forward_hooks or layer._forward_pre_hooks]
        if self._multiply is None or watched or (x.requires_grad and torch.is_grad_enabled()):
            return apply_linears(x, *layers)
        y = self._multiply(x.reshape(-1, x.shape[-1]))
        parts = y.view(*x.shape[:-1], y.shape[-1]).split_with_sizes(self._sizes, dim=-1)
        if layers[0].bias is None:
            return parts
        return tuple(part + layer.bias.to(part.dtype) for part, layer in zip(parts, layers, strict=True))

    @torch.inference_mode(False)
    def _join(self, layers: tuple[nn.Module, ...]) -> None:
        self._multiply = None
        if can_be_joined(layers):
            self._sizes = [layer.out_features for layer in layers]
            codes = torch.cat([layer.codes for layer in layers])
            for layer, (start, end) in zip(layers, pairwise(accumulate(self._sizes, initial=0)), strict=True):
                layer.set_codes(codes[start:end])
            if layers[0].kernel == kernels.INT8:
                scale = torch.cat([layer.scale[:, 0] for layer in layers]).bfloat16()
                self._multiply = partial(kernels.multiply_int8, codes=codes, scale=scale)
            else:
                given = {"packed": codes, "group": layers[0].format.group}
                given["scales_and_zeros"] = torch.cat([layer.scales_and_zeros for layer in layers], dim=1)
                self._multiply = partial(kernels.multiply_int4, **given)
        self._made_of = [getattr(layer, "multiply", None) for layer in layers]


def can_be_joined(layers: tuple[nn.Module, ...]) -> bool:
    """Whether all multiply by the same of torch's packed kernels, and each has whole blocks of its layout."""
    if not all(type(layer) is QuantizedLinear for layer in layers):
        return False
    alike = {(layer.kernel, layer.format, layer.bias is None, layer.codes.device) for layer in layers}
    if len(alike) > 1 or layers[0].kernel not in (kernels.INT8, kernels.INT4):
        return False
    return layers[0].kernel == kernels.INT8 or all(layer.out_features % kernels.INT4_BLOCK == 0 for layer in layers)
