"""A group of ranks: the only way anything in minillm communicates.

`Group` wraps a torch.distributed process group. Each collective is two steps: an `Operation`, which stands for the call
in the ledger, on the flight recorder and in the comparison with the other ranks, and the backend that carries it out:
messages of our own on the CPU, torch's asynchronous calls on NCCL.

Conventions are torch's: `all_reduce` and `broadcast` work in place and return their tensor, the others return a new
one; `async_op=True` returns a `Work` at once. Ranks in calls (`root`, `src`, `dst`) are ranks inside the group.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from minillm.comm.backends.cpu import CpuBackend
from minillm.comm.backends.native import NativeBackend
from minillm.comm.diagnostics.mismatch import MismatchCheck
from minillm.comm.operands import Scratch, checked_splits, part_shape
from minillm.comm.operation import Current, Operation, Work
from minillm.comm.ranks import NOTHING, Ranks
from minillm.comm.world import TORCH_TIMEOUT_S, World, backend_name, world_around
from minillm.measure.ledger import new_event


class Group(Ranks):
    """A set of ranks that communicate. rank: this rank's place in it (-1 outside); ranks: the members' global ranks.

    ordinal: its number among this rank's groups, times 2.
    """

    def __init__(self, world: World, process_group: dist.ProcessGroup | None, ranks: Sequence[int], name: str) -> None:
        self.world, self.name, self.ranks, self.device = world, name, list(ranks), world.device
        self.process_group, self.world_size = process_group, len(self.ranks)
        self.rank = self.ranks.index(world.rank) if world.rank in self.ranks else -1
        self.backend = backend_name(process_group, self.device) if self.rank >= 0 else "none"
        self.scratch = Scratch()
        self.ordinal, self._num_operations, self._num_exchanges = world.next_ordinal(), 0, 0
        self._check = MismatchCheck(world.recorder, world.rank, self.ranks, name, self.ordinal)
        self._current = Current()
        self._backend: CpuBackend | NativeBackend | None = None
        if self.backend == "gloo":
            self._backend = CpuBackend(self)
        elif self.rank >= 0:
            self._backend = NativeBackend(process_group, self.device)
        self.cuts_messages = self.backend == "gloo" and world.egress is None  # each piece would pay a link's latency
        world.kept.append(self)

    @classmethod
    def from_process_group(
        cls,
        process_group: dist.ProcessGroup | None = None,
        name: str = "world",
        device: torch.device | str | None = None,
        timeout: float = TORCH_TIMEOUT_S,
    ) -> "Group":
        """A Group over ranks that somebody else has started: torchrun, `mp.spawn`, `accelerate launch`.

        process_group: torch's, None for the one of `init_process_group`. Every rank of it calls this.
        device: where its tensors are (`accelerator.device`); None for this process's GPU if the process group serves
        GPUs, else the CPU. timeout: seconds that a rank may wait in one operation before it raises HangError.
        """
        world, process_group = world_around(process_group, device, timeout)
        return cls(world, process_group, dist.get_process_group_ranks(process_group), name)

    # Collectives: every rank of the group calls them in the same order.

    def all_reduce(self, x: torch.Tensor, op: str = "sum", async_op: bool = False) -> Any:
        """Every rank gets the sum (avg, max, min) over the ranks, in place. Same shape and dtype on every rank."""
        operation = self._operation("all_reduce", x, "" if op == "sum" else f"op={op}")
        return self._backend.all_reduce(operation, x, op, async_op)

    def broadcast(self, x: torch.Tensor, root: int = 0, async_op: bool = False) -> Any:
        """Every rank gets root's x, in place."""
        self.check_rank("root", root)
        operation = self._operation("broadcast", x, f"root={root}" if root else "")
        return self._backend.broadcast(operation, x, root, async_op)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None, async_op: bool = False) -> Any:
        """x: [n, ...] on each rank -> [world_size * n, ...]: the ranks' tensors in rank order."""
        operation = self._operation("all_gather", x, same_shape=out is None)
        return self._backend.all_gather(operation, x, out, async_op)

    def reduce_scatter(
        self, x: torch.Tensor, op: str = "sum", async_op: bool = False, out: torch.Tensor | None = None
    ) -> Any:
        """x: [world_size * n, ...] on each rank -> [n, ...]: this rank's part of the sum over the ranks.

        out: where to put it (contiguous, n elements); it may be this rank's part of x itself.
        """
        part = part_shape(x, self.world_size, "reduce_scatter")
        operation = self._operation("reduce_scatter", x, "" if op == "sum" else f"op={op}")
        return self._backend.reduce_scatter(operation, x, part, op, out, async_op)

    def all_to_all(
        self,
        x: torch.Tensor,
        async_op: bool = False,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> Any:
        """x: [world_size * n, ...]: part j goes to rank j; the result holds part `rank` of every rank.

        input_splits[j]: rows that go to rank j; output_splits[i]: rows that come from rank i; None: equal parts.
        """
        splits = checked_splits(x, self.world_size, output_splits, input_splits)
        operation = self._operation("all_to_all", x, same_shape=splits == (None, None))
        return self._backend.all_to_all(operation, x, splits, async_op)

    def barrier(self) -> None:
        """Return when every rank of the group has called it."""
        operation = self._operation("barrier", NOTHING, blocks=True)
        self._backend.barrier(operation)

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank gets the list of all ranks' (small, picklable) values, in rank order."""
        operation = self._operation("gather_objects", NOTHING, blocks=True)
        return self._backend.gather_objects(operation, value)

    def run(
        self,
        op: str,
        x: torch.Tensor,
        body: Callable[[], Any],
        async_op: bool = False,
        same_shape: bool = True,
        how: str = "",
    ) -> Any:
        """Run `body` as one collective called `op`: all messages and collectives inside it are counted as part of it.

        same_shape: x has the same shape on every rank, so that a rank with another one can be named. how: what else
        has to be equal (op, root). Asynchronous ones run one after the other: on the CPU in a thread of this group, on
        a GPU on a stream of it.
        """
        if self._current.operation is not None:
            result = body()
            work = result if isinstance(result, Work) else Work(lambda: result)
            return work if async_op else work.wait()
        operation = self._operation(op, x, how, same_shape)
        return self._backend.run(operation, x, body, async_op)

    def _operation(
        self, op: str, x: torch.Tensor, how: str = "", same_shape: bool = True, blocks: bool = False
    ) -> Operation:
        """What diagnostics and ledger know of a call: a new operation, or the one that this thread is in.

        how, same_shape: as in `run`. blocks: the host waits for it on any backend.
        """
        if (running := self._current.operation) is not None:
            return running
        if self._backend is None:
            self._check_member(op)
        text = self._check.describe(op, how, x.shape if same_shape else None, x.dtype)
        event = new_event(op, self.name, x, self.world.egress is not None)
        launches = self._backend.launches and not blocks
        self._num_operations += 1
        return Operation(self._check, self._current, self.ordinal, self._num_operations, text, event, launches)
