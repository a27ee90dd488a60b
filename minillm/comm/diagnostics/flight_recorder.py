"""The flight recorder: a small shared file in which every rank of a machine writes what it is doing.

A rank stuck in a collective cannot answer questions, so it records where it is *before* it waits. Others read that
without its help: a hang becomes a report of who waits for whom, and two ranks that call the same collective with
different shapes find out before they wait for each other for ever.

    slot of rank r:  pid | state | last sign of life | one record per group | one note per partner and direction
    record:          key (group, sequence number) | since | state | JSON {"op", "shape", "dtype", "ranks", "name"}
    note:            key (group, message number) | what this rank sends to, or expects from, that partner

A key is written last and cleared first, and a reader compares it before and after reading the text, so that no reader
takes half an old and half a new text for one. Headers are copied in one piece: `struct.pack_into` would zero them
first, which readers would see.
"""

import copy
import json
import mmap
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RECORDS, RECORD_BYTES, HEADER_BYTES = 32, 1024, 64
NOTE_BYTES = 96
STARTING, RUNNING, FINISHED, RAISED = range(4)  # of a rank
DONE, WAITING, LAUNCHED = range(3)  # of an operation; launched: a GPU works on it, and nobody has seen its end yet
_HEADER = struct.Struct("<iid")  # pid, state, last sign of life
_RECORD = struct.Struct("<iqdii")  # group ordinal, sequence number, since, state, length of the text
_NOTE = struct.Struct("<iqi")  # group ordinal, message number, length of the text
_TIME = struct.Struct("<d")
_NUMBER, _NUMBER_AT = struct.Struct("<q"), 4  # the number alone, in either of them
_KEY = struct.Struct("<iq")  # what both begin with
_NO_NUMBER = _NUMBER.pack(-1)
_STATE_AT, _IS_DONE = struct.calcsize("<iqd"), struct.pack("<i", DONE)  # the state alone, in a record
_PLACES = [HEADER_BYTES + place * RECORD_BYTES for place in range(RECORDS)]  # of the records in a rank's slot


@dataclass(frozen=True)
class RecordedOperation:
    """The latest operation of one rank in one group. since: time.monotonic() seconds; launched: not waited for yet."""

    ordinal: int
    sequence: int
    since: float
    waiting: bool
    launched: bool
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


