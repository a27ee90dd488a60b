"""Ring attention: every rank keeps its queries while keys and values go round (Liu, Zaharia and Abbeel 2023).

    step 0   q0·k0  q1·k1  q2·k2  q3·k3      each rank attends to the block it holds, meanwhile sends it
    step 1   q0·k3  q1·k0  q2·k1  q3·k2      to the right and receives the next one from the left; partial
    step 2   q0·k2  q1·k3  q2·k0  q3·k1      outputs are merged by their log-sum-exps (`model.attention.blocks`)
    step 3   q0·k1  q1·k2  q2·k3  q3·k0

Forward sends K and V N - 1 times. Backward goes round once more: the gradient of a block travels with it, one step
behind, gathers every rank's share and arrives at its owner after N steps. A received block goes into memory of its own:
a buffer that is used again while the backward of a step still needs it gives right outputs and wrong gradients.
"""

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from minillm.comm import Group
from minillm.measure import span
from minillm.model.attention.blocks import Block, attention_block
from minillm.model.attention.tiled import TILE, row_products
from minillm.parallel.context_parallel.order import ContextAttention, local_numbers


class RingAttention(ContextAttention):
    """An attention function for this rank's positions. q, k, v: [batch, heads or kv_heads, seq / world_size, head_dim].

    order, segments: see `ContextAttention`. tile: see `model.attention.tiled`. overlap: send while computing.
    pace: seconds that the work on a block should last at least; what is left after computing is slept. It *emulates*
        devices that compute at that speed, as in `Pipeline`. A ledger gets a span for each block ("block 3").
    """

    def __init__(
        self,
        group: Group,
        order: str = "zigzag",
        *,
        tile: int = TILE,
        overlap: bool = True,
        segments: Tensor | None = None,
        pace: float = 0.0,
    ) -> None:
        super().__init__(group, order, segments)
        self.tile, self.overlap, self.pace = tile, overlap, pace
        self._blocks: dict[tuple, Block] = {}  # of one document

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, window: int | None, segments: Tensor | None
    ) -> Tensor:
        return _Ring.apply(q, k, v, self, window, segments)

    def block(self, q: Tensor, k: Tensor, window: int | None, segments: Tensor | None, source: int) -> Block:
        """Attention of this rank's queries to the keys of rank `source`. segments: of the whole sequence."""
        n, key = self.group.world_size, (source, len(q), q.shape[2], window, q.dtype, q.device)
        if key not in self._blocks:
            ranks = self.group.rank, source
            places = (local_numbers(n * q.shape[2], rank, n, self.order) for rank in ranks)
            self._blocks[key] = attention_block(q, k, *places, window, self.tile)
        block = self._blocks[key]
        return block if segments is None else block.within(segments)

    @contextlib.contextmanager
    def working(self, source: int) -> Iterator[None]:
        """A context for the work on the block of rank `source`."""
        with span(f"block {source}"):
            start = time.monotonic()
            yield
            if self.pace:
                time.sleep(max(0.0, start + self.pace - time.monotonic()))

    def pass_on(self, block: Tensor):
        """Starts sending a block to the right and receiving one from the left. Returns (the new block, its Work)."""
        group, arriving = self.group, torch.empty_like(block)
        right, left = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
        work = group.exchange(send=(block, right), recv=(arriving, left), async_op=True)
        if not self.overlap:
            work.wait()
        return arriving, work


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, ring, window, segments):
        n, rank = ring.group.world_size, ring.group.rank
        q, block = q.contiguous(), torch.stack((k, v))  # which travel as one message
        found = None
        for step in range(n):
            arriving, work = ring.pass_on(block) if step < n - 1 else (None, None)
            source = (rank - step) % n
            with ring.working(source):
                attention = ring.block(q, block[0], window, segments, source)
                if found is None or attention.is_seen:
                    found = attention.forward(q, *block, found)
            if work:
                work.wait()
                block = arriving
        out, lse = found[0].to(q.dtype), found[1]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring, ctx.window, ctx.segments = ring, window, segments
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, v, out, lse = ctx.saved_tensors
        d_out = d_out.contiguous()
        ring, n, rank = ctx.ring, ctx.ring.group.world_size, ctx.ring.group.rank
        exact = torch.promote_types(k.dtype, torch.float32)
        delta, dq = row_products(d_out, out), torch.zeros_like(q, dtype=exact)
        block, block_gradient, gradient_work = torch.stack((k, v)), None, None
        for step in range(n):
            arriving, work = ring.pass_on(block) if step < n - 1 else (None, None)
            source, share = (rank - step) % n, torch.empty_like(block, dtype=exact)
            with ring.working(source):
                attention = ring.block(q, block[0], ctx.window, ctx.segments, source)
                if attention.is_seen:
                    attention.backward(q, *block, lse, d_out, delta, dq, *share)
                else:
                    share.zero_()
            if gradient_work:  # what the ranks before this one have added to this block's gradient
                gradient_work.wait()
                share += block_gradient
            block_gradient, gradient_work = ring.pass_on(share) if n > 1 else (share, None)
            if work:
                work.wait()
                block = arriving
        if gradient_work:
            gradient_work.wait()
        dk, dv = block_gradient.to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None
