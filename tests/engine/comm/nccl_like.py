"""A torch process group on the CPU that keeps NCCL's rules, and fails with a sentence where a program breaks one.

    launched    the operation is announced; its outputs hold garbage (NaN, -1); its inputs are hashed
    worked off  by a thread that stands for the device, one operation of a communicator after the other
    waited for  only now the outputs are there; inputs and outputs must not have been touched meanwhile

The rules, as of NCCL through `torch.distributed`:

- Collectives and batches of messages of one communicator run in the order in which they were launched, and that order
  is the same on every rank.
- What is not waited for is not there, and inputs stay as they are until then.
- Messages outside `batch_isend_irecv` have a communicator for each pair of ranks: the next operation of the one has to
  be the counterpart of the next operation of the other.
- One thread launches. Autograd runs backward on the CPU in the thread that called it; on a GPU it has a thread per
  device, which Python did not start. So the rule is: the thread that launched first, or one that Python did not start;
  never a thread of a pool.
- Every operation is waited for; `unwaited` tells which were not.

It is stricter than NCCL in one way: `wait` holds up the host as well. What it cannot see, and `tests/engine/node`
does, whose process group is built on this one:

- streams: whether a kernel waits for the operation whose result it reads, `record_stream`, which stream launches;
- lifetimes: a `Work` here holds its tensors, so it misses memory that is freed too early or kept too long;
- the order between communicators: each has a thread of its own, so any two orders come to an end;
- devices: tensors are the CPU's; host waits and copies between host and device do not exist;
- CUDA graphs: a capture, and the collectives that a replay carries out again.

Neither of them sees time, dtypes or alignments that NCCL lacks, the memory that NCCL itself takes, or a
fault of a link. Both are stricter with messages: small ones of NCCL may pass without their receiver.
"""

import ctypes
import os
import queue
import threading
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from minillm.comm import Group
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.hybrid import make_strategy
from minillm.train.strategies.single_device import SingleDevice

NAME = "nccl_like"
TIMEOUT = timedelta(seconds=float(os.environ.get("NCCL_LIKE_TIMEOUT_S", 60)))
TEXT_BYTES = 128
_REDUCE = {
    dist.ReduceOp.SUM: lambda parts: sum(parts[1:], parts[0].clone()),
    dist.ReduceOp.AVG: lambda parts: sum(parts[1:], parts[0].clone()) / len(parts),
    dist.ReduceOp.MAX: lambda parts: torch.stack(parts).amax(0),
    dist.ReduceOp.MIN: lambda parts: torch.stack(parts).amin(0),
}


class RuleBroken(RuntimeError):
    """A program does what NCCL does not forgive."""


class Work(dist.Work):
    """One operation. run: what the device does with copies of the inputs; returns the outputs' values."""

    def __init__(
        self, group: "NcclLike", text: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], run: Any
    ) -> None:
        super().__init__()
        self.text, self._group, self._run = text, group, run
        self._inputs, self._outputs = [x.detach() for x in inputs], [x.detach() for x in outputs]
        self._copies = [x.clone() for x in self._inputs]
        for x in self._outputs:
            _spoil(x)
        self._before = [_hash(x) for x in (*self._inputs, *self._outputs)]
        self._finished, self._error, self._values = threading.Event(), None, []
        self.waited = False

    def work_off(self) -> None:
        """In the device's thread."""
        try:
            self._values = self._run(self._copies)
        except RuleBroken as error:
            self._error = error
        except RuntimeError as error:
            self._error = RuleBroken(f"{self.text} never came to an end on rank {self._group.rank()}: {error}")
        self._finished.set()

    def wait(self, timeout: timedelta = TIMEOUT) -> bool:
        self._group.check_thread(f"the wait for {self.text}")
        if self.waited:
            return True
        self.waited = True
        if not self._finished.wait(2 * TIMEOUT.total_seconds()):
            raise RuleBroken(f"{self.text} never came to an end on rank {self._group.rank()}")
        if self._error:
            raise self._error
        after = [_hash(x) for x in (*self._inputs, *self._outputs)]
        for place, (then, now) in enumerate(zip(self._before, after, strict=True)):
            if then != now:
                what = "an input" if place < len(self._inputs) else "an output"
                raise RuleBroken(f"{what} of {self.text} changed before the operation was waited for")
        for x, value in zip(self._outputs, self._values, strict=True):
            x.copy_(value.view(x.shape))
        return True

    def is_completed(self) -> bool:
        return self._finished.is_set()


