"""ZeRO stages 1 and 2: every rank steps 1/N of the parameters and hands the result round (Rajbhandari et al. 2020).

             gradients of a bucket, N equal parts                      weights of that bucket
    rank 0   [ g | g | g | g ] ─┐                    ┌─> own part ─ AdamW ─> own part ─┐
    rank 1   [ g | g | g | g ] ─┼─ reduce-scatter ───┼─> own part ─ AdamW ─> own part ─┼─ all-gather > [ w | w | w | w ]
    ...                        ─┘    P(N-1)/N bytes  └─> ...                          ─┘   P(N-1)/N bytes

Together that is an all-reduce's traffic, while optimizer state (and master weights) take 1/N. Stage 1 keeps the full
gradients; stage 2 frees a bucket as soon as it is reduced, so that gradients at rest take 1/N as well.

    K microbatches   stage 1   gradients add up locally under `no_sync`: one reduce-scatter of P per step
                     stage 2   each is reduced and added to the shard: K of them, and `no_sync` changes nothing (it
                               would need the full gradients that are freed; DeepSpeed forbids it)

The optimizer inside may be any of torch's that works element by element (SGD, Adam, AdamW, RMSprop, Adagrad): one that
looks at whole matrices or norms (Muon, Adafactor, LAMB, LBFGS) would see slices of them and compute something else.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.parallel.data_parallel.ddp import replicate
from minillm.parallel.data_parallel.reducer import assign
from minillm.parallel.offload import Offload
from minillm.parallel.optimizer_state import Spread, names_by_group, restore
from minillm.parallel.zero.shard import Shard, slice_of


class ZeroOptimizer(torch.optim.Optimizer):
    """A torch optimizer over this rank's shard of the module's parameters. Gradients are averaged over the group.

        optimizer = ZeroOptimizer(model, group, stage=2, make=lambda named: adamw(named, config))
        loss.backward()                            # reduces
        norm = optimizer.clip_grad_norm_(1.0)      # of the whole gradient: the same on every rank,
        if norm.isfinite():                        # so every rank decides alike
            optimizer.step()                       # uses the gradients up
        optimizer.zero_grad()

    make(named): builds the optimizer from (name, parameter) pairs: all parameters, in order, each as the 1-D slice of
        it that lies in this rank's shard, which may have no elements. `.whole_shape` is the parameter's own shape.
    master: 16-bit weights are stepped as float32 copies, of the own shard only.
    offload: where those copies and the optimizer's state live (offload.py).
    find_unused: a parameter may get no gradient: it counts as zeros if another rank has one, and is left alone if none
        has (one more all-reduce per step, a byte per parameter). Without it that is an error which names it.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        stage: int = 1,
        *,
        make: Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
        bucket_cap_mb: float = 25,
        offload: str | Path | None = None,
        master: bool = False,
        find_unused: bool = False,
    ) -> None:
        if stage not in (1, 2):
            raise ValueError(f"stage={stage!r} must be 1 or 2; FullyShard is stage 3, which shards parameters too.")
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb is {bucket_cap_mb}: a bucket needs a size above 0, for example 25.")
        replicate(module, group)
        named = list(module.named_parameters())
        self.group, self.stage, self.find_unused = group, stage, find_unused
        self.home = Offload(offload, group.device)
        buckets = assign(named, bucket_cap_mb * 2**20, multiple_of=group.world_size)
        self.shards = [Shard(bucket, group, self.home, master, f"bucket{i}") for i, bucket in enumerate(buckets)]
        owned = {name: part for shard in self.shards for name, part in shard.slices.items()}
        self.slices = {name: owned[name] if name in owned else slice_of(p, p.new_empty(0)) for name, p in named}
        self.inner = make(self.slices.items())
        super().__init__(self.inner.param_groups, self.inner.defaults)  # the same dicts: schedulers set them
        self.state = self.inner.state
        self._sync, self._backward = True, -1
        self._begin()
        for shard in self.shards:
            for place, parameter in enumerate(shard.bucket.parameters):
                if earlier := getattr(parameter, "_reducer_hook", None):  # as with `Reducer`: the later one counts
                    earlier.remove()
                before, after = partial(self._before, shard, place), partial(self._after, shard, place)
                parameter._reducer_hook = _Hooks(parameter, before, after)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around every microbatch but the last: stage 1 adds up without communication, stage 2 reduces all the same."""
        before, self._sync = self._sync, self.stage == 2
        try:
            yield
        finally:
            self._sync = before

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float | None, loss_scale: float = 1.0) -> Tensor:
        """Norm of the whole model's gradient / loss_scale (float64, a scalar), which `step` scales to max_norm at most.

        Squares of the shards are added up by one all-reduce of 8 bytes. `step` divides and clips when it reads the
        gradients, in float32 where there are master weights, so that float16 ones do not underflow.
        """
        self._reduce_if_needed()
        shards = [shard.gradient for shard in self.shards]
        norms = [torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in shards]
        total = sum((norm.double().square() for norm in norms), torch.zeros((), device=self.group.device).double())
        norm = self.group.all_reduce(total).sqrt() / loss_scale
        clip = 1.0 if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0).item()
        self._scale = clip / loss_scale
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the own shards bucket by bucket; a bucket's weights are gathered while the next one is stepped."""
        with torch.enable_grad():
            loss = closure() if closure else None
        self._reduce_if_needed()
        left_alone = self._used_nowhere()
        for part in self.slices.values():
            part.grad = None  # so that only the bucket at hand is stepped
        gathers = []
        for shard in self.shards:
            shard.collect(self.home)
            if self._scale != 1.0:
                shard.gradient.mul_(self._scale)
            shard.offer(left_alone)
            self.inner.step()
            shard.publish(self.home)
            shard.forget()
            self.home.keep(self.inner)
            gathers.append(self.group.all_gather(shard.own, out=shard.flat, async_op=True))
        for gather in gathers:
            gather.wait()
        self._begin()
        return loss

    def collect(self) -> None:
        """Gives all slices their gradients at once, also to master and offloaded ones, for who wants to see or change
        them before `step`, which otherwise takes a bucket at a time."""
        self._reduce_if_needed()
        for shard in self.shards:
            shard.collect(self.home)
            shard.offer()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The slices that this rank steps."""
        return [part for part in self.slices.values() if part.numel()]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Frees all gradients, the module's too (so there is nothing left to set to zero)."""
        for shard in self.shards:
            shard.forget()
        self._begin()

    @property
    def gradients(self) -> list[Tensor]:
        """What this rank holds of gradients: reduced shards, and buckets that fill or are on their way."""
        return [gradient for shard in self.shards for gradient in shard.gradients]

    def whole_gradients(self) -> dict[str, Tensor]:
        """name -> the averaged gradient, whole, on the CPU of every rank, after `collect`. Every rank calls it."""
        return self._join({name: part.grad for shard in self.shards for name, part in shard.slices.items()})

    def state_dict(self, whole: bool = True) -> dict[str, Any]:
        """The state, in torch's layout. whole: of all parameters, as `make(module.named_parameters())` on one process
        would have it, on the CPU of every rank: any number of ranks can load it, and so can that optimizer. All ranks
        have to call it. Otherwise this rank's shard, which only the same rank of the same layout can load.
        """
        masters = {n: part.detach() for shard in self.shards if shard.wide for n, part in shard.slices.items()}
        state = {**self.inner.state_dict(), "masters": masters}
        return self._spread().whole(state) if whole else state | {"shard": self._layout()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the module's weights first: master weights that `state` does not hold are copied from them.
        ValueError: a state of another model, or another rank's or layout's shard."""
        saved, here = state.get("shard"), self._layout()
        if saved not in (None, here):
            raise ValueError(
                f"this is the shard of rank {saved['rank']} of {saved['world_size']}, cut otherwise than that of rank "
                f"{here['rank']} of {here['world_size']} here: save state_dict(whole=True), which fits any layout."
            )
        own = state if saved else self._spread().own(state)
        restore(self, own)
        self.home.keep(self.inner)
        for shard in self.shards:
            shard.weights.copy_(shard.own)
            for name in own["masters"].keys() & shard.slices.keys() if shard.wide else ():
                shard.slices[name].copy_(own["masters"][name])

    def _spread(self) -> Spread:
        names = names_by_group(self.inner, self.slices.items())
        shapes = {name: part.whole_shape for name, part in self.slices.items()}
        return Spread(self.group, names, names, shapes, self._join, self._cut)

    def _join(self, parts: dict[str, Tensor | None]) -> dict[str, Tensor]:
        return {name: tensor for shard in self.shards for name, tensor in shard.join(parts).items()}

    def _cut(self, name: str, whole: Tensor) -> Tensor:
        of_it = (shard.cut(name, whole) for shard in self.shards if name in shard.slices)
        return next(of_it, whole.new_empty(0))  # frozen: in no bucket

    def _layout(self) -> dict[str, Any]:
        """Whose shard this rank has, and how it is cut."""
        buckets = [(shard.bucket.names, shard.bucket.padded) for shard in self.shards]
        return {"rank": self.group.rank, "world_size": self.group.world_size, "buckets": buckets}

    # Gradients: views into flat buckets, reduced in bucket order, which is the same on every rank.

    def _begin(self) -> None:
        """There are no gradients yet."""
        self._reduced, self._scale = False, 1.0
        self._started = 0  # buckets whose reduction has begun in this backward pass

    def _before(self, shard: Shard, place: int, _: Any) -> None:
        """Before autograd adds to p.grad: make that a view into its bucket."""
        if self._backward != (task := torch._C._current_graph_task_id()):
            self._backward, self._started = task, 0
            for each in self.shards:
                each.arrived.clear()
            if self._sync:
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if self._reduced and (self.stage == 1 or shard.collected):
            raise ValueError(
                f"the gradient of {shard.bucket.names[place]} has been reduced already: run all microbatches but the "
                "last under no_sync(), or call zero_grad() if there is no step."
            )
        shard.attach(place)

    def _after(self, shard: Shard, place: int, _: Any) -> None:
        """After autograd has added to p.grad: reduce what is complete."""
        if place in shard.arrived:
            raise ValueError(
                f"{shard.bucket.names[place]} got its gradient twice in one backward: use checkpointing with "
                "use_reentrant=False."
            )
        shard.attach(place)  # does nothing, unless autograd has replaced the view (create_graph=True)
        shard.arrived.add(place)
        shard.used.add(place)
        while self._sync and self._started < len(self.shards) and self.shards[self._started].is_complete:
            self._start_next()

    def _start_next(self) -> None:
        """Start to reduce the next bucket. In stage 2 the one before it is awaited and freed first: so a bucket on its
        way and one that fills are all there is of full gradients."""
        shard = self.shards[self._started]
        if self.stage == 2 and self._started:
            self.shards[self._started - 1].finish(free=True)
        shard.start(in_place=self.stage == 1)
        self._started += 1

    def _finish(self) -> None:
        """Reduce what is left, wait for all of it. Runs by itself at the end of each backward that synchronises."""
        for shard in self.shards:
            if not self.find_unused and len(shard.used) < len(shard.bucket.names):
                name = next(name for place, name in enumerate(shard.bucket.names) if place not in shard.used)
                raise ValueError(
                    f"{name} has no gradient on rank {self.group.rank} of group {self.group.name!r}: freeze it before "
                    "ZeroOptimizer is made, or use find_unused=True."
                )
        while self._started < len(self.shards):
            self._start_next()
        for shard in self.shards:
            shard.finish(free=self.stage == 2)
        self._reduced = True

    def _reduce_if_needed(self) -> None:
        if not self._reduced:  # every microbatch ran under no_sync, or none of this rank's touched a parameter
            self._started = 0
            self._finish()

    def _used_nowhere(self) -> frozenset[str]:
        if not self.find_unused:
            return frozenset()
        named = {name: place in shard.used for shard in self.shards for place, name in enumerate(shard.bucket.names)}
        used = torch.tensor(list(named.values()), dtype=torch.uint8, device=self.group.device)
        everywhere = zip(named, self.group.all_reduce(used, "max").tolist(), strict=True)
        return frozenset(name for name, used in everywhere if not used)


class _Hooks:
    """Called before and after autograd adds to a parameter's .grad. (A tensor's own hook would not do for the first: it
    also runs in the inner passes of recomputation, which add to no .grad.)"""

    def __init__(self, parameter: nn.Parameter, before: Callable[[Any], None], after: Callable[[Any], None]) -> None:
        self.node = torch.autograd.graph.get_gradient_edge(parameter).node  # lives as long as somebody holds it
        self.handles = [self.node.register_prehook(before), parameter.register_post_accumulate_grad_hook(after)]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
