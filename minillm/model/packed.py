"""Weights in the order in which the CPU's matrix kernel reads them, laid out once instead of at every product.

A product with few rows is over before the reordering of its weights has paid: with 16 rows, torch's float32 linear of
[1536, 256] takes twice as long as oneDNN's on weights that were packed before. Layers that share an input become one
product. Costs a second copy of these weights; they are packed again when somebody has changed them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.model.transformer import MLP, Attention, Transformer, each

LEAST = 1 << 17  # weights; smaller products gain nothing
AVAILABLE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def pack(model: Transformer) -> Transformer:
    """Lets forward passes without gradients use packed weights where torch can; layers split over ranks stay theirs."""
    if AVAILABLE:
        for module in model.modules():
            if isinstance(module, Attention | MLP) and module.together is each:
                module.together = _Together()
        if model.head_logits is F.linear:
            model.head_logits = _Packed()
    return model


class _Packed:
    """`F.linear` with the same weights at every call."""

    def __init__(self):
        self._made_of, self._weight, self._bias = None, None, None

    def __call__(self, x: Tensor, *weights: Tensor, bias: tuple[Tensor, ...] = ()) -> Tensor:
        """x: [..., inputs], weights: [outputs, inputs] each -> [..., all outputs]."""
        if not _fits(x, weights):
            return F.linear(
                x, torch.cat(weights) if len(weights) > 1 else weights[0], torch.cat(bias) if bias else None
            )
        made_of = [(part.data_ptr(), part._version) for part in (*weights, *bias)]
        if made_of != self._made_of:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(torch.cat(weights).detach(), None)
            self._bias = torch.cat(bias).detach() if bias else None
            self._made_of = made_of
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")

    def __reduce__(self):  # copies of the model pack their own
        return type(self), ()


class _Together(_Packed):
    """`each` in one product."""

    def __call__(self, x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
        weights = [layer.weight for layer in layers]
        if not all(type(layer) is nn.Linear for layer in layers) or not _fits(x, weights):
            return each(x, *layers)
        bias = tuple(layer.bias for layer in layers if layer.bias is not None)
        if bias and len(bias) < len(layers):
            return each(x, *layers)
        return super().__call__(x, *weights, bias=bias).split([len(weight) for weight in weights], dim=-1)


def _fits(x: Tensor, weights) -> bool:
    plain = not torch.is_grad_enabled() and x.device.type == "cpu" and x.dtype == torch.float32
    return plain and all(w.dtype == x.dtype for w in weights) and sum(w.numel() for w in weights) >= LEAST
