"""What lies between the products of a layer. An engine replaces it on a GPU (`elementwise_triton.py`)."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from minillm.model.rope import rotate

FUNCTIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


def rotate_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The queries and the keys of a layer, turned."""
    return rotate(q, cos, sin), rotate(k, cos, sin)


def gated(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """What goes into an MLP's last product."""
    return activation(gate) * up
