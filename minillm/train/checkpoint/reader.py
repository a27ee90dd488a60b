"""Which bytes of which files a rank needs, read once, and checked together with the other ranks.

    this rank's part of a tensor   [      runs of the whole      ]
    parts in the files             [ rank-0000.bin ][ rank-0001.bin ]     overlap: where from, where to, how many

All ranks call `restore`. Parts are read into memory of their own; of what k ranks have read, each checks 1/k, and tells
what that adds to the checksum of each part (checksum.py). Only when all of them are right does anything change in the
trainer. So a refused checkpoint leaves the trainer as it was, on every rank.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minillm.comm import Group
from minillm.parallel.placement import Placement
from minillm.parallel.runs import Runs, runs_of, shared
from minillm.train.checkpoint.checksum import crc32, pieces_sum
from minillm.train.checkpoint.generators import restore_generators
from minillm.train.checkpoint.manifest import Damaged, Manifest, SavedPart, committed, file_of, step_of
from minillm.train.checkpoint.shares import Owned, catalogue_of, holders
from minillm.train.checkpoint.state import put, wanted
from minillm.train.trainer import Trainer

EARLIER = "checkpoint.pt"  # a run's only checkpoint in earlier versions
OPEN_AT_ONCE = 256  # files, of which a process may often have 1,024, and a checkpoint has one for every rank
Piece = tuple[int, memoryview, int]  # which saved part, where it was read to, bytes of the part that follow it
Sums = dict[str, dict[int, tuple[int, int]]]  # by tensor and part: bytes checked, what they add to its checksum


@dataclass(frozen=True)
class Restored:
    """From which checkpoint; bytes_read: of tensors, from files on the disk, by this rank; bytes_held: of what it now
    has."""

    folder: Path
    step: int
    bytes_read: int
    bytes_held: int


def restore(trainer: Trainer, run: Path, *, tokenizer: str | None = None, in_memory: "Files | None" = None) -> Restored:
    """Goes on from the run's latest checkpoint, whatever layout has saved it. Every rank calls it.

    in_memory: read this copy and not the disk, unless it turns out to be damaged.
    Of generators, rank r gets the state of rank r, modulo as many ranks as there were.
    ValueError, the same on all ranks: there is none, it is damaged (with the file's name, and which checkpoint is
    complete), or it is of another model, other settings, data, or another tokenizer than this fingerprint.
    """
    if in_memory:
        try:
            return _restore(trainer, in_memory, tokenizer)
        except (Damaged, OSError) as error:
            if trainer.parallel.is_root:
                print(f"minillm: {error} The checkpoint on the disk is read instead.", file=sys.stderr)
    folder = _agreed(trainer, _latest(run))
    try:
        return _restore(trainer, Files(folder), tokenizer)
    except Damaged as error:
        raise ValueError(f"{error} {_offer(run, folder)}") from error
    except OSError as error:  # nothing says that the checkpoint is not whole
        problem = f"{error.filename} cannot be read ({error.strerror}): mend that, and --resume goes on from it."
        raise ValueError(f"{problem} {_offer(run, folder, 'Or move {} away')}") from error


def _restore(trainer: Trainer, files: "Files", tokenizer: str | None) -> Restored:
    """From these files; ValueError, Damaged or OSError on all ranks, and nothing has changed."""
    group, folder = trainer.parallel.group, files.folder
    rank = group.rank if group else 0
    parts, needs, problem, manifest = {}, {}, None, None
    try:
        manifest = files.manifest()
        _check(trainer, manifest, folder)
        if tokenizer and manifest.tokenizer and tokenizer != manifest.tokenizer:
            raise ValueError(f"{folder} was trained with another tokenizer: use the same or another run.")
        needs = wanted(trainer, manifest)
        with files:
            for name, placement in needs.items():
                parts[name] = files.read(name, placement, manifest)
    except (ValueError, OSError) as error:
        problem = error
    told = _everyone(group, (problem, catalogue_of(needs)))
    problem = next((theirs for theirs, _ in told if theirs), None)
    if problem is None:
        files.fetch()
        who = holders([catalogue for _, catalogue in told])
        told = _everyone(group, files.sums(_to_check(who, rank, files.on_disk)))
        differing = None if files.on_disk else _differing(folder, manifest, who, told)
        problem = _wrong(folder, manifest, told) or differing
    if isinstance(problem, Damaged | OSError):
        raise problem
    if problem:
        raise ValueError(f"{folder}: {problem}" if str(problem).startswith("it ") else str(problem))
    trainer.resume_at(manifest.progress)
    put(trainer, parts, manifest)
    states = manifest.generators
    restore_generators(states[rank % len(states)], trainer.device)
    bytes_read = files.bytes_read if files.on_disk else 0
    return Restored(folder, manifest.step, bytes_read, sum(part.nbytes for part in parts.values()))


def read_whole(folder: Path) -> tuple[Manifest, dict[str, Tensor]]:
    """A checkpoint's manifest and all of its tensors, whole, by one process. Damaged if it is not what was written."""
    with Files(folder) as files:
        manifest = files.manifest()
        tensors = {name: files.read(name, Placement(saved.shape), manifest) for name, saved in manifest.tensors.items()}
    if problem := _wrong(folder, manifest, [files.sums(dict.fromkeys(tensors, (0, 1)))]):
        raise problem
    return manifest, tensors


