"""Runs any pipeline schedule on real ranks: an interpreter of actions and messages.

    schedule (data)        rank 1, 1F1B      F0   F1   B0   F2   B1  ...
    + messages             recv F0 | F0 | send F0, recv F1 | F1 | send F1, recv B0 | B0 | send B0 ...
    this file              post       do   post              do   post               do   post

An action takes what it needs (waiting for the message that brings it), computes, and leaves what it made; neighbouring
messages are posted as one batched exchange, which is waited for only when its contents are needed. The runtime knows
nothing about any particular schedule: `schedule/orders.py` says which rank does what when, and this file obeys.

    parts = build_parts(config, schedule, group.rank)
    pipeline = Pipeline(parts, schedule, group)
    loss = pipeline.step(tokens, shape, lambda part, y, m: part.loss(y, targets[m])[0] / count)
    pipeline.finish()                      # adds up the gradients of what several ranks hold (tied embedding)
    optimizer.step()

Losses are added up, not averaged. For a mean, divide each microbatch's loss by what the whole batch counts; otherwise
the gradient is too large by the number of microbatches.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.comm.operation import Work
from minillm.measure import span
from minillm.parallel.data_parallel.reducer import Reducer
from minillm.parallel.pipeline_parallel.schedule.actions import Action, Edge, Place, Schedule, ScheduleError
from minillm.parallel.pipeline_parallel.schedule.check import check
from minillm.parallel.pipeline_parallel.schedule.messages import batches, with_messages
from minillm.parallel.pipeline_parallel.shared_parameters import SharedGradients
from minillm.parallel.split_backward import Deferred, deferred, split_linears

Shape = Callable[[int], tuple[torch.Size, torch.dtype]]
Loss = Callable[[nn.Module, Tensor, int], Tensor]
UNDER_WAY = 4  # exchanges that may be unfinished: more would only pile up memory
EAGER_BYTES = 1 << 20  # messages up to this size leave without waiting for their receiver; a connection holds four


class Pipeline:
    """This rank's parts of the model, and the schedule that moves microbatches through all of them.

    parts: the module of each of this rank's chunks. Any modules that map one tensor to one; those wrapped in
        BucketedDDP reduce once per step, in their last gradient action.
    group: the ranks of the pipeline; rank = stage.
    pace: seconds that an action should last at least; what is left after computing is slept. It *emulates* devices that
        compute at that speed, so that a pipeline of 4 ranks can be timed on 2 cores.
    around: (action) -> a context in which it runs, for what a part needs meanwhile (its weights, if they are sharded).
    peak_in_flight: the most microbatches that this rank held activations of at once in the last step, in stages' worth.

    ValueError or ScheduleError, before any rank waits, if schedule, group and parts do not fit together.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        schedule: Schedule,
        group: Group,
        *,
        pace: Callable[[Action], float] | None = None,
        around: Callable[[Action], contextlib.AbstractContextManager] | None = None,
    ) -> None:
        check(schedule)
        _check_fit(parts, schedule, group)
        if not schedule.has_messages:
            schedule = with_messages(schedule, early=True)
            check(schedule)
        splits_backward = any(action.kind == "I" for action in schedule.actions(group.rank))
        self.parts = [split_linears(part) for part in parts] if splits_backward else list(parts)
        self.schedule, self.group, self.pace, self.around = schedule, group, pace, around or _nothing_around
        self.program = list(batches(self.schedule.orders[group.rank]))
        self.index = [schedule.part_of[Place(group.rank, chunk)] for chunk in range(len(parts))]
        self.last_part = schedule.num_parts - 1
        actions = schedule.actions(group.rank)
        self.last_gradient = set({action.chunk: action for action in actions if action.kind in "BW"}.values())
        self.peak_in_flight = 0.0
        group.connect()
        self._shared = SharedGradients(schedule, [unwrapped(part) for part in self.parts], group)

    def step(
        self,
        inputs: Sequence[Tensor],
        shape: Shape,
        loss: Loss,
        scale: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """All microbatches forward and back. Returns the sum of their losses, float64, the same on every rank.

        inputs[m]: microbatch m's input; only the first part reads it. Microbatches may differ in size.
        shape(m): shape and dtype of what travels from part to part for microbatch m.
        loss(last_part, y, m): a scalar from what the last part returned; called where that part is (without wrapper).
        scale: of each loss for its backward (half precision); what is returned is not scaled.
        Gradients are added to `.grad`. ValueError if a part returns another shape than travels.
        """
        execution = _Execution(self, inputs, shape, loss, train=True, scale=scale)
        total = execution.run()
        self.peak_in_flight = execution.peak * self.schedule.ranks / self.schedule.num_parts
        return total

    @torch.no_grad()
    def evaluate(self, inputs: Sequence[Tensor], shape: Shape, loss: Loss) -> Tensor:
        """The forward half of `step`: the sum of the losses and no gradients."""
        return _Execution(self, inputs, shape, loss, train=False).run()

    def finish(self) -> None:
        """Adds up the gradients of parameters that are in several places: tied embeddings (names in a part's `tied`)
        and, with DualPipe, whole parts. One exchange; nothing if there are none. Call it after `step`."""
        self._shared.add_up()

    def owned(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's named parameters without those that an earlier place holds too: over all ranks each parameter of
        the model once. For norms of the whole gradient, counts and checkpoints."""
        return self._shared.owned()


class _Execution:
    """The schedule, run once. values: what was made, or is under way, by (is it a gradient?, microbatch, the part that
    needs it)."""

    def __init__(
        self,
        pipeline: Pipeline,
        inputs: Sequence[Tensor],
        shape: Shape,
        loss: Loss,
        train: bool,
        scale: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        due = pipeline.schedule.microbatches
        if len(inputs) != due:
            raise ValueError(f"{len(inputs)} inputs for the {due} microbatches of {pipeline.schedule.name}: one each")
        self.pipeline, self.inputs, self.loss, self.train, self.scale = pipeline, inputs, loss, train, scale
        self.rank, self.device = pipeline.group.rank, pipeline.group.device
        self.travels = [shape(m) for m in range(due)]
        self.eager = all(size.numel() * dtype.itemsize <= EAGER_BYTES for size, dtype in self.travels)
        self.values: dict[tuple[bool, int, int], tuple[Tensor, Work | None]] = {}
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (microbatch, chunk): input and output
        self.stores: dict[tuple[int, int], Deferred] = {}
        self.under_way: deque[Work] = deque()
        self.total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.peak = 0

    def run(self) -> Tensor:
        for step in self.pipeline.program:
            if isinstance(step, Action):
                if self.train or step.kind == "F":
                    self.act(step)
            elif edges := step if self.train else [edge for edge in step if not edge.is_gradient]:
                self.post(edges)
        for handle in self.under_way:
            handle.wait()
        return self.pipeline.group.all_reduce(self.total)

    def act(self, action: Action) -> None:
        """Wait for what the action needs; then everything else is the action's own time."""
        pipeline, part = self.pipeline, self.pipeline.index[action.chunk]
        needed = self.take(action, part)
        reducing = _reducing(pipeline.parts[action.chunk], action in pipeline.last_gradient)
        with span(str(action)), pipeline.around(action), reducing:
            start = time.monotonic()
            _DO[action.kind](self, action, part, needed)
            if pipeline.pace:
                time.sleep(max(0.0, start + pipeline.pace(action) - time.monotonic()))

    def take(self, action: Action, part: int) -> Tensor | None:
        """F: its activation. B and I: the gradient of their output, None where that is the loss. W: None."""
        if action.kind == "F" and part == 0:
            return self.inputs[action.microbatch]
        if action.kind == "W" or (action.kind != "F" and part == self.pipeline.last_part):
            return None
        value, handle = self.values.pop((action.kind != "F", action.microbatch, part))
        if handle:
            handle.wait()
        return value

    def forward(self, action: Action, part: int, x: Tensor) -> None:
        m, module = action.microbatch, self.pipeline.parts[action.chunk]
        if self.train and part:
            x.requires_grad_()
        y = module(x)
        if part == self.pipeline.last_part:
            y = self.loss(unwrapped(module), y, m)
            self.total += y.detach()
            y = self.scale(y) if self.scale else y
        else:
            self.check_shape(y, m, part)
            self.values[False, m, part + 1] = y.detach(), None
        if self.train:
            self.kept[m, action.chunk] = x, y
            self.peak = max(self.peak, len(self.kept) + len(self.stores))

    def backward(self, action: Action, part: int, gradient: Tensor | None) -> None:
        m = action.microbatch
        x, y = self.kept.pop((m, action.chunk))
        if y.requires_grad:
            torch.autograd.backward(y, gradient)
        if part:
            self.values[True, m, part - 1] = torch.zeros_like(x) if x.grad is None else x.grad, None

    def input_gradient(self, action: Action, part: int, gradient: Tensor | None) -> None:
        store = Deferred()
        with deferred(store):
            self.backward(action, part, gradient)
        self.stores[action.microbatch, action.chunk] = store

    def weight_gradient(self, action: Action, part: int, _: None) -> None:
        self.stores.pop((action.microbatch, action.chunk)).run()

    def post(self, edges: list[Edge]) -> None:
        """Send what this rank made and make room for what others send: one exchange, waited for when it is needed."""
        sends, receives, keys = [], [], []
        for edge in edges:
            (rank, action), m = edge.target, edge.target.action.microbatch
            key = edge.is_gradient, m, self.pipeline.schedule.part_of[Place(rank, action.chunk)]
            if edge.source.rank == self.rank:
                sends.append((self.values.pop(key)[0], rank))
            else:
                size, dtype = self.travels[m]
                receives.append((torch.empty(size, dtype=dtype, device=self.device), edge.source.rank))
                keys.append(key)
        if len(self.under_way) >= UNDER_WAY:
            self.under_way.popleft().wait()
        handle = self.pipeline.group.exchange(send=sends, recv=receives, async_op=True, eager=self.eager)
        self.under_way.append(handle)
        for key, (buffer, _) in zip(keys, receives, strict=True):
            self.values[key] = buffer, handle

    def check_shape(self, y: Tensor, m: int, part: int) -> None:
        size, dtype = self.travels[m]
        if not isinstance(y, Tensor):
            raise ValueError(
                f"rank {self.rank}: part {part} returned a {type(y).__name__}, but one tensor travels from part to "
                "part: return one tensor, and let the next part compute or look up the rest"
            )
        if y.shape != size or y.dtype != dtype:
            raise ValueError(
                f"rank {self.rank}: part {part} returned {list(y.shape)} {y.dtype} for microbatch {m}, but "
                f"{list(size)} {dtype} travels from part to part: make shape({m}) and the parts agree"
            )


# Not bound methods in an attribute: the cycle would keep a step's activations until Python collects garbage.
_DO = {
    "F": _Execution.forward,
    "B": _Execution.backward,
    "I": _Execution.input_gradient,
    "W": _Execution.weight_gradient,
}


def unwrapped(part: nn.Module) -> nn.Module:
    """The module inside a wrapper such as BucketedDDP, which has the part's own names and methods."""
    return part.module if isinstance(getattr(part, "reducer", None), Reducer) else part


def _nothing_around(action: Action) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


@contextlib.contextmanager
def _reducing(part: nn.Module, last: bool) -> Iterator[None]:
    """Data parallel parts keep silent in all actions but the last one that adds to their gradients."""
    reducer = getattr(part, "reducer", None)
    if not isinstance(reducer, Reducer):
        yield
    elif not last:
        with part.no_sync():
            yield
    else:
        reducer.expect()
        yield
        part.finish()


def _check_fit(parts: Sequence[nn.Module], schedule: Schedule, group: Group) -> None:
    if schedule.ranks != group.world_size:
        raise ValueError(
            f"{schedule.name} is made for {schedule.ranks} stages, but group {group.name!r} has {group.world_size} "
            "ranks: make the schedule with as many stages as ranks"
        )
    chunks = len([place for place in schedule.part_of if place.rank == group.rank])
    if len(parts) != chunks:
        raise ValueError(
            f"rank {group.rank} has {len(parts)} parts, but {schedule.name} gives each rank {chunks}: "
            "pass the part of every chunk, in order"
        )
    if any(action.kind == "U" for action in schedule.actions(group.rank)):
        raise ScheduleError(
            f"{schedule.name} updates weights while microbatches are under way, which needs old versions of them: "
            "run a schedule without U, such as 1f1b"
        )
    if any(isinstance(part, nn.parallel.DistributedDataParallel) for part in parts):
        raise ValueError("a part is wrapped in torch's DDP, which reduces in every backward: use BucketedDDP")
