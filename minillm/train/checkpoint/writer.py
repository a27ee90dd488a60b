"""A save, and the moment from which it counts.

    every rank     copy its parts ── training goes on ──▶
    in a thread    └─ make the folder, write rank-0001.bin, fsync, leave a note of offsets and checksums
    rank 0's thread   └─ all notes there? manifest, fsync, rename the folder ── now it is a checkpoint ── drop old ones

Until the rename the folder has a name that no reader looks at, so a process killed at any instant leaves the checkpoint
before it. The threads speak by files alone: collectives belong to the thread that trains. In the foreground the same
steps run at once, and on a CPU nothing is copied.

Training waits for little but the copy: the first save works out who writes what, and the later ones keep to it without
a word. When a save is over, at the latest before the next, two all-reduces of 16 and 8 bytes tell all ranks whether any
of them failed, or has other tensors by now.
"""

import contextlib
import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minillm.comm import Group
from minillm.comm.ranks import of_all_ranks
from minillm.files import flush, write_whole
from minillm.parallel.sharding.state import LocalState
from minillm.train.checkpoint.background import Background
from minillm.train.checkpoint.checksum import crc32
from minillm.train.checkpoint.generators import generator_states
from minillm.train.checkpoint.manifest import FILE, FOLDER, Damaged, Manifest, committed, file_of, name_of, number_of
from minillm.train.checkpoint.shares import Piece, Share, catalogue_of, shares_of, write_parts
from minillm.train.trainer import Trainer

POLL_S = 0.002


@dataclass(frozen=True)
class SaveStats:
    """Seconds of this rank's last save. stall_s: how long training waited, of which copy_s for the copy to host memory
    and wait_s for the previous save."""

    nbytes: int
    stall_s: float
    copy_s: float
    wait_s: float