def has_checkpoint(run: Path) -> bool:
    """Whether there is a run to go on with in this folder. ValueError if that cannot be told."""
    try:
        return bool(committed(run)) or (run / EARLIER).is_file()
    except OSError as error:
        raise _unreadable(error) from error


def saved_at(run: Path) -> float:
    """When its latest checkpoint was written, in seconds since 1970."""
    return (committed(run) or [run / EARLIER])[-1].stat().st_mtime


class Files:
    """Reads parts of tensors from a checkpoint's files, and keeps the pieces for the parts' checksums."""

    on_disk = True

    def __init__(self, folder: Path) -> None:
        self.folder, self.bytes_read = folder, 0
        self._open: dict[int, int] = {}
        self._pieces: dict[str, list[Piece]] = {}  # by tensor

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open = {}

    def manifest(self) -> Manifest:
        """Damaged if it, or a file, is not what was written, as far as can be told before reading."""
        manifest = Manifest.read(self.folder)
        manifest.check_files(self.folder)
        return manifest

    def fetch(self) -> None:
        """After all reads, on all ranks: completes those that wait for other nodes. On a disk there are none."""

    def read(self, name: str, placement: Placement, manifest: Manifest) -> Tensor:
        """This rank's part of a tensor, padding zero. Damaged if the files end before it, or have not all of it."""
        saved, mine = manifest.tensors[name], runs_of(placement)
        make = torch.empty if mine.numel == placement.part_shape.numel() else torch.zeros
        part = make(placement.part_shape, dtype=saved.dtype)
        into = part.reshape(-1).view(torch.uint8).numpy()
        pieces = self._pieces[name] = []
        for index, source in enumerate(saved.parts):
            read = self._read_shared(source, mine, into, saved.dtype.itemsize)
            pieces += [(index, data, after) for data, after in read]
        if sum(len(data) for _, data, _ in pieces) != mine.numel * saved.dtype.itemsize:
            raise Damaged(f"{self.folder} is damaged: its manifest has not all of {name}.")
        return part

    def _read_shared(
        self, source: SavedPart, mine: Runs, into: np.ndarray, itemsize: int
    ) -> list[tuple[memoryview, int]]:
        """Copies what a saved part has of mine, run by run: where to, and bytes of the part that follow."""
        pieces, data = [], memoryview(into)
        starts, places, lengths = (each * itemsize for each in shared(mine, runs_of(source.placement)))
        for start, place, length in zip(starts.tolist(), places.tolist(), lengths.tolist(), strict=True):
            piece = data[place : place + length]
            self._fill(piece, source.rank, source.offset + start)
            pieces.append((piece, source.nbytes - start - length))
        return pieces

    def _fill(self, piece: memoryview, rank: int, offset: int) -> None:
        path = file_of(self.folder, rank)
        try:
            if rank not in self._open:
                if len(self._open) == OPEN_AT_ONCE:
                    os.close(self._open.pop(next(iter(self._open))))
                self._open[rank] = os.open(path, os.O_RDONLY)
            done = 0
            while done < len(piece):
                count = os.preadv(self._open[rank], [piece[done:]], offset + done)
                if not count:
                    raise Damaged(f"{path} is damaged: it ends too early.")
                done += count
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error  # a read alone does not name it
        self.bytes_read += done

    def sums(self, to_check: Mapping[str, tuple[int, int]]) -> Sums:
        """to_check: by tensor, i and k: the i-th of k equal shares of what was read."""
        pieces = [(name, piece) for name, share in to_check.items() for piece in _share(self._pieces[name], *share)]
        after = np.array([after for _, (*_, after) in pieces], dtype=np.uint64)
        checksums = np.array([crc32(data) for _, (_, data, _) in pieces], dtype=np.uint32)
        found: Sums = {}
        for (name, (index, data, _)), more in zip(pieces, pieces_sum(checksums, after).tolist(), strict=True):
            of_parts = found.setdefault(name, {})
            nbytes, total = of_parts.get(index, (0, 0))
            of_parts[index] = (nbytes + len(data), total ^ more)
        return found


