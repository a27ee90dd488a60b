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

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.comm.work import Work
from minillm.parallel.data_parallel.ddp import BufferSync, replicate
from minillm.parallel.data_parallel.reducer import Bucket, Named, Reducer
from minillm.parallel.offload import Offload
from minillm.parallel.optimizer_state import MakeOptimizer, SlicedOptimizer, plain, slice_of
from minillm.parallel.placement import FlatShard, Placement, gather, global_norm, scale_
from minillm.parallel.zero.shard import Shard


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
    master: 16-bit weights are stepped as float32 copies, of the own shard only.
    offload: where those copies and the optimizer's state live (offload.py).
    find_unused: a parameter may get no gradient: it counts as zeros if another rank has one, and is left alone if none
        has (one more all-reduce per reduction, a byte per parameter). Without it that is an error which names it.
    replicate_group: ranks that have the same shard of other rows: their gradients are averaged too (hybrid sharding).
    placements: of the module's parameters, where they are parts of larger ones themselves (tensor parallel), and
    norm_group: all ranks that hold such parts; `group` by default.
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
    ) -> None:
        if stage not in (1, 2):
            raise ValueError(f"stage={stage!r} must be 1 or 2; FullyShard is stage 3, which shards parameters too.")
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb is {bucket_cap_mb}: a bucket needs a size above 0, for example 25.")
        home = Offload(offload, group.device)
        for each in (replicate_group, group) if replicate_group else (group,):
            replicate(module, each)
        named, cap_bytes = list(module.named_parameters()), bucket_cap_mb * 2**20
        self.group, self.stage = group, stage
        self.reducer = ScatterReducer(named, group, replicate_group, stage, cap_bytes, find_unused, home, master)
        self.shards = self.reducer.shards
        BufferSync(module, group, self.reducer)
        owned = {name: part for shard in self.shards for name, part in shard.slices.items()}
        parts = {name: part for shard in self.shards for name, part in shard.parts.items()}
        outer = {name: Placement(p.shape) for name, p in named} | dict(placements or {})
        placed = {name: outer[name].within(parts.get(name, FlatShard(0, 0))) for name, _ in named}
        slices = {name: owned[name] if name in owned else slice_of(p, p.new_empty(0)) for name, p in named}
        super().__init__(make, slices, placed, norm_group or group, home)
        self._scale: Tensor | None = None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around every microbatch but the last: stage 1 adds up without communication, stage 2 reduces all the same."""
        before, self.reducer.sync = self.reducer.sync, self.stage == 2
        try:
            yield
        finally:
            self.reducer.sync = before

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float | None, loss_scale: float = 1.0, norm_type: float = 2.0) -> Tensor:
        """Norm of the whole model's gradient / loss_scale (float64, a scalar), which `step` scales to max_norm at most.

        One all-reduce of 8 bytes. `step` divides and clips when it reads the gradients, in float32 where there are
        master weights, so that float16 ones do not underflow.
        """
        self.reducer.finish_late()
        gradients = {name: part for shard in self.shards for name, part in shard.gradients().items()}
        norm = global_norm(gradients, self.placements, self.norm_group, norm_type) / loss_scale
        clip = torch.ones_like(norm) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
        self._scale = clip / loss_scale
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the own shards bucket by bucket; a bucket's weights are gathered while the next one is stepped."""
        with torch.enable_grad():
            loss = closure() if closure else None
        self.reducer.finish_late()
        gathers = []
        for index, shard in enumerate(self.shards):
            self.reducer.prepare(index)
            if self._scale is not None:
                scale_([shard.gradient], self._scale)
            shard.give_gradients(self.norm_group, self.reducer.left_alone)
            self._step_inner(shard)
            shard.write_weights()
            self.reducer.drop(index)
            shard.drop_gradients()
            self.home.keep(self.inner)
            gathers.append(self.group.all_gather(shard.own, out=shard.flat, async_op=True))
        for gather_ in gathers:
            gather_.wait()
        self.zero_grad()
        return loss

    def _step_inner(self, shard: Shard) -> None:
        """One step of the parameters in this bucket: the others are kept from the optimizer meanwhile."""
        chosen = {id(slice_) for slice_ in shard.slices.values()}
        everything = [group["params"] for group in self.inner.param_groups]
        for group, members in zip(self.inner.param_groups, everything, strict=True):
            group["params"] = [slice_ for slice_ in members if id(slice_) in chosen]
        try:
            self.inner.step()
        finally:
            for group, members in zip(self.inner.param_groups, everything, strict=True):
                group["params"] = members

    def prepare_gradients(self) -> None:
        """Gives all slices their gradients at once, also to master and offloaded ones, for loops that see or change
        them before `step`, which otherwise takes a bucket at a time."""
        self.reducer.finish_late()
        for index, shard in enumerate(self.shards):
            self.reducer.prepare(index)
            shard.give_gradients(self.norm_group, self.reducer.left_alone)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Frees all gradients, the module's too (so there is nothing left to set to zero)."""
        self.reducer.start_over()
        self._scale = None

    @property
    def gradients(self) -> list[Tensor]:
        """What this rank holds of gradients: reduced shards, and buckets that fill or are on their way."""
        return [shard.gradient for shard in self.shards if shard.gradient is not None] + self.reducer.held

    def full_gradients(self) -> dict[str, Tensor]:
        """name -> the averaged gradient, whole, on the CPU of every rank, after `prepare_gradients`. Every rank calls
        it."""
        found = {}
        for shard in self.shards:
            own = {name: plain(part.grad) for name, part in shard.slices.items() if part.grad is not None}
            found |= gather(own, self.placements, self.norm_group)
        return {name: found[name] for name in self.slices if name in found}

    def masters(self) -> dict[str, Tensor]:
        return {n: part.detach() for shard in self.shards if shard.is_wide for n, part in shard.slices.items()}

    def layout(self) -> dict[str, Any]:
        buckets = [(shard.bucket.names, shard.bucket.padded) for shard in self.shards]
        return {"rank": self.group.rank, "world_size": self.group.world_size, "buckets": buckets}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for shard in self.shards:
            shard.weights.copy_(shard.own)
        super().load_state_dict(state)


