"""A copy of the last save in the memory of the nodes, every rank's file on two of them: a restore without a disk.

    node 0   /dev/shm/minillm-copy-…/save-0007-step-1400/   rank-0000.bin  rank-0001.bin   and its peer's  0002  0003
    node 1                                                  rank-0002.bin  rank-0003.bin   and its peer's  0000  0001

Shared memory outlives the ranks that torchrun's agent starts again, and is lost with the machine. After lost ranks
everything is where it was; after a lost node the next one sends the ranks what they need of its files. Where more is
lost, or damaged, the disk has the same save. A save replaces the one before, so a node needs twice what its ranks
write. A node is what one agent has started; one alone keeps one copy. The memory is freed when the run ends or, if its
agent was killed, when another begins. After GEMINI (Wang et al. 2023, https://doi.org/10.1145/3600006.3613145).
"""

import contextlib
import hashlib
import os
import shutil
import socket
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minillm.comm import Group
from minillm.files import write_whole
from minillm.train.checkpoint.manifest import FILE, Damaged, Manifest, committed, file_of, number_of
from minillm.train.checkpoint.reader import Files
from minillm.train.checkpoint.shares import Piece, write_parts

MEMORY, PREFIX = Path("/dev/shm"), "minillm-copy-"
CHUNK_BYTES = 64 << 20  # of one message, which bounds what a GPU has to hold


