"""Layers that share an input as one product: query, key and value, and a SwiGLU's gate and up.

    q_proj.weight ┐                          one [q + k + v, hidden] matrix; the layers' own parameters become views of
    k_proj.weight ├── rows of one matrix     it, so names, values and memory stay as they are, and so does what is saved
    v_proj.weight ┘

At small batches a GPU is done with such a product before the next one is launched: three launches become one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.model import Transformer
from minillm.model.transformer import apply_linears


@torch.no_grad()
def fuse(model: Transformer) -> int:
    """Fuses what can be; returns how many groups. For inference: an optimizer made before would miss its parameters.

    Left alone are layers that are split over ranks, quantized, adapted or shared: anything but a plain `nn.Linear`.
    """
    count = 0
    for block in model.blocks:
        mlp = getattr(block.mlp, "shared", block.mlp)  # experts hold gate and up as one matrix as it is
        for part, names in ((block.attention, ("q_proj", "k_proj", "v_proj")), (mlp, ("gate_proj", "up_proj"))):
            layers = [getattr(part, name, None) for name in names]
            if getattr(part, "linears", None) is apply_linears and _alike(layers):
                part.linears = Fused(layers)
                count += 1
    return count


class Fused:
    """An `apply_linears` of these layers alone; of any others, it is `apply_linears` itself."""

    def __init__(self, layers: list[nn.Linear]):
        self.layers, self.sizes = tuple(layers), [layer.out_features for layer in layers]
        self.weight = torch.cat([layer.weight for layer in layers])
        self.bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        for layer, weight in zip(layers, self.weight.split(self.sizes), strict=True):
            layer.weight.data = weight
        if self.bias is not None:
            for layer, bias in zip(layers, self.bias.split(self.sizes), strict=True):
                layer.bias.data = bias

    def __call__(self, x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
        if layers != self.layers or not self._holds():
            return apply_linears(x, *layers)
        return F.linear(x, self.weight, self.bias).split(self.sizes, dim=-1)

    def _holds(self) -> bool:
        """Are the parameters still rows of the matrix? Not after `model.to(...)`, which gives each its own memory."""
        start = self.weight.data_ptr()
        for layer in self.layers:
            if layer.weight.data_ptr() != start or layer.weight.dtype != self.weight.dtype:
                return False
            start += layer.weight.nbytes
        return True


def _alike(layers: list[nn.Module | None]) -> bool:
    if not all(type(layer) is nn.Linear and not layer._forward_hooks for layer in layers):
        return False
    if any(layer.weight.is_meta for layer in layers):
        return False
    kinds = {(layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None) for layer in layers}
    return len(kinds) == 1 and len({layer.weight.data_ptr() for layer in layers}) == len(layers)