class Checkpointer:
    """Saves a run's checkpoints; every rank has one and calls the same methods in the same order.

        saver = Checkpointer(Path("runs/mine"), group, background=True)
        saver.save(trainer)     # returns when the parts are copied; waits first if the last save is not done
        saver.finish()          # returns when the last save is a checkpoint

    group: all ranks of the run, None for one process. keep: how many checkpoints stay. tokenizer: its fingerprint.
    background: write while training goes on. timeout_s: how long rank 0 waits for the others to have written.
    """

    def __init__(
        self,
        run: Path,
        group: Group | None = None,
        *,
        keep: int = 2,
        background: bool = False,
        tokenizer: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep {keep} must be at least 1: the checkpoint just saved stays.")
        self.run, self.folder, self.group, self.keep = run, run / FOLDER, group, keep
        self.background, self.tokenizer, self.timeout_s = background, tokenizer, timeout_s
        self.rank, self.world_size = (group.rank, group.world_size) if group else (0, 1)
        self.stats = SaveStats(0, 0.0, 0.0, 0.0)
        self._writer = Background()
        self._written: threading.Event | None = None
        self._noted, self._is_over = threading.Event(), False  # this rank's note; whether another rank's never comes
        self._error: str | None = None
        self._planned_for: tuple[Trainer, int] | None = None  # the trainer, as it was loaded
        self._names: Set[str] = frozenset()  # of tensors that this rank had then
        self._plan: list[Share] = []
        self._is_stale = False  # the plan: this rank has other tensors now
        self._places: list[Piece] = []  # where copies of the plan's shares go
        self._number = 0  # of the last save

    @torch.no_grad()
    def save(self, trainer: Trainer) -> None:
        """Saves the trainer's state; every rank calls it. Raises OSError if the disk refuses, or refused the previous
        save: the checkpoints that were there are untouched."""
        start = time.perf_counter()
        self.finish()
        waited = time.perf_counter() - start
        local = trainer.local_state()
        if self._planned_for != (trainer, trainer.loads):
            self._make_plan(trainer, local)
        copying = time.perf_counter()
        pieces = self._pieces(local, trainer.device)
        copied = time.perf_counter()
        self._number, self._is_over = self._number + 1, False
        self._noted.clear()
        draft, about = self.folder / f".{name_of(self._number, trainer.steps_done)}", _about(trainer, local)
        self._written = self._writer.begin(partial(self._write, draft, pieces, about))
        if not self.background:
            self.finish()
        nbytes = sum(piece.content.nbytes for piece in pieces)
        self.stats = SaveStats(nbytes, time.perf_counter() - start, copied - copying, waited)

    def finish(self) -> None:
        """Waits for the save that is under way, if there is one. Every rank calls it; OSError on all if it failed."""
        if self._written is None:
            return
        self._noted.wait()
        self._is_over, is_stale = self._any(self._error is not None, self._is_stale)
        self._written.wait()
        self._written = None
        (failed,) = self._any(self._error is not None)
        if failed or is_stale:
            self._planned_for = None
        if failed:
            self._cleared()  # no rank writes any more
            problems, self._error = of_all_ranks(self.group, self._error), None
            raise self._refusal(next(filter(None, problems)))

    # Before: what of all that there is this rank writes.

    def _make_plan(self, trainer: Trainer, local: LocalState) -> None:
        """On all ranks, for this save and those that follow it."""
        ranks = of_all_ranks(self.group, (catalogue_of(local.placements()), *self._cleared()))
        if problem := next((problem for *_, problem in ranks if problem), None):
            raise self._refusal(problem)
        self._number, self._names, self._is_stale, self._places = ranks[0][1], frozenset(local.tensors), False, []
        self._plan = shares_of([catalogue for catalogue, *_ in ranks], self.rank)
        self._planned_for = trainer, trainer.loads

    def _shares(self, local: LocalState) -> list[Share]:
        """By the plan. What only came with the steps since then, such as the moments of a weight that had no gradient,
        is written by the first of the ranks that have it, and the next save has another plan."""
        names = local.tensors.keys()
        if names == self._names:
            return self._plan
        self._is_stale, self._places, placements = True, [], local.placements()
        new = catalogue_of({name: placements[name] for name in names - self._names})
        return [share for share in self._plan if share.name in names] + shares_of([new], 0)

    def _pieces(self, local: LocalState, device: torch.device) -> Sequence[Piece]:
        """What this rank writes. In the background, and of a GPU, a copy in host memory that stays for the next."""
        shares = self._shares(local)
        parts = [share.of(local.tensors) for share in shares]
        if not self.background and device.type == "cpu":
            return [Piece(each.name, each.placement, part.detach()) for each, part in zip(shares, parts, strict=True)]
        if not self._places:
            places = zip(shares, _host_memory(parts, device), strict=True)
            self._places = [Piece(share.name, share.placement, place) for share, place in places]
        torch._foreach_copy_([piece.content for piece in self._places], parts, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return self._places

    def _cleared(self) -> tuple[int, str | None]:
        """On rank 0, before the first save and after one that failed: the number of the last checkpoint. Removes what
        saves have left that failed or were killed; why it cannot, or cannot tell which checkpoints there are."""
        try:
            number = 0 if self.rank else max(map(number_of, committed(self.run)), default=0)
            for leftover in () if self.rank else self.folder.glob(".save-*"):
                _remove(leftover)
        except OSError as error:
            return 0, str(error)
        return number, None

    # In the thread: this rank's file and note, and on rank 0 all that makes a checkpoint of them.

    def _write(self, draft: Path, pieces: Sequence[Piece], about: Callable[[], dict[str, Any]]) -> None:
        try:
            self._write_own(draft, pieces, about)
        finally:
            self._noted.set()
        if self.rank == 0:
            try:
                self._commit(draft, self._notes(draft))
            except Exception as error:
                self._error = self._error or (None if self._is_over else str(error))  # another rank says what it was
                shutil.rmtree(draft, ignore_errors=True)

    def _write_own(self, draft: Path, pieces: Sequence[Piece], about: Callable[[], dict[str, Any]]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            draft.mkdir(exist_ok=True)  # of all ranks, the first makes it
            _leave(_note(draft, self.rank), {"parts": self._write_parts(draft, pieces), **about()})
        except Exception as error:  # a thread has nobody to raise it to
            self._error = str(error)
            with contextlib.suppress(OSError):
                file_of(draft, self.rank).unlink(missing_ok=True)  # on a full disk, room for the note
                _leave(_note(draft, self.rank), {"error": str(error)})

    def _write_parts(self, draft: Path, pieces: Sequence[Piece]) -> list[list[Any]]:
        return write_parts(file_of(draft, self.rank), self.rank, pieces)

    def _notes(self, draft: Path) -> list[dict[str, Any]]:
        """Of all ranks, once they are there. OSError if one says that it could not write, or says nothing."""
        deadline, notes = time.monotonic() + self.timeout_s, []
        for rank in range(self.world_size):
            while not _note(draft, rank).exists():
                if self._error or self._is_over or time.monotonic() > deadline:
                    raise OSError(self._error or f"rank {rank} has not written its part in {self.timeout_s:.0f} s")
                time.sleep(POLL_S)
            notes.append(_left(_note(draft, rank)))
            if "error" in notes[-1]:
                raise OSError(notes[-1]["error"])
        return notes

    def _commit(self, draft: Path, notes: Sequence[dict[str, Any]]) -> None:
        name = draft.name.removeprefix(".")
        manifest = Manifest.of(name, notes, self.tokenizer)
        manifest.check_whole()
        manifest.check_files(draft)
        for rank in range(self.world_size):
            _note(draft, rank).unlink()
        write_whole(draft / FILE, manifest.to_text(), on_disk=True)
        flush(draft)
        os.rename(draft, self.folder / name)
        flush(self.folder)
        with contextlib.suppress(OSError):  # what cannot be dropped costs space, not the checkpoint
            for old in committed(self.run)[: -self.keep]:
                dropped = old.with_name(f".{old.name}")
                os.rename(old, dropped)
                _remove(dropped)

    def _refusal(self, problem: str) -> OSError:
        kept = ""
        with contextlib.suppress(OSError):
            kept = "; the checkpoint that was there still loads" if committed(self.run) else ""
        return OSError(f"cannot save to {self.run} ({problem}){kept}.")

    def _any(self, *values: bool) -> list[bool]:
        """Of each, whether it is so on any rank."""
        if self.group is None:
            return list(values)
        told = torch.tensor(values, dtype=torch.int64, device=self.group.device)
        return [bool(value) for value in self.group.all_reduce(told, "max").tolist()]


def _about(trainer: Trainer, local: LocalState) -> Callable[[], dict[str, Any]]:
    """Captures what is no tensor now; the returned function serialises it."""
    progress = trainer.progress()
    optimizer, generators = local.numbers(), generator_states(trainer.device)
    return lambda: {"optimizer": optimizer, "generators": generators(), "progress": progress}


def _host_memory(like: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors like these, in one block, which is page-locked where a GPU copies into it."""
    starts = list(itertools.accumulate((-(-each.nbytes // 8) * 8 for each in like), initial=0))
    block = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    flat = [block[start : start + each.nbytes].view(each.dtype) for start, each in zip(starts, like, strict=False)]
    return [place.view(each.shape) for place, each in zip(flat, like, strict=True)]


def _remove(folder: Path) -> None:
    """Of a link to a folder, the link."""
    folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)


def _note(draft: Path, rank: int) -> Path:
    return draft / f"rank-{rank:04d}.json"


def _leave(note: Path, said: dict[str, Any]) -> None:
    text = json.dumps(said)
    write_whole(note, f"{crc32(text.encode())} {text}")


def _left(note: Path) -> dict[str, Any]:
    checksum, _, text = note.read_text(encoding="utf-8").partition(" ")
    if checksum != str(crc32(text.encode())):
        raise Damaged(f"{note} is damaged: its checksum differs.")
    return json.loads(text)
