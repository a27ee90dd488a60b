"""Gradients in flat buckets that are reduced while backward still computes.

    parameters      embed        block 0         block 1        head          backward runs from right to left
    ready order                                             <─────────
    buckets      [ bucket 2        | bucket 1          | bucket 0  ]
    flat memory  [ .grad  .grad  ..| .grad .grad ..    | .grad     ]          each p.grad is a view into it

One all-reduce per tensor pays the latency of each, a single one at the end hides nothing. A bucket is large enough for
the first and early enough for the second; the first one is small, so that communication starts soon. Buckets start in
the same order on every rank, so that collectives do not cross. (Li et al., "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training", VLDB 2020, section 3.2.)
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.comm.operation import Work
from minillm.parallel.data_parallel.packing import Bucket
from minillm.parallel.data_parallel.replicas import no_gradient, remove_previous_reducers


class Reducer:
    """Keeps gradients in buckets and reduces each bucket as soon as all of its gradients are there.

    names: of all trained parameters, each in one of the buckets.
    groups: the ranks whose gradients are averaged, of each of these groups in turn.
    reduce: (bucket, flat) -> Work starts the reduction of one bucket. overlap: False: not before backward is over.
    find_unused: whether a parameter may get none, which is then zero, or None on all ranks; if not, an error names it.

    Wrapping a parameter again closes its previous Reducer. Copies of a parameter are not hooked.
    """

    def __init__(
        self,
        names: Mapping[nn.Parameter, str],
        buckets: list[Bucket],
        groups: Sequence[Group],
        reduce: Callable[[Bucket, Tensor], Work],
        overlap: bool = True,
        find_unused: bool = False,
    ) -> None:
        self.names, self.groups, self.group = names, groups, groups[-1]
        self.reduce, self.overlap, self.find_unused = reduce, overlap, find_unused
        self.sync = True  # False while gradients only accumulate (`no_sync`)
        self.is_closed, self._expected, self._task = False, False, -1
        remove_previous_reducers(names)
        for p in names:
            p._reducer = self
        self._seen: set[nn.Parameter] = set()  # have got a gradient since the last reduction
        self._ready: dict[nn.Parameter, None] = {}  # have got it in the backward that runs now, in this order
        self._works: list[Work] = []
        self.unused: set[nn.Parameter] = set()  # had no gradient on any rank in the last reduction
        self._hooks = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in names]
        self._use(buckets)

    def __reduce__(self) -> Any:
        return type(None), ()

    def _use(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        self._views: list[list[Tensor] | None] = [None] * len(buckets)
        self._flats: list[Tensor | None] = [None] * len(buckets)
        self._place = {p: (b, i) for b, bucket in enumerate(buckets) for i, p in enumerate(bucket.parameters)}
        self._waiting_for = [len(bucket.parameters) for bucket in buckets]

    def expect(self) -> None:
        """A backward is coming: from now on `finish` takes part in its reduction, even if no gradient arrives here."""
        self._expected = not self.is_closed

    def free_idle(self) -> None:
        """Frees buckets whose gradients have gone, as after `zero_grad(set_to_none=True)`: forward needs the room."""
        for index, bucket in enumerate(self.buckets):
            if self._flats[index] is not None and all(p.grad is None for p in bucket.parameters):
                self._flats[index] = self._views[index] = None

    def close(self) -> None:
        """Take the hooks off the parameters, and never take part in a reduction again."""
        self.is_closed = True
        for hook in self._hooks:
            hook.remove()
        for p in self.names:
            if p._reducer is self:
                p._reducer = None

    def reduces(self) -> bool:
        """Whether the next backward will be reduced."""
        return self.sync and not self.is_closed

    @contextlib.contextmanager
    def syncing(self, sync: bool) -> Iterator[None]:
        """Inside, whether a backward is reduced, or gradients only accumulate."""
        before, self.sync = self.sync, sync
        try:
            yield
        finally:
            self.sync = before

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
        """Checkpointing with use_reentrant=True runs a backward inside a node of the outer one, which goes on."""
        is_inner = torch._C._current_autograd_node() is not None
        if not (is_inner and any(self._waiting_for)):
            self.finish()

    def _attach(self, p: nn.Parameter) -> None:
        """Make p.grad a view into its bucket; a gradient that lies elsewhere is copied there."""
        index, place = self._place[p]
        if self._flats[index] is None:
            self._flats[index] = self.buckets[index].empty()
            self._views[index] = self.buckets[index].views(self._flats[index])
        view, gradient = self._views[index][place], p.grad
        if gradient is view:
            return
        if gradient is None:
            p.grad = view.zero_()
        elif gradient.layout != torch.strided:
            raise ValueError(f"{self.names[p]} has a sparse gradient, which has no place in a bucket: sparse=False")
        else:
            p.grad = view.copy_(gradient.detach())

    def _start(self) -> None:
        index = len(self._works)
        self._works.append(self.reduce(self.buckets[index], self._flats[index]))

    def _settle(self, index: int) -> None:
        """Wait until a bucket is reduced."""
        self._works[index].wait()

    def finish(self) -> None:
        """Start what has not started, wait for all of it. Backward ends with it if it is synchronised; calling it again
        does nothing. Parameters without a gradient take part with zeros, so that no rank waits for ever. ValueError on
        the rank that lacks one, unless `find_unused`."""
        if not self._expected:
            return
        unused = [p for p in self.names if p.grad is None and p not in self._seen]
        missing = [name for p, name in self.names.items() if p not in self._seen]
        while len(self._works) < len(self.buckets):
            for p in self.buckets[len(self._works)].parameters:
                self._attach(p)
            self._start()
        for index in range(len(self.buckets)):
            self._settle(index)
        self.unused = set(self._unused_anywhere(unused))
        for p in self.unused:
            p.grad = None
        order = [self.names[p] for p in self._ready]
        self._expected, self._works, self._task = False, [], -1
        self._seen.clear()
        self._ready.clear()
        self._waiting_for = [len(bucket.parameters) for bucket in self.buckets]
        self._report(order, [] if self.find_unused else missing)

    def _unused_anywhere(self, unused: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """Which of these have no gradient on any rank either: with find_unused, one byte for each parameter tells."""
        if not self.find_unused:
            return unused
        without = set(unused)
        used = torch.tensor([p not in without for p in self.names], dtype=torch.uint8, device=self.group.device)
        for group in self.groups:
            group.all_reduce(used, "max")
        return [p for p, anywhere in zip(self.names, used.tolist(), strict=True) if not anywhere]

    def _report(self, order: list[str], missing: list[str]) -> None:
        """order: names as their gradients became ready; missing: that have none, and should."""
        if missing:
            raise ValueError(no_gradient(missing, self.group.rank, self.group))