class Stream:
    """Works off what it is given, in order, in a thread that stands for the device."""

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="device", daemon=True).start()

    def add(self, work: Work) -> Work:
        self._todo.put(work)
        return work

    def end(self) -> None:
        self._todo.put(None)

    def _work(self) -> None:
        while (work := self._todo.get()) is not None:
            work.work_off()
            del work  # or its tensors would live until the next one comes


class NcclLike(dist.ProcessGroup):
    """See above. Every rank of the group makes one."""

    made: ClassVar[list["NcclLike"]] = []

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, TIMEOUT)
        self._thread: threading.Thread | None = None
        self._stream, self._pairs, self._name = Stream(), {}, ""
        self.works: list[Work] = []
        NcclLike.made.append(self)

    # What torch asks a process group.

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    @property
    def group_name(self) -> str:
        self._name = dist.distributed_c10d._world.pg_names.get(self, self._name)  # torch asks when it has forgotten
        return self._name

    def shutdown(self) -> None:
        for stream in (self._stream, *self._pairs.values()):
            stream.end()
        self._gloo = None

    def _get_backend(self, device: torch.device) -> "NcclLike":
        return self

    def getBackendName(self) -> str:
        return NAME

    # Collectives.

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        (x,), op = tensors, opts.reduceOp.op
        return self._collective(f"all_reduce({op.name})", [x], [x], lambda copies: [self._reduced(copies[0], op)])

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        (x,), root = tensors, opts.rootRank
        inputs = [x] if self.rank() == root else []
        run = lambda copies: [self._gathered((copies or [torch.zeros_like(x)])[0])[root]]  # noqa: E731
        return self._collective(f"broadcast(root={root})", inputs, [x], run, like=x)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        return self._collective("all_gather", inputs, outputs[0], lambda copies: self._gathered(copies[0]))

    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Work:
        run = lambda copies: [torch.cat(self._gathered(copies[0].flatten()))]  # noqa: E731
        return self._collective("all_gather", [x], [output], run)

    def reduce_scatter_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any) -> Work:
        op = opts.reduceOp.op
        run = lambda copies: [self._reduced(copies[0], op).chunk(self.size())[self.rank()]]  # noqa: E731
        return self._collective(f"reduce_scatter({op.name})", [x], [output], run)

    def all_to_all_single(
        self, output: torch.Tensor, x: torch.Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Work:
        def run(copies: list[torch.Tensor]) -> list[torch.Tensor]:
            result = torch.empty_like(output)
            self._gloo.alltoall_base(result, copies[0], output_splits, input_splits).wait(TIMEOUT)
            return [result]

        return self._collective("all_to_all", [x], [output], run, like=x if not input_splits else torch.empty(0))

    def barrier(self, opts: Any = None) -> Work:
        return self._collective("barrier", [], [], lambda copies: [], like=torch.empty(0))

    # Names of torch before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    # Messages.

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Work:
        return self._alone("send to", tensors[0], dst, sending=True)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Work:
        return self._alone("recv from", tensors[0], src, sending=False)

    def batch(self, ops: Sequence[dist.P2POp]) -> list[Work]:
        """All messages of one `batch_isend_irecv`: one operation of the communicator."""
        sends = [(op.tensor, op.group_peer) for op in ops if op.op is dist.isend]
        recvs = [(op.tensor, op.group_peer) for op in ops if op.op is dist.irecv]

        def run(copies: list[torch.Tensor]) -> list[torch.Tensor]:
            arriving = [torch.empty_like(x) for x, _ in recvs]
            works = [self._gloo.recv([x], src, 1) for x, (_, src) in zip(arriving, recvs, strict=True)]
            works += [self._gloo.send([x], dst, 1) for x, (_, dst) in zip(copies, sends, strict=True)]
            for work in works:
                work.wait(TIMEOUT)
            return arriving

        text = f"batch(send to {[dst for _, dst in sends]}, recv from {[src for _, src in recvs]})"
        return [self._launch(self._stream, text, [x for x, _ in sends], [x for x, _ in recvs], run)]

    def _alone(self, text: str, x: torch.Tensor, peer: int, sending: bool) -> Work:
        """A message outside a batch: the other side's next operation has to be its counterpart."""
        stream, kinds = self._pairs.setdefault(peer, Stream()), ("send", "recv") if sending else ("recv", "send")

        def run(copies: list[torch.Tensor]) -> list[torch.Tensor]:
            what = f"{list(x.shape)} {x.dtype}"
            mine, counterpart, letters = f"{kinds[0]} {what}", f"{kinds[1]} {what}", _letters("")
            for work in [self._gloo.send([_letters(mine)], peer, 2), self._gloo.recv([letters], peer, 2)]:
                work.wait(TIMEOUT)
            if (theirs := _word(letters)) != counterpart:
                raise RuleBroken(
                    f"message between ranks {self.rank()} and {peer}: rank {self.rank()} has {mine} and rank {peer} "
                    f"has {theirs} next: unbatched, both would wait for ever"
                )
            value = copies[0] if sending else torch.empty_like(x)
            (self._gloo.send if sending else self._gloo.recv)([value], peer, 3).wait(TIMEOUT)
            return [] if sending else [value]

        return self._launch(stream, f"{text} {peer}", [x] if sending else [], [] if sending else [x], run)

    # How an operation runs.

    def _collective(
        self, op: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], run: Callable, like: Any = None
    ) -> Work:
        x = inputs[0] if like is None else like
        text = f"{op} {list(x.shape)} {str(x.dtype).removeprefix('torch.')}"

        def checked(copies: list[torch.Tensor]) -> list[torch.Tensor]:
            for rank, theirs in enumerate(map(_word, self._gathered(_letters(text)))):
                if theirs != text:
                    raise RuleBroken(
                        f"ranks run different operations: {text} on rank {self.rank()}, {theirs} on rank {rank}"
                    )
            return run(copies)

        return self._launch(self._stream, text, inputs, outputs, checked)

    def _launch(self, stream: Stream, text: str, inputs: Any, outputs: Any, run: Callable) -> Work:
        self.check_thread(text)
        work = stream.add(Work(self, text, inputs, outputs, run))
        self.works = [*(w for w in self.works if not w.waited), work]
        return work

    def check_thread(self, text: str) -> None:
        now = threading.current_thread()
        self._thread = self._thread or now
        if now is not self._thread and not isinstance(now, threading._DummyThread):
            raise RuleBroken(f"{text} comes from thread {now.name!r}, earlier operations from {self._thread.name!r}")

    def _gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x of every rank."""
        raw = x.contiguous().reshape(-1).view(torch.uint8)
        parts = [torch.empty_like(raw) for _ in range(self.size())]
        self._gloo.allgather([parts], [raw]).wait(TIMEOUT)
        return [part.view(x.dtype).view(x.shape) for part in parts]

    def _reduced(self, x: torch.Tensor, op: dist.ReduceOp) -> torch.Tensor:
        return _REDUCE[op](self._gathered(x))


def _spoil(x: torch.Tensor) -> None:
    x.fill_(float("nan") if x.is_floating_point() or x.is_complex() else 1 if x.dtype is torch.bool else -1)


def _hash(x: torch.Tensor) -> int:
    if x.untyped_storage().nbytes() == 0 and x.numel():
        return -1  # freed
    dense = x.contiguous()  # through .numpy() its memory could never be freed again
    return zlib.crc32((ctypes.c_char * dense.nbytes).from_address(dense.data_ptr())) if dense.nbytes else 0


def _letters(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8)


def _word(letters: torch.Tensor) -> str:
    return bytes(letters.tolist()).rstrip(b"\0").decode()


# Programs on it.


def unwaited() -> list[str]:
    """The operations of this process that nobody has waited for."""
    return [work.text for group in NcclLike.made for work in group.works if not work.waited]


def _register() -> None:
    """Tell torch about the backend, once in a process."""
    if NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, NcclLike, devices=["cpu"])
    batched = dist.batch_isend_irecv

    def batch_isend_irecv(ops: list[dist.P2POp]) -> list:
        return ops[0].group.batch(ops) if isinstance(ops[0].group, NcclLike) else batched(ops)

    dist.batch_isend_irecv = batch_isend_irecv


def nccl_like_group(group: Group) -> Group:
    """The same ranks as a group on this backend; its meshes and subgroups are on it too."""
    _register()
    process_group = dist.new_group(group.ranks, timeout=group.world.timeout, backend=NAME)
    return Group(group.world, process_group, group.ranks, group.name)


only_nccl_like_group = lru_cache(1)(nccl_like_group)  # one for all layouts of a launch


def make_nccl_like_strategy(group: Group, layout: ParallelConfig) -> SingleDevice:
    """For `compare`: on this backend; what an earlier layout did not wait for is an error now."""
    assert not unwaited(), unwaited()
    return make_strategy(only_nccl_like_group(group), layout)


def on_nccl_like(program: Callable) -> Callable:
    """For `launch`: the program, run on this backend; it fails if an operation is not waited for."""
    return partial(_run, program)


def _run(program: Callable, group: Group, *args: Any) -> Any:
    result = program(nccl_like_group(group), *args)
    if left := unwaited():
        raise RuleBroken(f"{len(left)} operations were never waited for: {', '.join(left[:5])}")
    return result
