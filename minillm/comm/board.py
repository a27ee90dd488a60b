"""The notice board: a small shared file on which every rank of a machine writes what it is doing.

A rank stuck in a collective cannot answer questions, so it writes down where it is *before* it waits. Reading the board
needs no help from anybody: that is how a hang becomes a table of who waits for whom, and how two ranks that call the
same collective with different shapes find out before they wait for each other for ever.

    slot of rank r:  pid | state | last sign of life | one record per group | one note per partner and direction
    record:          key (group, sequence number) | since | waiting? | JSON {"op", "shape", "dtype", "ranks", "name"}
    note:            key (group, message number) | what this rank sends to, or expects from, that partner

A record's key is written last and cleared first, so a reader never takes half an old and half a new text for one.
"""

import json
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

RECORDS, RECORD_BYTES, HEADER_BYTES = 32, 512, 64
NOTE_BYTES = 96
STARTING, RUNNING, FINISHED, RAISED = range(4)
_HEADER = struct.Struct("<iid")  # pid, state, last sign of life
_RECORD = struct.Struct("<iqdii")  # group ordinal, sequence number, since, waiting, length of the text
_NOTE = struct.Struct("<iqi")  # group ordinal, message number, length of the text
_NUMBER, _NUMBER_AT = struct.Struct("<q"), 4  # the second field of either


@dataclass(frozen=True)
class Posted:
    """The latest operation of one rank in one group. since: time.monotonic() seconds."""

    ordinal: int
    sequence: int
    since: float
    waiting: bool
    op: str
    shape: list[int]
    dtype: str
    ranks: list[int]
    name: str
    peers: list[int] | None

    @property
    def signature(self) -> tuple[str, list[int], str]:
        return (self.op, self.shape, self.dtype)

    def __str__(self) -> str:
        return f"{self.op} {self.shape} {self.dtype}"


