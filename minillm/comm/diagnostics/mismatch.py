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
        self.texts: dict[tuple, bytes] = {}  # (op, how, shape, dtype) -> text

    def describe(self, op: str, how: str, shape: torch.Size | None, dtype: torch.dtype) -> bytes:
        """The text of a collective, by which ranks compare it; kept, since a training step repeats its own.

        how: what else has to be equal, such as "root=1". shape: None if ranks may have different ones."""
        if len(self.texts) >= KNOWN_TEXTS:
            self.texts.clear()
        sizes, name = [0] if shape is None else list(shape), str(dtype).removeprefix("torch.")
        text = describe(f"{op}({how})" if how else op, sizes, name, self._ranks, self._name)
        self.texts[op, how, shape, dtype] = text
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
                self._messages[sending, peer] += 1
                if not recorder.has(self._ranks[peer]):
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
