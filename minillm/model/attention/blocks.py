"""Attention over one block of keys at a time, outside of autograd: what a sequence that is cut over ranks needs.

    block = attention_block(q, k, positions, key_positions, window)     made once; positions as numbers, not tensors
    out, lse = block.forward(q, k, v, None)                             the first block
    out, lse = block.forward(q, k, v, (out, lse))                       the next ones, merged with those before
    block.backward(q, k, v, lse, d_out, delta, dq, dk, dv)              dq gets its share added, dk and dv are written

On a GPU a block takes one kernel forward and two backward, whatever its length. Elsewhere, and in float64, it is worked
off in tiles (`tiled.py`), each of which takes some twenty operations.
"""

import copy
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.model.attention.tiled import TILE, Sight, backward_tiles, forward_tiles, merge
from minillm.model.attention.tiled_triton import backward_kernels, forward_kernel, places_of
from minillm.model.kernels import UNLIMITED, has_kernel

Partial = tuple[Tensor, Tensor]  # output and log-sum-exp over the keys so far


class TiledBlock:
    """In tiles, on any device and in any dtype."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        positions: Sequence[int],
        key_positions: Sequence[int],
        window: int | None,
        tile: int,
    ) -> None:
        self.sight = Sight(q, k, positions, key_positions, window, None, None, tile)

    def within(self, segments: Tensor) -> "TiledBlock":
        """The same positions. segments: [batch, seq], the documents of all positions."""
        found = copy.copy(self)
        found.sight = self.sight.within(segments[..., self.sight.positions], segments[..., self.sight.key_positions])
        return found

    @functools.cached_property
    def is_seen(self) -> bool:
        """Whether some query may see some key."""
        return bool(self.sight.seen())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, before: Partial | None) -> Partial:
        found = forward_tiles(q, k, v, self.sight)
        return found if before is None else merge(*before, *found)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, d_out: Tensor, delta: Tensor, *into: Tensor
    ) -> None:
        dq, dk, dv = into
        to_q, to_k, to_v = backward_tiles(q, k, v, lse, d_out, delta, self.sight)
        dq += to_q
        dk.copy_(to_k)
        dv.copy_(to_v)


class KernelBlock:
    """By the Triton kernels. The outputs of several blocks are added up in float32."""

    def __init__(
        self, q: Tensor, k: Tensor, positions: Sequence[int], key_positions: Sequence[int], window: int | None
    ) -> None:
        self.window = UNLIMITED if window is None else window
        self.is_seen = key_positions[0] <= positions[-1] and positions[0] - key_positions[-1] < self.window
        self.positions, self.key_positions = (torch.tensor(each).to(q.device) for each in (positions, key_positions))
        self.places = places_of(q, self.positions, self.key_positions, None, None)

    def within(self, segments: Tensor) -> "KernelBlock":
        found = copy.copy(self)
        documents = (segments[..., each].to(torch.int32) for each in (self.positions, self.key_positions))
        found.places = [*self.places[:2], *(each.expand(len(self.places[0]), -1).contiguous() for each in documents)]
        return found

    def forward(self, q: Tensor, k: Tensor, v: Tensor, before: Partial | None) -> Partial:
        return forward_kernel(q, k, v, self.places, self.window, before, torch.float32)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, d_out: Tensor, delta: Tensor, *into: Tensor
    ) -> None:
        backward_kernels(q, k, v, d_out, lse, delta, *into, self.places, self.window, add_to_dq=True)


Block = TiledBlock | KernelBlock


def attention_block(
    q: Tensor,
    k: Tensor,
    positions: Sequence[int],
    key_positions: Sequence[int],
    window: int | None,
    tile: int = TILE,
) -> Block:
    """For queries and keys of these shapes and at these positions, ascending. tile: of a `TiledBlock`."""
    if has_kernel(q):
        return KernelBlock(q, k, positions, key_positions, window)
    return TiledBlock(q, k, positions, key_positions, window, tile)
