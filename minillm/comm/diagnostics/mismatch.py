"""Whether ranks call the same operations: each announces its own before it waits, and looks at what others announced.

Ranks that call different ones get a sentence that names both instead of a hang.
"""

from collections import Counter
from collections.abc import Sequence

import torch

from minillm.comm.diagnostics.flight_recorder import FlightRecorder, describe
from minillm.comm.diagnostics.hang_report import hang_report
from minillm.comm.errors import HangError, MismatchError

KNOWN_TEXTS = 1024


class MismatchCheck:
    """Rank `me`'s announcements in group `name` of these global ranks. ordinal: the group's number on the recorder."""

    def __init__(self, recorder: FlightRecorder, me: int, ranks: Sequence[int], name: str, ordinal: int) -> None:
        self._recorder, self._me, self._ranks, self._name, self._ordinal = recorder, me, ranks, name, ordinal
        self._others = [rank for rank in ranks if rank != me and recorder.has(rank)]
        self._messages: Counter[tuple[bool, int]] = Counter()  # (sending?, peer) -> messages so far
        self._texts: dict[tuple, bytes] = {}  # arguments of `describe` -> what it returned
        self._notes: dict[tuple, bytes] = {}  # (shape, dtype) of a message -> what ranks note about it

    def describe(
        self,
        op: str,
        how: str,
        shape: torch.Size | None,
        dtype: torch.dtype,
        waits_for: tuple[int, ...] | None = None,
    ) -> bytes:
        """The text of an operation, by which ranks compare it; kept, since a training step repeats its own.

        how: what else has to be equal, such as "root=1". shape: None if ranks may have different ones. waits_for: the
        global ranks at the other end of messages; None for a collective."""
        key = op, how, shape, dtype, waits_for
        text = self._texts.get(key)
        if text is None:
            if len(self._texts) >= KNOWN_TEXTS:
                self._texts.clear()
            sizes, name = [0] if shape is None else list(shape), str(dtype).removeprefix("torch.")
            peers = None if waits_for is None else list(waits_for)
            text = describe(f"{op}({how})" if how else op, sizes, name, self._ranks, self._name, peers)
            self._texts[key] = text
        return text

    def announce(self, ordinal: int, sequence: int, text: bytes, launched: bool = False) -> None:
        """Post an operation. MismatchError if another rank has posted another text for this collective."""
        recorder = self._recorder
        recorder.post(self._me, ordinal, sequence, text, launched)
        if ordinal != self._ordinal:
            return
        if (conflict := recorder.conflict(self._others, ordinal, sequence, text)) is not None:
            rank, other = conflict
            mine = recorder.posted_in(self._me, ordinal)
            raise MismatchError(
                f"operation {sequence} of group {self._name!r} is {mine} on rank {self._me} "
                f"but {other} on rank {rank}: all ranks must call the same operation with the same shape and dtype"
            )

    def withdraw(self, ordinal: int, sequence: int) -> None:
        """Say that the operation is over."""
        self._recorder.clear(self._me, ordinal, sequence)

    def hang(self) -> HangError:
        """The error of a rank that has waited too long."""
        table = hang_report(self._recorder)
        return HangError(
            f"rank {self._me} waited too long in group {self._name!r}. Who waits for whom:\n\n{table}\n", table
        )

    def compare_messages(
        self, sends: Sequence[tuple[torch.Tensor, int]], recvs: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        """MismatchError if the other side of a message has noted another size or dtype for it."""
        recorder, me = self._recorder, self._me
        for sending, messages in ((True, sends), (False, recvs)):
            for x, peer in messages:
                number = self._messages[sending, peer] = self._messages[sending, peer] + 1
                if (rank := self._ranks[peer]) not in self._others:
                    continue  # on another machine
                mine = self._notes.get((x.shape, x.dtype)) or self._note(x)
                theirs = recorder.note_message(me, rank, sending, self._ordinal, number, mine)
                if theirs in (None, mine) or theirs.split(b" ")[:2] == mine.split(b" ")[:2]:
                    continue  # messages may change shape, but not size
                verb, other = ("sends", "expects") if sending else ("expects", "sends")
                raise MismatchError(
                    f"message {number} in group {self._name!r}: rank {me} {verb} {mine.decode()}, "
                    f"but rank {rank} {other} {theirs.decode(errors='replace')}"
                )

    def _note(self, x: torch.Tensor) -> bytes:
        """What ranks note about a message, which is kept."""
        if len(self._notes) >= KNOWN_TEXTS:
            self._notes.clear()
        note = f"{x.numel()} {str(x.dtype).removeprefix('torch.')} in {list(x.shape)}".encode()
        self._notes[x.shape, x.dtype] = note
        return note
