"""What one group says on the notice board, and what it reads there about the others.

Before a rank waits it writes down what for, and compares that with what the others have written: ranks that do not mean
the same get one sentence instead of a hang. A rank that has waited too long prints the board as a table.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from minillm.comm.diagnostics.hang_report import waiting_table
from minillm.comm.errors import HangError, MismatchError
from minillm.comm.operands import dtype_name

if TYPE_CHECKING:
    from minillm.comm.messages import Message
    from minillm.comm.world import World


class Notices:
    """The notices of the group `name` with these global ranks; ordinal: its number on the board."""

    def __init__(self, world: "World", ranks: Sequence[int], name: str, ordinal: int) -> None:
        self._world, self._ranks, self._name, self._ordinal = world, ranks, name, ordinal
        self._messages: Counter[tuple[bool, int]] = Counter()  # (sending?, peer) -> messages so far

    def during(self, ordinal: int, sequence: int, text: bytes, body: Callable[[], Any]) -> Any:
        """body(), with a notice up while it runs. HangError, with the table: it waited too long."""
        board, me = self._world.board, self._world.rank
        if board is None:
            return body()
        board.post(me, ordinal, sequence, text)
        waiting = False
        try:
            if ordinal == self._ordinal:
                self._compare(sequence, text)
            return body()
        except RuntimeError as error:
            waiting = any(sign in str(error) for sign in ("imed out", "timeout"))
            if not waiting:
                raise
            table = waiting_table(board)
            message = f"rank {me} waited too long in group {self._name!r}. Who waits for whom:\n\n{table}\n"
            raise HangError(message, table) from None
        finally:
            if not waiting:  # after a hang it stays there, for the others' tables
                board.clear(me, ordinal)

    def _compare(self, sequence: int, text: bytes) -> None:
        """MismatchError if another rank has said something else about this collective."""
        board, me = self._world.board, self._world.rank
        for rank in self._ranks:
            if rank == me or not board.has(rank):
                continue
            if (other := board.conflict(rank, self._ordinal, sequence, text)) is not None:
                mine = board.posted_in(me, self._ordinal)
                raise MismatchError(
                    f"operation {sequence} of group {self._name!r} is {mine} on rank {me} "
                    f"but {other} on rank {rank}: all ranks must call the same operation with the same shape and dtype"
                )

    def compare_messages(self, sends: Sequence["Message"], recvs: Sequence["Message"]) -> None:
        """MismatchError if the other side of a message has said something else about it."""
        board, me = self._world.board, self._world.rank
        for sending, messages in ((True, sends), (False, recvs)):
            for x, peer in messages:
                self._messages[sending, peer] += 1
                if board is None or not board.has(self._ranks[peer]):
                    continue
                number, mine = self._messages[sending, peer], f"{x.numel()} {dtype_name(x)} in {list(x.shape)}"
                theirs = board.note_message(me, self._ranks[peer], sending, self._ordinal, number, mine)
                if theirs and theirs.split(" ")[:2] != mine.split(" ")[:2]:  # messages may change shape, but not size
                    verb, other = ("sends", "expects") if sending else ("expects", "sends")
                    raise MismatchError(
                        f"message {number} in group {self._name!r}: rank {me} {verb} {mine}, "
                        f"but rank {self._ranks[peer]} {other} {theirs}"
                    )
