"""Which bytes of which files a rank needs, read once, and checked together with the other ranks.

    this rank's part of a tensor   [      runs of the whole      ]
    parts in the files             [ rank-0000.bin ][ rank-0001.bin ]     overlap: where from, where to, how many

All ranks call `restore`. Each reads its parts into new memory. Of what k ranks have read, each checks 1/k: it works out
what its bytes contribute to the checksum of each saved part (checksum.py), and the ranks add that up. The trainer
changes only when every part is right. So a refused checkpoint leaves the trainer as it was, on every rank.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minillm.comm.ranks import of_all_ranks
from minillm.parallel.sharding.placement import Placement
from minillm.train.checkpoint.checksum import crc32, pieces_sum
from minillm.train.checkpoint.generators import restore_generators
from minillm.train.checkpoint.manifest import FILE, Damaged, Manifest, SavedPart, committed, file_of, step_of
from minillm.train.checkpoint.runs import Runs, runs_of, shared
from minillm.train.checkpoint.shares import catalogue_of, holders
from minillm.train.trainer import Trainer

EARLIER = "checkpoint.pt"  # a run's only checkpoint in earlier versions
UNUSABLE = (TypeError, KeyError, AttributeError, IndexError, OverflowError)  # what contents of another kind raise
OPEN_AT_ONCE = 256  # files, of which a process may often have 1,024, and a checkpoint has one for every rank
Piece = tuple[int, memoryview, int]  # which saved part, where it was read to, bytes of the part that follow it
Sums = dict[str, dict[int, tuple[int, int]]]  # by tensor and part: bytes checked, what they add to its checksum


@dataclass(frozen=True)
class Restored:
    """folder, step: of the checkpoint; bytes_read: of tensors, by this rank; bytes_held: of the parts it now has."""

    folder: Path
    step: int
    bytes_read: int
    bytes_held: int


def restore(trainer: Trainer, run: Path, *, tokenizer: str | None = None) -> Restored:
    """Goes on from the run's latest checkpoint, whatever layout has saved it. Every rank calls it.

    Rank r gets the random number generators of rank r modulo the number of ranks that saved.
    ValueError, the same on all ranks: there is no checkpoint, it is damaged (with the file's name, and which checkpoint
    is complete), or it is of another model, other settings, data, or another tokenizer than this fingerprint.
    """
    folder = _agreed(trainer, _latest(run))
    try:
        return _restore(trainer, Files(folder), tokenizer)
    except Damaged as error:
        raise ValueError(f"{error} {_offer(run, folder)}") from error
    except OSError as error:  # nothing says that the checkpoint is not whole
        problem = f"{error.filename} cannot be read ({error.strerror}): mend that, and --resume goes on from it."
        raise ValueError(f"{problem} {_offer(run, folder, 'Or move {} away')}") from error


def _restore(trainer: Trainer, files: "Files", tokenizer: str | None) -> Restored:
    """ValueError, Damaged or OSError on all ranks, and then nothing has changed."""
    group, folder = trainer.parallel.group, files.folder
    rank, local = group.rank if group else 0, trainer.local_state()
    parts, needs, problem, manifest = {}, {}, None, None
    try:
        manifest = files.manifest()
        _check(trainer, manifest, folder)
        if tokenizer and manifest.tokenizer and tokenizer != manifest.tokenizer:
            raise ValueError(f"{folder} was trained with another tokenizer: use the same or another run.")
        needs = local.required_parts({name: saved.shape for name, saved in manifest.tensors.items()})
        with files:
            for name, placement in needs.items():
                parts[name] = files.read(name, placement, manifest)
    except (ValueError, OSError) as error:
        problem = error
    except UNUSABLE as error:
        problem = _unusable(folder, error)
    gathered = of_all_ranks(group, (problem, catalogue_of(needs)))
    problem = next((theirs for theirs, _ in gathered if theirs), None)
    if problem is None:
        readers = holders([catalogue for _, catalogue in gathered])
        own = {name: (ranks.index(rank), len(ranks)) for (name, _), ranks in readers.items() if rank in ranks}
        problem = _wrong(folder, manifest, of_all_ranks(group, files.sums(own)))
    if isinstance(problem, Damaged | OSError):
        raise problem
    if problem:
        raise ValueError(f"{folder}: {problem}" if str(problem).startswith("it ") else str(problem))
    before = trainer.progress()
    try:
        trainer.resume_at(manifest.progress)
        local.load_parts(parts, manifest.optimizer)
        states = manifest.generators
        restore_generators(states[rank % len(states)], trainer.device)
    except (*UNUSABLE, RuntimeError, ZeroDivisionError) as error:  # on all ranks, which have the same manifest
        trainer.resume_at(before)
        raise _unusable(folder, error) from error
    return Restored(folder, manifest.step, files.bytes_read, sum(part.nbytes for part in parts.values()))


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
        """The manifest. Raises Damaged if it or a file is not what was written, as far as can be told now."""
        manifest = Manifest.read(self.folder)
        manifest.check_files(self.folder)
        if (step := manifest.progress["step"]) != manifest.step:
            raise Damaged(f"{self.folder / FILE} is damaged: its progress is of step {step}, not {manifest.step}.")
        return manifest

    def read(self, name: str, placement: Placement, manifest: Manifest) -> Tensor:
        """This rank's part of a tensor, with padding zero. Raises Damaged if the files end before it or lack some of
        it."""
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
        """What the pieces that were read contribute to the checksums of the saved parts. to_check: by tensor, (i, k):
        only the i-th of k equal shares of its pieces is summed."""
        pieces = [(name, piece) for name, share in to_check.items() for piece in _share(self._pieces[name], *share)]
        after = np.array([after for _, (*_, after) in pieces], dtype=np.uint64)
        checksums = np.array([crc32(data) for _, (_, data, _) in pieces], dtype=np.uint32)
        contributions: Sums = {}
        for (name, (index, data, _)), more in zip(pieces, pieces_sum(checksums, after).tolist(), strict=True):
            of_parts = contributions.setdefault(name, {})
            nbytes, total = of_parts.get(index, (0, 0))
            of_parts[index] = (nbytes + len(data), total ^ more)
        return contributions


def _share(pieces: Sequence[Piece], turn: int, count: int) -> Iterator[Piece]:
    """The turn-th of `count` equal shares of their bytes."""
    nbytes = sum(len(data) for _, data, _ in pieces)
    low, high = nbytes * turn // count, nbytes * (turn + 1) // count
    for index, data, after in pieces:
        start, stop = max(low, 0), min(high, len(data))
        if start < stop:
            yield index, data[start:stop], after + len(data) - stop
        low, high = low - len(data), high - len(data)


def _wrong(folder: Path, manifest: Manifest, by_rank: Sequence[Sums]) -> ValueError | None:
    """The first part whose checksum differs, or of which no rank needs every byte; None if everything is right."""
    for name, tensor in manifest.tensors.items():
        for index, part in enumerate(tensor.parts):
            seen = [sums[name][index] for sums in by_rank if index in sums.get(name, ())]
            if sum(nbytes for nbytes, _ in seen) != part.nbytes:
                return ValueError(f"it is of another model: nothing here needs its {name}")
            total = 0
            for _, more in seen:
                total ^= more
            if total != part.crc32:
                return Damaged(f"{file_of(folder, part.rank)} is damaged: the checksum of {name} differs.")
    return None


def _unusable(folder: Path, error: Exception) -> Damaged:
    """The checksum is right, so a writer has been at fault, or somebody who has edited it."""
    return Damaged(f"{folder / FILE} is damaged: what it says cannot be used ({type(error).__name__}: {error}).")


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
    chosen = of_all_ranks(trainer.parallel.group, chosen)[0]
    if isinstance(chosen, ValueError):
        raise chosen
    return chosen


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