class FlightRecorder:
    """A file with one slot for each of `ranks`, the global ranks of this machine."""

    def __init__(self, path: str | Path, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)
        self._place = {rank: place for place, rank in enumerate(self.ranks)}
        slot_bytes = HEADER_BYTES + RECORDS * RECORD_BYTES + 2 * len(self.ranks) * NOTE_BYTES
        self._slots = {rank: place * slot_bytes for rank, place in self._place.items()}  # where they begin
        size = len(self.ranks) * slot_bytes
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            _reserve(file.fileno(), size, Path(path).parent)
            self._map = mmap.mmap(file.fileno(), size)

    def close(self) -> None:
        self._map.close()

    def copy(self) -> "FlightRecorder":
        """A copy of its present contents, to be read only."""
        copied = copy.copy(self)
        copied._map = self._map[:]
        return copied

    def has(self, rank: int) -> bool:
        return rank in self._place

    def set_state(self, rank: int, state: int) -> None:
        self._put(self._slots[rank], _HEADER.pack(os.getpid(), state, time.monotonic()))

    def state(self, rank: int) -> tuple[int, int, float]:
        """(pid, state, last sign of life); the pid is 0 while the rank has not started."""
        return self._get(self._slots[rank], _HEADER)

    def post(self, rank: int, ordinal: int, sequence: int, text: bytes, launched: bool = False) -> None:
        """Say that `rank` enters operation number `sequence` of its group number `ordinal`."""
        text, state = text[: RECORD_BYTES - _RECORD.size], LAUNCHED if launched else WAITING
        entry = _RECORD.pack(ordinal, -1, time.monotonic(), state, len(text)) + text
        self._publish(self._slots[rank] + _PLACES[ordinal % RECORDS], entry, sequence)

    def clear(self, rank: int, ordinal: int, sequence: int | None = None) -> None:
        """Say that `rank`'s latest operation in this group is over, if it is number `sequence`; None: any."""
        slot, shared = self._slots[rank], self._map
        at = slot + _PLACES[ordinal % RECORDS]
        found, latest = _KEY.unpack(shared[at : at + _KEY.size])
        if found == ordinal and sequence in (None, latest):  # else a later one, or another group's, is in its place
            shared[at + _STATE_AT : at + _STATE_AT + 4] = _IS_DONE
        sign = slot + 8
        shared[sign : sign + _TIME.size] = _TIME.pack(time.monotonic())

    def conflict(
        self, ranks: Sequence[int], ordinal: int, sequence: int, text: bytes
    ) -> tuple[int, RecordedOperation] | None:
        """The first of `ranks` that has posted another text for this operation of this group, and what it posted."""
        key, shared, slots = _KEY.pack(ordinal, sequence), self._map, self._slots
        begin = _PLACES[ordinal % RECORDS]
        end, all_of_it = begin + len(key), begin + _RECORD.size + len(text)
        for rank in ranks:
            slot = slots[rank]
            if shared[slot + begin : slot + end] != key:
                continue  # not there yet, or already further on
            if shared[slot + begin : slot + all_of_it].endswith(text):
                continue
            header, theirs = self._entry(slot + begin, _RECORD)  # which may have been rewritten since
            if header[:2] == (ordinal, sequence) and theirs != text and (other := _parsed(header, theirs)):
                return rank, other
        return None

    def note_message(self, rank: int, peer: int, sending: bool, ordinal: int, number: int, text: bytes) -> bytes | None:
        """Note message `number` of this group between two ranks; returns what the other side has noted about it."""
        text = text[: NOTE_BYTES - _NOTE.size]
        self._publish(self._note(rank, peer, sending), _NOTE.pack(ordinal, -1, len(text)) + text, number)
        at = self._note(peer, rank, not sending)
        if self._map[at : at + _KEY.size] != _KEY.pack(ordinal, number):
            return None  # not there yet, or already further on
        header, theirs = self._entry(at, _NOTE)  # which may have been rewritten since
        return theirs if header[:2] == (ordinal, number) else None

    def posted_in(self, rank: int, ordinal: int) -> RecordedOperation | None:
        """The latest operation of this rank in this group."""
        posted = _parsed(*self._entry(self._record(rank, ordinal), _RECORD))
        return posted if posted and posted.ordinal == ordinal else None

    def posted(self, rank: int) -> list[RecordedOperation]:
        """The latest operation of every group of this rank, oldest wait first."""
        found = (_parsed(*self._entry(self._record(rank, i), _RECORD)) for i in range(RECORDS))
        return sorted((p for p in found if p), key=lambda p: p.since)

    def signs(self, rank: int) -> tuple[float, float | None]:
        """(latest entry of any kind, begin of the oldest wait still going on or None), in time.monotonic() seconds.

        A launched operation is no wait: its rank may be computing."""
        records = [self._get(self._record(rank, i), _RECORD) for i in range(RECORDS)]
        waits = [since for _, sequence, since, state, _ in records if sequence > 0 and state == WAITING]
        return max([self.state(rank)[2], *(since for _, _, since, _, _ in records)]), min(waits, default=None)

    def _publish(self, at: int, entry: bytes, number: int) -> None:
        """Write an entry that has -1 for its number. The number is cleared first and written last, by itself: who reads
        it twice alike has read a whole entry."""
        shared, number_at = self._map, at + _NUMBER_AT
        shared[number_at : number_at + _NUMBER.size] = _NO_NUMBER
        shared[at : at + len(entry)] = entry
        shared[number_at : number_at + _NUMBER.size] = _NUMBER.pack(number)

    def _put(self, at: int, data: bytes) -> None:
        self._map[at : at + len(data)] = data

    def _get(self, at: int, layout: struct.Struct) -> tuple:
        return layout.unpack(self._map[at : at + layout.size])

    def _entry(self, at: int, layout: struct.Struct) -> tuple[tuple, bytes]:
        """Header and text of a record or note; the header's number is -1 where it is being rewritten."""
        end = at + layout.size
        header = layout.unpack(self._map[at:end])
        text = self._map[end : end + header[-1]]
        same = layout.unpack(self._map[at:end])[:2] == header[:2]
        return (header if same else (header[0], -1, *header[2:])), text

    def _note(self, rank: int, peer: int, sending: bool) -> int:
        place = 2 * self._place[peer] + sending
        return self._slots[rank] + HEADER_BYTES + RECORDS * RECORD_BYTES + place * NOTE_BYTES

    def _record(self, rank: int, ordinal: int) -> int:
        return self._slots[rank] + _PLACES[ordinal % RECORDS]


def _reserve(file: int, size: int, folder: Path) -> None:
    """Allocate the space now: a full disk is an error here, but kills the process once the file is mapped."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
        else:
            os.ftruncate(file, size)
    except OSError as error:
        raise ValueError(
            f"no room for {size:,} bytes in {folder} ({error.strerror}): free some space, or set TMPDIR to another one"
        ) from error


def _parsed(header: tuple, text: bytes) -> RecordedOperation | None:
    ordinal, sequence, since, state, _ = header
    try:
        known = json.loads(text) if sequence > 0 else None
        return known and RecordedOperation(ordinal, sequence, since, state != DONE, state == LAUNCHED, **known)
    except ValueError:
        return None  # being written


def describe(
    op: str, shape: list[int], dtype: str, ranks: list[int], name: str, peers: list[int] | None = None
) -> bytes:
    """The text of a record. `peers`: whom a point-to-point operation waits for; None for a collective (everybody).

    Long rank lists are cut so that the text always fits; a table of who waits for whom is read by a person.
    """
    text = {"op": op[:48], "shape": shape[:8], "dtype": dtype, "ranks": ranks[:64], "name": name[:32], "peers": peers}
    return json.dumps(text, separators=(",", ":"), ensure_ascii=False).encode()
