"""ZeRO stages 1 and 2: every rank steps 1/N of the parameters and hands the result round (Rajbhandari et al. 2020).

             gradients of a bucket, N equal parts                      weights of that bucket
    rank 0   [ g | g | g | g ] ─┐                    ┌─> own part ─ AdamW ─> own part ─┐
    rank 1   [ g | g | g | g ] ─┼─ reduce-scatter ───┼─> own part ─ AdamW ─> own part ─┼─ all-gather > [ w | w | w | w ]
    ...                        ─┘    P(N-1)/N bytes  └─> ...                          ─┘   P(N-1)/N bytes

It is the DDP reducer with a reduce-scatter in place of the all-reduce, and a sharded step. Together that is an
all-reduce's traffic, while optimizer state (and master weights) take 1/N. Stage 1 keeps the full gradients; stage 2
frees a bucket as soon as it is reduced, so that gradients at rest take 1/N as well.

    K microbatches   stage 1   gradients add up locally under `no_sync`: one reduce-scatter of P per step
                     stage 2   each is reduced and added to the shard: K of them, and `no_sync` changes nothing (it
                               would need the full gradients that are freed; DeepSpeed forbids it)
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.parallel.data_parallel.replicas import BufferSync, replicate
from minillm.parallel.sharding.offload import Offload
from minillm.parallel.sharding.optimizer import MakeOptimizer, SlicedOptimizer
from minillm.parallel.sharding.placement import FlatShard, Placement
from minillm.parallel.sharding.slices import ShardSettings, slice_of
from minillm.parallel.zero.reducer import ScatterReducer


class ZeroOptimizer(SlicedOptimizer):
    """A torch optimizer over this rank's shard of the module's parameters. Gradients are averaged over the group.

        optimizer = ZeroOptimizer(model, group, stage=2, make=lambda named: adamw(named, config))
        loss.backward()                            # reduces
        norm = optimizer.clip_grad_norm_(1.0)      # of the whole gradient: the same on every rank,
        if norm.isfinite():                        # so every rank decides alike
            optimizer.step()                       # uses the gradients up
        optimizer.zero_grad()

    make(named): builds an optimizer that works element by element, from (name, parameter) pairs: all parameters, in
        order, each as the 1-D slice of it in this rank's shard, maybe empty; `.whole_shape` is the parameter's own.
    The module's weights move into flat memory and stay there: move, cast and wrap it before. Its own `.grad` are not to
    be read: stage 1 leaves the average in this rank's part of them only, stage 2 leaves nothing, so that
    `torch.nn.utils.clip_grad_norm_(module.parameters())` is refused with stage 1 and finds no gradient with stage 2.
    `step` raises ValueError once the weights have left, or a later wrapper reduces the gradients.

    master: 16-bit weights are stepped as float32 copies, of the own shard only.
    offload: where those copies and the optimizer's state live (offload.py).
    find_unused: a parameter may get no gradient: it counts as zeros if another rank has one, and is left alone if none
        has (one more all-reduce per reduction, a byte per parameter). Without it that is an error which names it.
    replicate_group: ranks that have the same shard of other rows: their gradients are averaged too (hybrid sharding).
    placements: of the module's parameters, where they are parts of larger ones themselves (tensor parallel), and
    norm_group: all ranks that hold such parts; `group` by default. gradient_groups: see `BucketedDDP`.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        stage: int = 1,
        *,
        make: MakeOptimizer,
        bucket_cap_mb: float = 25,
        offload: str | Path | None = None,
        master: bool = False,
        find_unused: bool = False,
        replicate_group: Group | None = None,
        placements: Mapping[str, Placement] | None = None,
        norm_group: Group | None = None,
        gradient_groups: Mapping[str, Group] | None = None,
    ) -> None:
        if stage not in (1, 2):
            raise ValueError(f"stage={stage!r} must be 1 or 2; FullyShard is stage 3, which shards parameters too.")
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb is {bucket_cap_mb}: a bucket needs a size above 0, for example 25.")
        home = Offload(offload, group.device)
        settings = ShardSettings(
            group=group,
            replicate_group=replicate_group,
            norm_group=norm_group or group,
            placements=placements or {},
            master=master,
            home=home,
            gradient_groups=gradient_groups or {},
        )
        for each in settings.groups:
            replicate(module, each, gradient_groups if each is group else None)
        named = dict(module.named_parameters())
        self.group, self.stage = group, stage
        self.reducer = ScatterReducer(named, settings, stage, bucket_cap_mb * 2**20, find_unused)
        self.shards = self.reducer.shards
        for each in settings.groups:
            BufferSync(module, each, self.reducer.reduces)
        slices = {name: slice_of(p, p.new_empty(0)) for name, p in named.items()}  # of frozen ones, too
        placed = {name: settings.placement_of(name, p).within(FlatShard(0, 0)) for name, p in named.items()}
        for shard in self.shards:
            slices |= shard.slices
            placed |= shard.placements
        super().__init__(make, slices, placed, settings.norm_group, home)

    def no_sync(self) -> AbstractContextManager[None]:
        """A context for every microbatch but the last: stage 1 accumulates without communication, stage 2 reduces all
        the same."""
        return self.reducer.syncing(self.stage == 2)

    def prepare_gradients(self) -> None:
        """Gives all slices their gradients at once, also to master and offloaded ones, for loops that see or change
        them before `step`, which otherwise takes a bucket at a time."""
        self.reducer.check_in_charge()
        self.reducer.finish_late()
        for index in range(len(self.shards)):
            self.reducer.give_gradients(index)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the own shards bucket by bucket; a bucket's weights are gathered while the next one is stepped."""
        with torch.enable_grad():
            loss = closure() if closure else None
        self.reducer.check_in_charge()
        self.reducer.finish_late()
        gathers = []
        for index, shard in enumerate(self.shards):
            self.reducer.give_gradients(index)
            self.step_slices(shard.slices.values())
            shard.write_weights()
            self.reducer.drop(index)
            self.home.keep(self.inner)
            gathers.append(shard.group.all_gather(shard.own, out=shard.flat, async_op=True))
        for gather in gathers:
            gather.wait()
        self.zero_grad()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Frees all gradients, the module's too (so there is nothing left to set to zero)."""
        self.reducer.start_over()

    @property
    def gradients(self) -> list[Tensor]:
        """What this rank holds of gradients: reduced shards, and buckets that fill or are on their way."""
        return [*self.gradients_by_name().values(), *self.reducer.held]

    @torch.no_grad()
    def load_local(self, state: dict[str, Any]) -> None:
        for shard in self.shards:
            shard.weights.copy_(shard.own)
        super().load_local(state)
