"""Whether ranks mean the same: each says what it does before it waits, and looks at what the others have said.

Ranks that do not mean the same get one sentence that names both instead of a hang.
"""

from collections import Counter
from collections.abc import Sequence

import torch

from minillm.comm.diagnostics.flight_recorder import FlightRecorder
from minillm.comm.diagnostics.hang_report import hang_report
from minillm.comm.errors import HangError, MismatchError


class MismatchCheck:
    """What rank `me` says and reads in the group `name` of these global ranks; ordinal: its number on the recorder."""

    def __init__(self, recorder: FlightRecorder | None, me: int, ranks: Sequence[int], name: str, ordinal: int) -> None:
        self._recorder, self._me, self._ranks, self._name, self._ordinal = recorder, me, ranks, name, ordinal
        self._others = [rank for rank in ranks if recorder and rank != me and recorder.has(rank)]
        self._messages: Counter[tuple[bool, int]] = Counter()  # (sending?, peer) -> messages so far

    def enter(self, ordinal: int, sequence: int, text: bytes, launches: bool = False) -> None:
        """Announce an operation. MismatchError if another rank has said something else about this collective."""
        if self._recorder is None:
            return
        self._recorder.post(self._me, ordinal, sequence, text, launches)
        if ordinal != self._ordinal:
            return
        for rank in self._others:
            if (other := self._recorder.conflict(rank, ordinal, sequence, text)) is not None:
                mine = self._recorder.posted_in(self._me, ordinal)
                raise MismatchError(
                    f"operation {sequence} of group {self._name!r} is {mine} on rank {self._me} "
                    f"but {other} on rank {rank}: all ranks must call the same operation with the same shape and dtype"
                )

    def leave(self, ordinal: int, sequence: int) -> None:
        """Say that the operation is over."""
        if self._recorder is not None:
            self._recorder.clear(self._me, ordinal, sequence)

    def hang(self) -> HangError:
        """The error of a rank that has waited too long."""
        table = hang_report(self._recorder) if self._recorder else ""
        return HangError(
            f"rank {self._me} waited too long in group {self._name!r}. Who waits for whom:\n\n{table}\n", table
        )

    def compare_messages(
        self, sends: Sequence[tuple[torch.Tensor, int]], recvs: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        """MismatchError if the other side of a message has said something else about it."""
        recorder, me = self._recorder, self._me
        for sending, messages in ((True, sends), (False, recvs)):
            for x, peer in messages:
                self._messages[sending, peer] += 1
                if recorder is None or not recorder.has(self._ranks[peer]):
                    continue
                number = self._messages[sending, peer]
                mine = f"{x.numel()} {str(x.dtype).removeprefix('torch.')} in {list(x.shape)}"
                theirs = recorder.note_message(me, self._ranks[peer], sending, self._ordinal, number, mine)
                if theirs and theirs.split(" ")[:2] != mine.split(" ")[:2]:  # messages may change shape, but not size
                    verb, other = ("sends", "expects") if sending else ("expects", "sends")
                    raise MismatchError(
                        f"message {number} in group {self._name!r}: rank {me} {verb} {mine}, "
                        f"but rank {self._ranks[peer]} {other} {theirs}"
                    )
