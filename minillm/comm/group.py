"""A group of ranks: the only way anything in minillm communicates.

`Group` wraps a torch.distributed process group. Each collective is two steps: an `Operation`, which stands for the call
in the ledger, on the flight recorder and in the comparison with the other ranks, and the backend that carries it out:
messages of our own on the CPU, torch's asynchronous calls on NCCL.

Conventions are torch's: `all_reduce` and `broadcast` work in place and return their tensor, the others return a new
one; `async_op=True` returns a `Work` at once. Ranks in calls (`root`, `src`, `dst`) are ranks inside the group.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from minillm.comm.backends.cpu import CpuBackend
from minillm.comm.backends.native import NativeBackend
from minillm.comm.diagnostics.flight_recorder import describe
from minillm.comm.diagnostics.mismatch import MismatchCheck
from minillm.comm.operands import Scratch, check_messages, check_splits, dtype_name, part_shape
from minillm.comm.operation import Backend, Current, Message, Operation, Work
from minillm.comm.world import World, backend_name, backends, joined_world
from minillm.measure.ledger import new_event

TORCH_TIMEOUT_S = 1800.0  # torch's own default


class Group:
    """A set of ranks that communicate. rank: this rank's place in it (-1 outside); ranks: the members' global ranks."""

    def __init__(self, world: World, process_group: dist.ProcessGroup | None, ranks: Sequence[int], name: str) -> None:
        self.world, self.name, self.ranks, self.device = world, name, list(ranks), world.device
        self.process_group, self.world_size = process_group, len(self.ranks)
        self.rank = self.ranks.index(world.rank) if world.rank in self.ranks else -1
        self.backend = backend_name(process_group, self.device) if self.rank >= 0 else "none"
        self.scratch = Scratch()
        self._ordinal, self._sequence, self._p2p_sequence = world.next_ordinal(), 0, 0
        self._check = MismatchCheck(world.recorder, world.rank, self.ranks, name, self._ordinal)
        self._current = Current()
        self._emulated = world.egress is not None
        self._backend: Backend | None = None
        if self.backend == "gloo":
            self._backend = CpuBackend(process_group, self.ranks, world, name, self._ordinal)
        elif self.rank >= 0:
            self._backend = NativeBackend(process_group, self.device)
        self.cuts_messages = self._backend is not None and self._backend.cuts_messages
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
        if not dist.is_initialized():
            raise ValueError("no process group yet: call torch.distributed.init_process_group() or Accelerator() first")
        if process_group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"rank {dist.get_rank()} is not in the process group: only its members make a Group of it")
        process_group = process_group or dist.group.WORLD
        gpus = torch.cuda.is_available() and "cuda" in backends(process_group)
        device = torch.device(device if device is not None else "cuda" if gpus else "cpu")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        world = joined_world(process_group, device, timeout)
        return cls(world, process_group, dist.get_process_group_ranks(process_group), name)

    def __repr__(self) -> str:
        return f"Group({self.name!r}, rank {self.rank} of {self.world_size}, global ranks {self.ranks}, {self.device})"

    def finish(self) -> None:
        """Returns when this rank's asynchronous operations are over. No more may follow."""
        if self._backend is not None:
            self._backend.finish()

    def release(self) -> None:
        """Lets go of threads, connections and what is torch's, when no other rank needs them any more."""
        self.process_group = None
        if self._backend is not None:
            self._backend.close()
            self._backend = None

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
        part_shape(x, self.world_size, "reduce_scatter")
        operation = self._operation("reduce_scatter", x, "" if op == "sum" else f"op={op}")
        return self._backend.reduce_scatter(operation, x, op, out, async_op)

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
        check_splits(x, self.world_size, output_splits, input_splits)
        splits = tuple(rows if rows is None else list(rows) for rows in (output_splits, input_splits))
        operation = self._operation("all_to_all", x, same_shape=splits == (None, None))
        return self._backend.all_to_all(operation, x, splits, async_op)

    def barrier(self) -> None:
        """Return when every rank of the group has called it."""
        operation = self._operation("barrier", _NOTHING, blocks=True)
        self._backend.barrier(operation)

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank gets the list of all ranks' (small, picklable) values, in rank order."""
        operation = self._operation("gather_objects", _NOTHING, blocks=True)
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

    def subgroup(self, ranks: Sequence[int], name: str) -> "Group":
        """A group of some ranks of this one. Every rank of the *world* calls it, members or not."""
        if not ranks or len(set(ranks)) != len(ranks):
            raise ValueError(f"ranks {list(ranks)} of group {name!r} must be different ranks, at least one")
        for rank in ranks:
            self.check_rank("rank", rank)
        if list(ranks) != sorted(ranks):
            raise ValueError(f"ranks {list(ranks)} of group {name!r} must ascend: torch numbers a group's ranks so")
        members, everybody = [self.ranks[rank] for rank in ranks], list(range(dist.get_world_size()))
        text = describe("make group", [0], "", everybody, name)
        backend = None if self.backend in ("none", dist.get_backend()) else self.backend
        operation = Operation(self, self._check, self._current, 0, 2 + self.world.groups, text, event=None)
        with operation, self._backend.torch_errors() if self._backend else nullcontext():
            process_group = dist.new_group(members, timeout=self.world.timeout, backend=backend)
        return Group(self.world, process_group, members, name)

    # Point-to-point messages.

    def send(self, x: torch.Tensor, dst: int, async_op: bool = False) -> Any:
        """Send x to rank dst, which receives into a tensor of the same shape and dtype."""
        return self.exchange(send=(x, dst), async_op=async_op)

    def recv(self, x: torch.Tensor, src: int, async_op: bool = False) -> Any:
        """Receive into x (contiguous) from rank src."""
        return self.exchange(recv=(x, src), async_op=async_op)

    def connect(self) -> None:
        """Opens connections of their own for `eager` messages, once. Every rank of the group calls it."""
        if self._backend is not None:
            self._backend.connect()

    def exchange(
        self,
        send: Message | Sequence[Message] = (),
        recv: Message | Sequence[Message] = (),
        async_op: bool = False,
        eager: bool = False,
    ) -> Any:
        """Send and receive at once, so that no order can deadlock. Each side is one (tensor, rank) or a list of them.

        Returns when every message has been delivered (`async_op`: a Work for that).
        eager, on both sides, after `connect`: a message leaves at once, whether or not the other side asks for it yet,
        and no thread carries it, which takes a fraction of the time of a small one. A message that does not fit into
        the connection's buffer (4 MB) holds its sender up until it does.
        """
        sends, recvs = _as_list(send), _as_list(recv)
        self._check_member("send or recv")
        check_messages(self, sends, recvs)
        operation = self._current.operation or self._message_operation(sends, recvs)
        if operation.event is not None:
            operation.event.bytes += sum(x.nbytes for x, _ in sends)
            operation.event.messages += sum(x.numel() > 0 for x, _ in sends)
        work = self._backend.exchange(operation, sends, recvs, eager)
        return work if async_op else work.wait()

    # An operation: what the diagnostics and the ledger know of a call.

    def _operation(
        self, op: str, x: torch.Tensor, how: str = "", same_shape: bool = True, blocks: bool = False
    ) -> Operation:
        """A new operation; inside another one, that one: a collective inside a collective is part of it.

        how, same_shape: as in `run`. blocks: the host waits for it on any backend.
        """
        if self._current.operation is not None:
            return self._current.operation
        if self._backend is None:
            self._check_member(op)
        key = op, how, x.shape if same_shape else None, x.dtype
        text = self._check.texts.get(key) or self._check.describe(*key)
        event = new_event(op, self.name, x, self._emulated)
        launches = self._backend.launches and not blocks
        self._sequence += 1
        return Operation(self, self._check, self._current, self._ordinal, self._sequence, text, event, launches)

    def _message_operation(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Operation:
        """Messages outside a collective are an operation of their own, compared with the other side's."""
        self._check.compare_messages(sends, recvs)
        op = "exchange" if sends and recvs else "send" if sends else "recv"
        x, _ = (sends or recvs or [(_NOTHING, 0)])[0]
        waits_for = sorted({self.ranks[peer] for _, peer in recvs or sends})
        text = describe(op, list(x.shape), dtype_name(x), self.ranks, self.name, waits_for)
        event = new_event(op, self.name, x, self._emulated)
        ordinal, self._p2p_sequence = self._ordinal + 1, self._p2p_sequence + 1
        launches = self._backend.launches
        return Operation(self, self._check, self._current, ordinal, self._p2p_sequence, text, event, launches)

    # Bad input, in one sentence.

    def check_rank(self, what: str, rank: int) -> None:
        if rank not in range(self.world_size):
            raise ValueError(f"{what}={rank} is not in group {self.name!r}: its ranks are 0 to {self.world_size - 1}")

    def _check_member(self, op: str) -> None:
        if self.rank < 0:
            raise ValueError(
                f"rank {self.world.rank} called {op} on group {self.name!r}, which it is not in (members: {self.ranks})"
            )
        if self._backend is None:
            raise ValueError(f"group {self.name!r} has ended with its mesh, so there is no {op}: close the mesh later.")


_NOTHING = torch.empty(0)


def _as_list(messages: Message | Sequence[Message]) -> list[Message]:
    is_one = len(messages) == 2 and isinstance(messages[0], torch.Tensor)
    return [messages] if is_one else list(messages)