class Board:
    """One slot per local rank. `first_rank` is the global rank of slot 0."""

    def __init__(self, path: str | Path, world_size: int, first_rank: int = 0) -> None:
        self.world_size, self.first_rank = world_size, first_rank
        self._slot_bytes = HEADER_BYTES + RECORDS * RECORD_BYTES + 2 * world_size * NOTE_BYTES
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            file.truncate(world_size * self._slot_bytes)
            self._map = mmap.mmap(file.fileno(), world_size * self._slot_bytes)

    def close(self) -> None:
        self._map.close()

    def has(self, rank: int) -> bool:
        return 0 <= rank - self.first_rank < self.world_size

    def set_state(self, rank: int, state: int) -> None:
        _HEADER.pack_into(self._map, self._slot(rank), os.getpid(), state, time.monotonic())

    def state(self, rank: int) -> tuple[int, int, float]:
        """(pid, state, last sign of life); the pid is 0 while the rank has not started."""
        return _HEADER.unpack_from(self._map, self._slot(rank))

    def post(self, rank: int, ordinal: int, sequence: int, text: bytes) -> None:
        """Say that `rank` enters operation number `sequence` of its group number `ordinal`."""
        at, now = self._record(rank, ordinal), time.monotonic()
        _RECORD.pack_into(self._map, at, ordinal, -1, now, 0, 0)
        text = text[: RECORD_BYTES - _RECORD.size]
        self._map[at + _RECORD.size : at + _RECORD.size + len(text)] = text
        _RECORD.pack_into(self._map, at, ordinal, -1, now, 1, len(text))
        _NUMBER.pack_into(self._map, at + _NUMBER_AT, sequence)  # last: now the record may be read

    def clear(self, rank: int, ordinal: int) -> None:
        """Say that `rank` has come out of its latest operation in this group."""
        at = self._record(rank, ordinal)
        now = time.monotonic()
        struct.pack_into("<i", self._map, at + 20, 0)  # the field `waiting`
        struct.pack_into("<d", self._map, self._slot(rank) + 8, now)

    def conflict(self, rank: int, ordinal: int, sequence: int, text: bytes) -> Posted | None:
        """What `rank` posted as the same operation of the same group, if it is something else than `text`."""
        at = self._record(rank, ordinal)
        found, number, _, _, length = _RECORD.unpack_from(self._map, at)
        if (found, number) != (ordinal, sequence):
            return None  # not there yet, or already further on: nothing to compare
        same = self._map[at + _RECORD.size : at + _RECORD.size + length] == text
        posted = None if same else self._read(at)
        return posted if posted and posted.sequence == sequence else None  # else it went on while we read

    def note_message(self, rank: int, peer: int, sending: bool, ordinal: int, number: int, text: str) -> str | None:
        """Note message `number` of this group between two ranks; returns what the other side has noted about it."""
        raw = text.encode()[: NOTE_BYTES - _NOTE.size]
        at = self._note(rank, peer, sending)
        _NUMBER.pack_into(self._map, at + _NUMBER_AT, -1)
        self._map[at + _NOTE.size : at + _NOTE.size + len(raw)] = raw
        _NOTE.pack_into(self._map, at, ordinal, -1, len(raw))
        _NUMBER.pack_into(self._map, at + _NUMBER_AT, number)
        at = self._note(peer, rank, not sending)
        found, count, length = _NOTE.unpack_from(self._map, at)
        theirs = self._map[at + _NOTE.size : at + _NOTE.size + length]
        unchanged = _NOTE.unpack_from(self._map, at) == (found, count, length)
        return theirs.decode(errors="replace") if unchanged and (found, count) == (ordinal, number) else None

    def posted_in(self, rank: int, ordinal: int) -> Posted | None:
        """The latest operation of this rank in this group."""
        posted = self._read(self._record(rank, ordinal))
        return posted if posted and posted.ordinal == ordinal else None

    def posted(self, rank: int) -> list[Posted]:
        """The latest operation of every group of this rank, oldest wait first."""
        found = (self._read(self._slot(rank) + HEADER_BYTES + i * RECORD_BYTES) for i in range(RECORDS))
        return sorted((p for p in found if p), key=lambda p: p.since)

    def signs(self, rank: int) -> tuple[float, float | None]:
        """(latest entry of any kind, begin of the oldest wait still going on or None), in time.monotonic() seconds."""
        base = self._slot(rank) + HEADER_BYTES
        records = [_RECORD.unpack_from(self._map, base + i * RECORD_BYTES) for i in range(RECORDS)]
        waits = [since for _, sequence, since, waiting, _ in records if sequence > 0 and waiting]
        return max([self.state(rank)[2], *(since for _, _, since, _, _ in records)]), min(waits, default=None)

    def _read(self, at: int) -> Posted | None:
        ordinal, sequence, since, waiting, length = _RECORD.unpack_from(self._map, at)
        if sequence <= 0:
            return None
        raw = self._map[at + _RECORD.size : at + _RECORD.size + length]
        if _RECORD.unpack_from(self._map, at)[1] != sequence:
            return None  # rewritten while we read
        try:
            text = json.loads(raw)
        except ValueError:
            return None
        return Posted(ordinal, sequence, since, bool(waiting), **text)

    def _slot(self, rank: int) -> int:
        return (rank - self.first_rank) * self._slot_bytes

    def _note(self, rank: int, peer: int, sending: bool) -> int:
        place = 2 * (peer - self.first_rank) + sending
        return self._slot(rank) + HEADER_BYTES + RECORDS * RECORD_BYTES + place * NOTE_BYTES

    def _record(self, rank: int, ordinal: int) -> int:
        return self._slot(rank) + HEADER_BYTES + ordinal % RECORDS * RECORD_BYTES


def describe(
    op: str, shape: list[int], dtype: str, ranks: list[int], name: str, peers: list[int] | None = None
) -> bytes:
    """The text of a record. `peers`: whom a point-to-point operation waits for; None for a collective (everybody).

    Long rank lists are cut so that the text always fits; a table of who waits for whom is read by a person.
    """
    text = {"op": op, "shape": shape[:8], "dtype": dtype, "ranks": ranks[:64], "name": name[:32], "peers": peers}
    return json.dumps(text, separators=(",", ":")).encode()