class PeerCopy:
    """Every rank makes one and calls the same methods in the same order. node: a folder in this node's memory."""

    def __init__(self, group: Group, run: Path, node: Path | None = None) -> None:
        node = node or folder_of_agent()
        self.group, self.run, self.place = group, run, node / f"{zlib.crc32(os.fsencode(run.resolve())):08x}"
        nodes = group.gather_objects((socket.gethostname(), str(node)))
        members = [[rank for rank, each in enumerate(nodes) if each == one] for one in dict.fromkeys(nodes)]
        self._is_first = group.rank in [ranks[0] for ranks in members]  # of its node: it makes and drops folders
        self.peer_of = {}  # rank -> the rank of the next node that holds its file
        for ranks, others in zip(members, members[1:] + members[:1], strict=True):
            if ranks is not others:
                self.peer_of |= {rank: others[index % len(others)] for index, rank in enumerate(ranks)}

    def keep(self, name: str, pieces: Sequence[Piece], about: dict[str, Any], tokenizer: str | None) -> None:
        """Holds this save instead of the one before. What does not fit into memory costs a warning."""
        draft, me, ranks = self.place / f".{name}", self.group.rank, range(self.group.world_size)
        own = file_of(draft, me)
        try:
            self._forget()
            self._all(lambda: self._is_first and draft.mkdir(0o700, parents=True))
            notes = self._all(lambda: {"parts": write_parts(own, me, pieces), **about})
            manifest = Manifest.of(name, notes, tokenizer)
            sizes = [nbytes if self.peer_of else 0 for nbytes in manifest.files]  # of messages
            theirs = {rank: sizes[rank] for rank in ranks if self.peer_of.get(rank) == me}
            self._all(lambda: [_allocate(file_of(draft, rank), nbytes) for rank, nbytes in theirs.items()])
            outgoing = [_mapped(own, sizes[me] if self.peer_of.get(me) == rank else 0) for rank in ranks]
            incoming = [_mapped(file_of(draft, rank), theirs.get(rank, 0)) for rank in ranks]
            _exchange(self.group, outgoing, incoming, max(sizes))
            self._all(lambda: self._is_first and self._commit(draft, name, manifest))
        except NotKept as problem:
            self._forget()
            if me == 0:
                print(f"minillm: no copy of {name} is in memory ({problem}): it is on the disk alone.", file=sys.stderr)

    def files(self) -> "PeerFiles | None":
        """The save that is held, if all of it is and the disk has no later one."""
        newest = max(map(number_of, committed(self.run)), default=0)
        newest, held = zip(*self.group.gather_objects((newest, self._held())), strict=True)
        if len({found[:2] for found in held if found}) != 1:  # nothing, or what nodes hold that were apart
            return None
        source = next(rank for rank, found in enumerate(held) if found)
        name = held[source][0]
        text = (self.place / name / FILE).read_text() if self.group.rank == source else None
        manifest = Manifest.from_text(self.group.gather_objects(text)[source], name)
        seen = [found[2] if found else () for found in held]
        holders = [[rank for rank, files in enumerate(seen) if file in files] for file in range(len(manifest.files))]
        is_whole = all(holders) and manifest.number >= newest[0]
        return PeerFiles(self.group, self.place / name, manifest, holders) if is_whole else None

    def clear(self) -> None:
        """Frees the memory: the run has ended, and its last save is on the disk."""
        self.group.barrier()
        self._forget()

    def _commit(self, draft: Path, name: str, manifest: Manifest) -> None:
        write_whole(draft / FILE, manifest.to_text())
        os.rename(draft, self.place / name)

    def _forget(self) -> None:
        if self._is_first:
            shutil.rmtree(self.place, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.place.parent.rmdir()  # if it holds no other run's

    def _held(self) -> tuple[str, str, list[int]] | None:
        """Of this node: the save, a hash of its manifest, and whose files are there."""
        for folder in self.place.glob("save-*"):
            with contextlib.suppress(Damaged, OSError):
                manifest = Manifest.read(folder)
                files = [rank for rank in range(len(manifest.files)) if manifest.has_file(folder, rank)]
                return folder.name, hashlib.sha256((folder / FILE).read_bytes()).hexdigest(), files
        return None

    def _all(self, action: Callable[[], Any]) -> list[Any]:
        """What it returns on each rank. NotKept on all of them if the memory of one refuses."""
        problem = found = None
        try:
            found = action()
        except OSError as error:
            problem = error.strerror or str(error)
        told = self.group.gather_objects((problem, found))
        if problem := next((problem for problem, _ in told if problem), None):
            raise NotKept(problem)
        return [found for _, found in told]


class NotKept(Exception):
    """There is no room for a copy."""


class PeerFiles(Files):
    """Reads what this node's memory has, and asks other nodes for the rest. holders: by file, the ranks that see it."""

    on_disk = False

    def __init__(self, group: Group, folder: Path, manifest: Manifest, holders: Sequence[Sequence[int]]) -> None:
        super().__init__(folder)
        self.group, self.holders, self._manifest = group, holders, manifest
        self._asked: list[list[tuple[int, int, memoryview]]] = [[] for _ in range(group.world_size)]

    def manifest(self) -> Manifest:
        return self._manifest

    def _fill(self, piece: memoryview, rank: int, offset: int) -> None:
        if self.group.rank in self.holders[rank]:
            super()._fill(piece, rank, offset)
        else:
            holder = self.holders[rank][self.group.rank % len(self.holders[rank])]
            self._asked[holder].append((rank, offset, piece))

    def fetch(self) -> None:
        requests = [[(rank, offset, len(piece)) for rank, offset, piece in asked] for asked in self._asked]
        told = self.group.gather_objects(requests)  # [who asks][who is asked]
        outgoing = [self._answers(theirs[self.group.rank]) for theirs in told]
        incoming = [np.empty(sum(length for *_, length in asked), np.uint8) for asked in requests]
        _exchange(self.group, outgoing, incoming, max(sum(n for *_, n in asked) for each in told for asked in each))
        for asked, data in zip(self._asked, map(memoryview, incoming), strict=True):
            at = 0
            for _, _, piece in asked:
                piece[:] = data[at : at + len(piece)]
                at += len(piece)

    def _answers(self, requests: Sequence[tuple[int, int, int]]) -> np.ndarray:
        seen = {file: _mapped(file_of(self.folder, file), self._manifest.files[file]) for file, *_ in requests}
        found = [seen[file][offset : offset + length] for file, offset, length in requests]
        return np.concatenate(found) if found else np.empty(0, np.uint8)


def folder_of_agent() -> Path:
    """In memory, for the ranks that this process's parent starts. Removes those whose makers have ended.
    ValueError where there is none."""
    if not MEMORY.is_dir():
        raise ValueError(f"--peer-copy needs a folder in memory, {MEMORY}, which there is not here: leave it out")
    prefix = f"{PREFIX}{os.stat('/proc/self/ns/pid').st_ino}-"  # containers that share memory number processes anew
    for folder in MEMORY.glob(f"{prefix}*"):
        if folder.name != prefix + _life(folder.name.removeprefix(prefix).partition("-")[0]):
            shutil.rmtree(folder, ignore_errors=True)
    return MEMORY / (prefix + _life(os.getppid()))


def _life(pid: int | str) -> str:
    """The process of this number, and not another that gets the number later: "PID-START", or "" if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return f"{pid}-{fields[19]}"  # ticks from the start of the system to that of the process


def _allocate(path: Path, nbytes: int) -> None:
    """OSError if the memory has no room: a page that is missing later would be a SIGBUS."""
    with path.open("xb") as file:
        if nbytes:
            os.posix_fallocate(file.fileno(), 0, nbytes)


def _mapped(path: Path, nbytes: int) -> np.ndarray:
    return np.memmap(path, np.uint8, "r+", shape=nbytes) if nbytes else np.empty(0, np.uint8)


def _exchange(group: Group, outgoing: Sequence[np.ndarray], incoming: Sequence[np.ndarray], most: int) -> None:
    """Bytes to and from every rank; most: the largest message of all ranks."""
    for start in range(0, most, CHUNK_BYTES):
        part = slice(start, start + CHUNK_BYTES)
        sent = [each[part] for each in outgoing]
        x = torch.from_numpy(np.concatenate(sent)).to(group.device)
        splits = [len(each[part]) for each in incoming]
        found = group.all_to_all(x, output_splits=splits, input_splits=[len(each) for each in sent])
        for each, piece in zip(incoming, found.cpu().split(splits), strict=True):
            each[part] = piece.numpy()