class ScatterReducer(Reducer):
    """The DDP reducer with a reduce-scatter: a bucket's average ends up in its `Shard.gradient`, 1/N of it.

    Stage 2 waits for a bucket and frees it before the next one starts: so a bucket on its way and one that fills are
    all there is of full gradients. Buckets are never packed again, since optimizer state lies along them.
    """

    def __init__(
        self,
        named: Named,
        group: Group,
        replicas: Group | None,
        stage: int,
        cap_bytes: float,
        find_unused: bool,
        home: Offload,
        master: bool,
    ) -> None:
        multiple_of = group.world_size
        super().__init__(named, group, self._scatter, cap_bytes, multiple_of=multiple_of, find_unused=find_unused)
        self.stage, self.replicas, self._packed_again = stage, replicas, True
        self._nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in self.names]  # they live as long as held
        places = [node.register_prehook(self._before(p)) for node, p in zip(self._nodes, self.names, strict=True)]
        self._hooks += places
        buckets = enumerate(self.buckets)
        self.shards = [Shard(bucket, group, home, master, f"bucket{index}") for index, bucket in buckets]
        self._arriving: dict[int, Tensor] = {}
        self._settled = 0  # buckets whose reduction is over
        self.is_reduced = False  # since start_over
        self.left_alone: set[str] = set()  # what no rank has used since then

    def start_over(self) -> None:
        """Frees all gradients."""
        self.is_reduced, self.left_alone = False, set()
        for index, shard in enumerate(self.shards):
            shard.drop_gradients()
            self.drop(index)

    def finish_late(self) -> None:
        """Reduces what no backward has: all microbatches ran under no_sync, or none touched a parameter here."""
        if not self.is_reduced:
            self.expect()
            self.finish()

    def finish(self) -> None:
        if self._expected:
            is_first = not self.is_reduced
            super().finish()
            self._settled = 0
            unused = {self.names[p] for p in self.unused}
            self.left_alone = unused if is_first else self.left_alone & unused
            self.is_reduced = True
            for shard in self.shards:
                if not shard.is_copied:
                    shard.is_prepared = True
                    shard.give_gradients(self.group, self.left_alone)

    @property
    def held(self) -> list[Tensor]:
        return [flat for flat in [*self._flats, *self._arriving.values()] if flat is not None]

    def prepare(self, index: int) -> None:
        """Brings a shard's gradient to where its weights are stepped; the full one goes if it is not the same."""
        self.shards[index].prepare_gradient()
        if self.shards[index].is_copied:
            self.drop(index)

    def drop(self, index: int) -> None:
        """Frees a bucket's full gradients."""
        for p in self.buckets[index].parameters:
            p.grad = None
        self._flats[index] = self._views[index] = None

    def _before(self, p: nn.Parameter) -> Callable[[Any], None]:
        """Before autograd adds to p.grad: make that a view into its bucket. (A tensor's own hook would not do: it also
        runs in the inner passes of recomputation, which add to no .grad.)"""

        def attach(_: Any) -> None:
            shard = self.shards[self._place[p][0]]
            if self.is_reduced and (self.stage == 1 or (shard.is_copied and shard.is_prepared)):
                raise ValueError(
                    f"the gradient of {self.names[p]} has been reduced already: run all microbatches but the last "
                    "under no_sync() of the optimizer, or call zero_grad() if there is no step."
                )
            self._attach(p)

        return attach

    def _start(self) -> None:
        if self.stage == 2 or self.replicas:
            self._settle_up_to(len(self._works))
        super()._start()

    def _scatter(self, bucket: Bucket, flat: Tensor) -> Work:
        index = len(self._works)
        own = bucket.shard(flat, self.group.rank, self.group.world_size)
        self._arriving[index] = own if self.stage == 1 else torch.empty_like(own)
        return self.group.reduce_scatter(flat, "avg", async_op=True, out=self._arriving[index])

    def _settle(self, index: int) -> None:
        self._settle_up_to(index + 1)

    def _settle_up_to(self, stop: int) -> None:
        for index in range(self._settled, stop):
            self._works[index].wait()
            part = self._arriving.pop(index)
            if self.replicas:
                self.replicas.all_reduce(part, "avg")
            self.shards[index].add_gradient(part)
            if self.stage == 2:
                self.drop(index)
        self._settled = max(self._settled, stop)
