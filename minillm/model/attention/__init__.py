"""Attention as a function the model is given. Reading path:

causal.py         the signature; softmax(q kᵀ) v by torch's fused kernel and by two matrix products; the mask
tiled.py          the same tile by tile with a running softmax (FlashAttention), forward and backward, on any device
tiled_triton.py   the tiles as Triton kernels, for a GPU: how they are called
tiled_kernels.py  these kernels

Aside: blocks.py, either of the two for one block of keys at a time, which may have come from another rank.
"""

from minillm.model.attention.causal import Attend, AttentionFunction, as_autocast, dense, sdpa, visible

__all__ = ["Attend", "AttentionFunction", "as_autocast", "dense", "sdpa", "visible"]