def _share(pieces: Sequence[Piece], turn: int, count: int) -> Iterator[Piece]:
    """The turn-th of `count` equal shares of their bytes."""
    nbytes = sum(len(data) for _, data, _ in pieces)
    low, high = nbytes * turn // count, nbytes * (turn + 1) // count
    for index, data, after in pieces:
        start, stop = max(low, 0), min(high, len(data))
        if start < stop:
            yield index, data[start:stop], after + len(data) - stop
        low, high = low - len(data), high - len(data)


def _to_check(who: Mapping[Owned, list[int]], rank: int, is_shared: bool) -> dict[str, tuple[int, int]]:
    """For `sums`, of each tensor that this rank has read. who: the ranks that have each part; is_shared: they have read
    the same bytes, so each checks a share. The copies of nodes are not the same bytes: each rank checks all of its."""
    same = {name: ranks for (name, _), ranks in who.items() if rank in ranks}
    return {name: (ranks.index(rank), len(ranks)) if is_shared else (0, 1) for name, ranks in same.items()}


def _differing(
    folder: Path, manifest: Manifest, who: Mapping[Owned, list[int]], told: Sequence[Sums]
) -> Damaged | None:
    """A part of which a rank has read other bytes than the first rank that has it. What is left in `told` is what the
    first ones say."""
    found = None
    for (name, _), (first, *others) in who.items():
        for rank in others:
            theirs = told[rank].pop(name, {})
            for index in (index for index, sums in told[first].get(name, {}).items() if theirs.get(index) != sums):
                path = file_of(folder, manifest.tensors[name].parts[index].rank)
                found = Damaged(f"{path} is damaged where rank {rank} reads it: the checksum of {name} differs.")
    return found


def _wrong(folder: Path, manifest: Manifest, told: Sequence[Sums]) -> ValueError | None:
    """The first part whose checksum differs, or that is not all needed; None if everything is right."""
    for name, tensor in manifest.tensors.items():
        for index, part in enumerate(tensor.parts):
            seen = [sums[name][index] for sums in told if index in sums.get(name, ())]
            if sum(nbytes for nbytes, _ in seen) != part.nbytes:
                return ValueError(f"it is of another model: nothing here needs its {name}")
            total = 0
            for _, more in seen:
                total ^= more
            if total != part.crc32:
                return Damaged(f"{file_of(folder, part.rank)} is damaged: the checksum of {name} differs.")
    return None


def _check(trainer: Trainer, manifest: Manifest, folder: Path) -> None:
    """ValueError if the trainer is another one than that of the checkpoint."""
    try:
        trainer.check(manifest.progress)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{folder} has settings that this version does not know ({error}): start another run."
        ) from error


def _latest(run: Path) -> Path | ValueError:
    try:
        found = committed(run)
    except OSError as error:
        return _unreadable(error)
    if not found and (run / EARLIER).is_file():
        return ValueError(f"{run / EARLIER} is of an earlier version, which this one does not read: start another run.")
    if not found:
        return ValueError(f"{run} holds no checkpoint: name a run that was saved, or start it without --resume.")
    return found[-1]


def _agreed(trainer: Trainer, chosen: Any) -> Path:
    """What rank 0 has chosen. ValueError if that is a problem."""
    chosen = _everyone(trainer.parallel.group, chosen)[0]
    if isinstance(chosen, ValueError):
        raise chosen
    return chosen


def _everyone(group: Group | None, value: Any) -> list[Any]:
    return group.gather_objects(value) if group else [value]


def _unreadable(error: OSError) -> ValueError:
    return ValueError(f"{error.filename} cannot be read ({error.strerror}): mend that, or name another run.")


def _offer(run: Path, refused: Path, how: str = "Remove {}") -> str:
    """Which earlier checkpoint of the run is all there."""
    for folder in reversed(committed(run)[:-1]):
        with contextlib.suppress(ValueError, OSError):
            Manifest.read(folder).check_files(folder)
            again = how.format(refused.name)
            return f"{again} to go on from {folder.name}, the checkpoint of step {step_of(folder)}."
    return "The run has no other checkpoint."
