"""Gradients in flat buckets that are reduced while backward still computes.

    parameters      embed        block 0         block 1        head          backward runs from right to left
    ready order                                             <─────────
    buckets      [ bucket 2        | bucket 1          | bucket 0  ]
    flat memory  [ .grad  .grad  ..| .grad .grad ..    | .grad     ]          each p.grad is a view into it

One all-reduce per tensor pays the latency of each, a single one at the end hides nothing. A bucket is large enough for
the first and early enough for the second; the first one is small, so that communication starts soon. Buckets start in
the same order on every rank, which is what keeps collectives from crossing. (Li et al., "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.)
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.comm.work import Work

Named = Iterable[tuple[str, nn.Parameter]]


@dataclass(eq=False)
class Bucket:
    """Whole parameters of one dtype, one after the other in one flat tensor.

    offsets: where each begins; numel: their elements; padded: rounded up to a multiple of what `assign` was told.
    state: what a communication hook remembers from step to step (the error it still owes).
    """

    names: list[str]
    parameters: list[nn.Parameter]
    offsets: list[int]
    numel: int
    padded: int
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters[0].dtype

    def zeros(self) -> Tensor:
        """A flat tensor for this bucket: [padded]."""
        return torch.zeros(self.padded, dtype=self.dtype, device=self.parameters[0].device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """flat: [padded] -> one view per parameter, in its shape and its strides (fused optimizers rely on both)."""
        return [_view(flat, p, offset) for p, offset in zip(self.parameters, self.offsets, strict=True)]

    def shard(self, flat: Tensor, rank: int, world_size: int) -> Tensor:
        """flat: [padded] -> view of the rank-th of world_size equal parts."""
        if flat.numel() % world_size:
            raise ValueError(f"{flat.numel()} elements have no {world_size} equal parts: assign with multiple_of")
        return flat.view(world_size, -1)[rank]


def _view(flat: Tensor, parameter: Tensor, offset: int) -> Tensor:
    strides = torch.empty_like(parameter, device="meta").stride()  # the parameter's own, where it has no gaps
    return flat.as_strided(parameter.shape, strides, flat.storage_offset() + offset)


def assign(
    named_parameters: Named, cap_bytes: float, first_cap_bytes: float | None = None, multiple_of: int = 1
) -> list[Bucket]:
    """Pack whole parameters, the last one first, since its gradient is ready first. As torch does, a bucket is closed
    by the parameter that fills it: it holds at least its cap, except the last of each dtype.

    first_cap_bytes: cap of the first bucket of each dtype; multiple_of: pad each bucket to a multiple of this many
    elements. Frozen parameters are left out, a tied one is packed once.
    """
    for name, cap in (("cap_bytes", cap_bytes), ("first_cap_bytes", first_cap_bytes)):
        if cap is not None and not cap > 0:
            raise ValueError(f"{name} is {cap}: a bucket needs a size above 0, math.inf for one bucket")
    trainable = {p: name for name, p in named_parameters if p.requires_grad}
    devices = {str(p.device) for p in trainable}
    if len(devices) > 1:
        raise ValueError(f"parameters are on {' and '.join(sorted(devices))}: move the module to one device first")

    closed: list[list[nn.Parameter]] = []
    filling: dict[torch.dtype, list[nn.Parameter]] = {}
    room: dict[torch.dtype, float] = {}  # bytes until the bucket being filled is closed
    for p in reversed(trainable):
        filling.setdefault(p.dtype, []).append(p)
        room[p.dtype] = room.get(p.dtype, first_cap_bytes or cap_bytes) - p.nbytes
        if room[p.dtype] <= 0:
            closed.append(filling.pop(p.dtype))
            room[p.dtype] = cap_bytes
    return [_bucket(trainable, members, multiple_of) for members in [*closed, *filling.values()]]


def _bucket(names: dict[nn.Parameter, str], members: Sequence[nn.Parameter], multiple_of: int) -> Bucket:
    ends = [0]
    for p in members:
        ends.append(ends[-1] + p.numel())
    padded = math.ceil(ends[-1] / multiple_of) * multiple_of
    return Bucket([names[p] for p in members], list(members), ends[:-1], ends[-1], padded)


class Reducer:
    """Keeps gradients in buckets and reduces each bucket as soon as all of its gradients are there.

    After the first reduction they are packed again, in the order in which gradients became ready on rank 0.

    reduce: (bucket, flat) -> Work starts the reduction of one bucket.
    sync: False while gradients only accumulate (`no_sync`).
    overlap: False to start nothing before backward is over.
    find_unused: whether a parameter may get no gradient. If so, it counts as zero where another rank has one, and
        `.grad` stays None where no rank has; if not, that is an error which names it.

    A parameter has one Reducer: a later one takes the place of an earlier one, all of it (`close`). A copy of a
    parameter has none.
    """

    def __init__(
        self,
        named_parameters: Named,
        group: Group,
        reduce: Callable[[Bucket, Tensor], Work],
        cap_bytes: float,
        first_cap_bytes: float | None = None,
        multiple_of: int = 1,
        overlap: bool = True,
        find_unused: bool = False,
    ) -> None:
        named_parameters = list(named_parameters)
        self.names = {p: name for name, p in named_parameters if p.requires_grad}
        self.group, self.reduce, self.overlap, self.find_unused = group, reduce, overlap, find_unused
        self._assign = lambda named: assign(named, cap_bytes, first_cap_bytes, multiple_of)
        self.sync, self.is_closed = True, False
        self._expected, self._packed_again, self._task = False, False, -1
        take_over(self.names)
        for p in self.names:
            p._reducer = self
        self._pack(named_parameters)
        self._seen: set[nn.Parameter] = set()  # have got a gradient since the last reduction
        self._ready: dict[nn.Parameter, None] = {}  # have got it in the backward that runs now, in this order
        self._works: list[Work] = []
        self.unused: set[nn.Parameter] = set()  # had no gradient on any rank in the last reduction
        self._hooks = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in self.names]

    def __reduce__(self) -> Any:
        return type(None), ()

    def _pack(self, named: Named) -> None:
        self.buckets = self._assign(named)
        self._views: list[list[Tensor] | None] = [None] * len(self.buckets)
        self._flats: list[Tensor | None] = [None] * len(self.buckets)
        self._place = {p: (b, i) for b, bucket in enumerate(self.buckets) for i, p in enumerate(bucket.parameters)}
        self._waiting_for = [len(bucket.parameters) for bucket in self.buckets]

    def expect(self) -> None:
        """A backward is coming: from now on `finish` takes part in its reduction, even if no gradient arrives here."""
        self._expected = not self.is_closed

    def flat(self, index: int) -> Tensor:
        """The memory of a bucket: [padded], made when it is first needed."""
        if self._flats[index] is None:
            self._flats[index] = self.buckets[index].zeros()
            self._views[index] = self.buckets[index].views(self._flats[index])
        return self._flats[index]

    def close(self) -> None:
        """Take the hooks off the parameters, and never take part in a reduction again."""
        self.is_closed = True
        for hook in self._hooks:
            hook.remove()
        for p in self.names:
            if p._reducer is self:
                p._reducer = None

    def _on_gradient(self, p: nn.Parameter) -> None:
        """After autograd has added to p.grad: move it into its bucket; start what is complete."""
        self._attach(p)
        self._seen.add(p)
        if not self.sync:
            return
        self.expect()
        if self._task != (task := torch._C._current_graph_task_id()):
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._at_end_of_backward)
        if p in self._ready:
            raise ValueError(
                f"{self.names[p]} got a second gradient before the first was reduced: checkpoint with "
                "use_reentrant=False, and wrap the module anew after a backward that failed"
            )
        self._ready[p] = None
        self._waiting_for[self._place[p][0]] -= 1
        while self.overlap and len(self._works) < len(self.buckets) and not self._waiting_for[len(self._works)]:
            self._start()

    def _at_end_of_backward(self) -> None:
        """Checkpointing with use_reentrant=True runs a backward inside of a node of the outer one, which goes on."""
        is_inner = torch._C._current_autograd_node() is not None
        if not (is_inner and any(self._waiting_for)):
            self.finish()

    def _attach(self, p: nn.Parameter) -> None:
        """Make p.grad a view into its bucket: a gradient made after `zero_grad(set_to_none=True)`, one that the user
        put there and one in a bucket of the first packing are copied."""
        index, place = self._place[p]
        self.flat(index)
        view = self._views[index][place]
        if p.grad is None:
            p.grad = view.zero_()
        elif p.grad.layout != torch.strided:
            raise ValueError(f"{self.names[p]} has a sparse gradient, which has no place in a bucket: sparse=False")
        elif p.grad.data_ptr() != view.data_ptr() or p.grad.stride() != view.stride():
            p.grad = view.copy_(p.grad.detach())

    def _start(self) -> None:
        index = len(self._works)
        self._works.append(self.reduce(self.buckets[index], self.flat(index)))

    def _settle(self, index: int) -> None:
        """Wait until a bucket is reduced."""
        self._works[index].wait()

    def finish(self) -> None:
        """Start what has not started, wait for all of it. Runs by itself at the end of each synchronised backward;
        calling it again does nothing. Parameters without gradient take part with zeros, so that no rank waits in vain.

        ValueError: a parameter got no gradient and `find_unused` is False. The rank that lacks it says so; when
        buckets are packed again (first step) every rank does.
        """
        if not self._expected:
            return
        unused = [p for p in self.names if p.grad is None and p not in self._seen]
        missing = [name for p, name in self.names.items() if p not in self._seen]
        while len(self._works) < len(self.buckets):
            for p in self.buckets[len(self._works)].parameters:
                self._attach(p)
            self._start()
        used = self._used_anywhere(unused)
        for index in range(len(self.buckets)):
            self._settle(index)
        self.unused = {p for p in unused if not used[p]}
        for p in self.unused:
            p.grad = None
        order = [self.names[p] for p in self._ready]
        self._reset()
        self._report([(self.group.rank, missing)] if self._packed_again else self._pack_again(order, missing))

    def _used_anywhere(self, unused: Sequence[nn.Parameter]) -> dict[nn.Parameter, bool]:
        """With find_unused: which parameters have a gradient on some rank, one byte for each."""
        if not self.find_unused:
            return dict.fromkeys(unused, False)
        without = set(unused)
        flags = torch.tensor([p not in without for p in self.names], dtype=torch.uint8, device=self.group.device)
        return dict(zip(self.names, self.group.all_reduce(flags, "max").tolist(), strict=True))

    def _pack_again(self, order: list[str], missing: list[str]) -> list[tuple[int, list[str]]]:
        """Pack in rank 0's order, parameters it had no gradient for last; returns what each rank is missing."""
        self._packed_again = True
        told = self.group.gather_objects((order if self.group.rank == 0 else [], missing))
        parameters = {name: p for p, name in self.names.items()}
        ready = dict.fromkeys([*told[0][0], *reversed(parameters)])  # first place counts
        named = [(name, parameters[name]) for name in reversed(ready)]
        if [b.names for b in self.buckets] != [b.names for b in self._assign(named)]:
            self._pack(named)
        return list(enumerate(lacking for _, lacking in told))

    def _report(self, told: list[tuple[int, list[str]]]) -> None:
        for rank, names in told:
            if names and not self.find_unused:
                raise ValueError(no_gradient(names, rank, self.group))

    def _reset(self) -> None:
        self._expected, self._works, self._task = False, [], -1
        self._seen.clear()
        self._ready.clear()
        self._waiting_for = [len(bucket.parameters) for bucket in self.buckets]


def take_over(names: Mapping[nn.Parameter, str]) -> None:
    """Ends the Reducers that these parameters have: two owners would both reduce the same .grad."""
    for earlier in {p._reducer for p in names if getattr(p, "_reducer", None)}:
        if others := [name for p, name in earlier.names.items() if p not in names]:
            raise ValueError(
                f"{others[0]} is reduced by an earlier wrapper, which would end: wrap all of its parameters again."
            )
        earlier.close()


def no_gradient(names: Sequence[str], rank: int, group: Group) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (
        f"no gradient on rank {rank} of group {group.name!r} for {', '.join(names[:5])}{more}: use find_unused=True, "
        "or freeze what never takes part before wrapping"
    )
