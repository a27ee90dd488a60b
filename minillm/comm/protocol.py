"""What the parts of `comm` need of each other, so that none has to import the one that imports it."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from minillm.comm.operation import Operation
from minillm.comm.scratch import Scratch
from minillm.comm.work import Work

Message = tuple[torch.Tensor, int]  # (tensor, rank in the group)


class Ranks(Protocol):
    """Numbered ranks that exchange messages: all that an algorithm needs. A `Group`, or some ranks of one."""

    rank: int
    world_size: int
    scratch: Scratch
    cuts_messages: bool

    def exchange(self, send: Any = (), recv: Any = ()) -> Any: ...


class Communicator(Ranks, Protocol):
    """What a collective and a backend need of a `Group`."""

    name: str
    device: torch.device

    def run(
        self, op: str, x: torch.Tensor, body: Callable[[], Any], async_op: bool = ..., same: bool = ..., how: str = ...
    ) -> Any: ...
    def check_rank(self, what: str, rank: int) -> None: ...
    def assume(self, num_bytes: int) -> None: ...


class Transfer(Protocol):
    """Messages under way."""

    def done(self) -> bool: ...
    def wait(self) -> None: ...


class Backend(Protocol):
    """What carries a group's operations. `cpu.CpuBackend` sends messages; `native.NativeBackend` calls torch's own."""

    cuts_messages: bool  # whether large messages go in pieces
    launches: bool  # whether an operation goes on when its call has returned

    def run(self, operation: Operation, body: Callable[[], Any], async_op: bool, own: bool = ...) -> Any:
        """Run the body as one collective: its result, or a Work for it. own: it is one of those below."""

    def post(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int, eager: bool) -> Transfer:
        """Messages that belong to the collective with this tag."""

    def deliver(self, operation: Operation, sends: Sequence[Message], recvs: Sequence[Message], eager: bool) -> Work:
        """Messages that are an operation of their own."""

    def blocking(self, call: Callable[[], Any]) -> Any:
        """A call of torch's that waits for other ranks, with its errors told apart."""

    def connect(self) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...
    def barrier(self) -> None: ...
    def gather_objects(self, value: Any) -> list[Any]: ...
    def all_reduce(self, x: torch.Tensor, group: Communicator, op: str) -> Any: ...
    def broadcast(self, x: torch.Tensor, group: Communicator, root: int) -> Any: ...
    def all_gather(self, x: torch.Tensor, group: Communicator, out: torch.Tensor | None) -> Any: ...
    def reduce_scatter(self, x: torch.Tensor, group: Communicator, op: str, out: torch.Tensor | None) -> Any: ...
    def all_to_all(
        self, x: torch.Tensor, group: Communicator, output_splits: list[int] | None, input_splits: list[int] | None
    ) -> Any: ...
