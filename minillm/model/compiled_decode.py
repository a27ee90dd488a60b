"""Decoding where each pass of one token is one compiled function: `generate(..., compiled=True)`.

In a small model such a pass is mostly Python between small operations, and a compiler takes both out. It can do that
once for all tokens only if no number of the host changes from one to the next, so this cache has the same shapes in
every pass: each reads all places, and a mask leaves those that have been filled.

    pass of token 5    keys │k0 k1 k2 k3 k4 k5│ 0  0  0 …        KVCache: the first 6, another shape each time
                       mask │ ✓  ✓  ✓  ✓  ✓  ✓  ✗  ✗  ✗ …        FixedCache: all of them, and a mask

The first pass of a shape takes as long as the compiler does, half a minute for a small model; it pays where much is
decoded, and the more so the less of a step is reading weights (gpt-fast, https://github.com/meta-pytorch/gpt-fast).
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from minillm.model.attention.causal import AttentionFunction, sdpa
from minillm.model.compiler import check_compiler
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer

SHORTEST = 64  # places; longer caches have a power of two, so that few shapes are compiled


class FixedCache:
    """An attention function like `KVCache`, of one sequence, with room for at least `length` tokens."""

    def __init__(self, config: ModelConfig, length: int, *, device=None, dtype: torch.dtype | None = None):
        places = max(SHORTEST, 1 << (length - 1).bit_length())
        shape = (1, config.num_kv_heads, places, config.head_dim)
        self._places = torch.arange(places, device=device)
        self._of_layers = [  # zeros: a masked value is multiplied by 0, which only leaves 0 if it is finite
            tuple(torch.zeros(shape, device=device, dtype=dtype) for _ in range(2)) for _ in range(config.num_layers)
        ]

    def begin(self, positions: Tensor, start: int) -> None:
        """A pass reads its positions on the device."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, positions: Tensor, window: int | None, **options
    ) -> Tensor:
        keys, values = self._of_layers[layer]
        keys.index_copy_(2, positions, k)
        values.index_copy_(2, positions, v)
        place = {"positions": positions, "key_positions": self._places}
        return sdpa(q, keys, values, layer=layer, window=window, **place, **options)


def next_logits(model: Transformer, tokens: Tensor, positions: Tensor, cache: AttentionFunction) -> Tensor:
    """[vocab_size], float32: of the token behind the last."""
    return model(tokens, positions, attention=cache)[0, -1].float()


def compiled_next_logits(device: torch.device) -> Callable[..., Tensor]:
    """`next_logits`, compiled. ValueError if there is no compiler for this device."""
    check_compiler(device)
    return _compiled()


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(next_logits, dynamic=False)
