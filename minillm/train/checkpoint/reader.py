"""Which bytes of which files a rank needs, read once, and checked together with the other ranks.

    this rank's part of a tensor   [      runs of the whole      ]
    parts in the files             [ rank-0000.bin ][ rank-0001.bin ]     overlap: where from, where to, how many

All ranks call `restore`. Parts are read into memory of their own, every rank tells what its pieces add to the checksum
of each part (checksum.py), and only when all of them are right does anything change in the trainer. So a refused
checkpoint leaves the trainer as it was, on every rank.
"""

import contextlib
import os
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minillm.parallel.placement import Placement
from minillm.parallel.runs import Runs, runs_of, shared
from minillm.train.checkpoint.checksum import pieces_sum
from minillm.train.checkpoint.generators import restore_generators
from minillm.train.checkpoint.manifest import Damaged, Manifest, SavedPart, committed, file_of, step_of
from minillm.train.checkpoint.state import put, wanted
from minillm.train.trainer import Trainer

EARLIER = "checkpoint.pt"  # a run's only checkpoint in earlier versions
PartKey = tuple[str, int]  # a tensor's name, which of its saved parts
Piece = tuple[memoryview, int]  # of a saved part: where it was read to, bytes of the part that follow it


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
        except Damaged as error:
            if trainer.parallel.is_root:
                print(f"minillm: {error} The checkpoint on the disk is read instead.", file=sys.stderr)
    folder = _agreed(trainer, _latest(run))
    try:
        return _restore(trainer, Files(folder), tokenizer)
    except (Damaged, OSError) as error:
        raise ValueError(f"{error} {_offer(run, folder)}") from error


def _restore(trainer: Trainer, files: "Files", tokenizer: str | None) -> Restored:
    """From these files; ValueError, Damaged or OSError on all ranks, and nothing has changed."""
    group, folder = trainer.parallel.group, files.folder
    parts, problem, manifest = {}, None, None
    try:
        manifest = files.manifest()
        trainer.check(manifest.progress)
        if tokenizer and manifest.tokenizer and tokenizer != manifest.tokenizer:
            raise ValueError(f"{folder} was trained with another tokenizer: use the same or another run.")
        with files:
            for name, placement in wanted(trainer, manifest).items():
                parts[name] = files.read(name, placement, manifest)
    except (ValueError, OSError) as error:
        problem = error
    files.fetch()
    told = group.gather_objects((problem, files.sums())) if group else [(problem, files.sums())]
    problem = next((theirs for theirs, _ in told if theirs), None) or _wrong(
        folder, manifest, [sums for _, sums in told]
    )
    if isinstance(problem, Damaged | OSError):
        raise problem
    if problem:
        raise ValueError(f"{folder}: {problem}" if str(problem).startswith("it ") else str(problem))
    trainer.resume_at(manifest.progress)
    put(trainer, parts, manifest)
    states, rank = manifest.generators, group.rank if group else 0
    restore_generators(states[rank % len(states)], trainer.device)
    bytes_read = files.bytes_read if files.on_disk else 0
    return Restored(folder, manifest.step, bytes_read, sum(part.nbytes for part in parts.values()))


def read_whole(folder: Path) -> tuple[Manifest, dict[str, Tensor]]:
    """A checkpoint's manifest and all of its tensors, whole, by one process. Damaged if it is not what was written."""
    with Files(folder) as files:
        manifest = files.manifest()
        tensors = {name: files.read(name, Placement(saved.shape), manifest) for name, saved in manifest.tensors.items()}
    if problem := _wrong(folder, manifest, [files.sums()]):
        raise problem
    return manifest, tensors


def has_checkpoint(run: Path) -> bool:
    """Whether there is a run to go on with in this folder."""
    return bool(committed(run)) or (run / EARLIER).is_file()


def saved_at(run: Path) -> float:
    """When its latest checkpoint was written, in seconds since 1970."""
    return (committed(run) or [run / EARLIER])[-1].stat().st_mtime


class Files:
    """Reads parts of tensors from a checkpoint's files, and keeps the pieces for the parts' checksums."""

    on_disk = True

    def __init__(self, folder: Path) -> None:
        self.folder, self.bytes_read = folder, 0
        self._open: dict[int, int] = {}
        self._pieces: list[tuple[PartKey, Piece]] = []

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
        found = 0
        for index, source in enumerate(saved.parts):
            read = self._read_shared(source, mine, into, saved.dtype.itemsize)
            found += sum(len(piece) for piece, _ in read)
            if placement.is_counted:
                self._pieces += [((name, index), piece) for piece in read]
        if found != mine.numel * saved.dtype.itemsize:
            raise Damaged(f"{self.folder} is damaged: its manifest has not all of {name}.")
        return part

    def _read_shared(self, source: SavedPart, mine: Runs, into: np.ndarray, itemsize: int) -> list[Piece]:
        """Copies what a saved part has of mine, run by run."""
        pieces, data = [], memoryview(into)
        starts, places, lengths = (each * itemsize for each in shared(mine, runs_of(source.placement)))
        for start, place, length in zip(starts.tolist(), places.tolist(), lengths.tolist(), strict=True):
            piece = data[place : place + length]
            self._fill(piece, source.rank, source.offset + start)
            pieces.append((piece, source.nbytes - start - length))
        return pieces

    def _fill(self, piece: memoryview, rank: int, offset: int) -> None:
        if rank not in self._open:
            self._open[rank] = os.open(file_of(self.folder, rank), os.O_RDONLY)
        done = 0
        while done < len(piece):
            count = os.preadv(self._open[rank], [piece[done:]], offset + done)
            if not count:
                raise Damaged(f"{file_of(self.folder, rank)} is damaged: it ends too early.")
            done += count
        self.bytes_read += done

    def sums(self) -> dict[PartKey, tuple[int, int]]:
        """Of each part that this rank counts: bytes read, and what they add to its checksum."""
        found: dict[PartKey, tuple[int, int]] = {}
        after = np.array([after for _, (_, after) in self._pieces], dtype=np.uint64)
        checksums = np.array([zlib.crc32(piece) for _, (piece, _) in self._pieces], dtype=np.uint32)
        for (key, (piece, _)), more in zip(self._pieces, pieces_sum(checksums, after).tolist(), strict=True):
            nbytes, total = found.get(key, (0, 0))
            found[key] = (nbytes + len(piece), total ^ more)
        return found


def _wrong(folder: Path, manifest: Manifest, told: list[Mapping[PartKey, tuple[int, int]]]) -> ValueError | None:
    """The first part whose checksum differs, or that is not all needed; None if everything is right."""
    for name, tensor in manifest.tensors.items():
        for index, part in enumerate(tensor.parts):
            seen = [sums[name, index] for sums in told if (name, index) in sums]
            if sum(nbytes for nbytes, _ in seen) != part.nbytes:
                return ValueError(f"it is of another model: nothing here needs its {name}")
            total = 0
            for _, more in seen:
                total ^= more
            if total != part.crc32:
                return Damaged(f"{file_of(folder, part.rank)} is damaged: the checksum of {name} differs.")
    return None


def _latest(run: Path) -> Path | ValueError:
    found = committed(run)
    if not found and (run / EARLIER).is_file():
        return ValueError(f"{run / EARLIER} is of an earlier version, which this one does not read: start another run.")
    if not found:
        return ValueError(f"{run} holds no checkpoint: name a run that was saved, or start it without --resume.")
    return found[-1]


def _agreed(trainer: Trainer, chosen: Any) -> Path:
    """What rank 0 has chosen. ValueError if that is a problem."""
    group = trainer.parallel.group
    chosen = group.gather_objects(chosen)[0] if group else chosen
    if isinstance(chosen, ValueError):
        raise chosen
    return chosen


def _offer(run: Path, refused: Path) -> str:
    """Which earlier checkpoint of the run is all there."""
    for folder in reversed(committed(run)[:-1]):
        with contextlib.suppress(ValueError):
            Manifest.read(folder).check_files(folder)
            return f"Remove {refused.name} to go on from {folder.name}, the checkpoint of step {step_of(folder)}."
    return "The run has no other checkpoint."
