"""A save, and the moment from which it counts.

    every rank     copy its parts ── training goes on ──▶
    in a thread    └─ make the folder, write rank-0001.bin, fsync, leave a note of offsets and checksums
    rank 0's thread   └─ all notes there? manifest, fsync, rename the folder ── now it is a checkpoint ── drop old ones

Until the rename the folder has a name that no reader looks at, so a process killed at any instant leaves the checkpoint
before it. The threads speak by files alone: collectives belong to the thread that trains. In the foreground the same
steps run at once, and on a CPU nothing is copied.

Training waits for little but the copy: the first save works out who writes what, and the later ones keep to it. Before
each, an all-reduce of 16 bytes tells all ranks whether any of them has other parts now, and the number of the save.
"""

import contextlib
import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minillm.comm import Group
from minillm.files import flush, write_whole
from minillm.parallel.placement import Placement
from minillm.train.checkpoint.generators import generator_states
from minillm.train.checkpoint.manifest import FILE, FOLDER, Manifest, committed, file_of, name_of, number_of
from minillm.train.checkpoint.peer_copy import PeerCopy
from minillm.train.checkpoint.shares import Piece, Share, catalogue_of, shares_of, write_parts
from minillm.train.checkpoint.state import Held, held, optimizer_numbers
from minillm.train.trainer import Trainer

POLL_S = 0.002


@dataclass(frozen=True)
class SaveStats:
    """Of this rank's last save. stall_s: for how long training waited, of which copy_s for copying to host memory and
    wait_s for the save before."""

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
    peers: where each save is held in memory, too.
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
        peers: PeerCopy | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep {keep} must be at least 1: the checkpoint just saved stays.")
        self.run, self.folder, self.group, self.keep = run, run / FOLDER, group, keep
        self.background, self.tokenizer, self.timeout_s, self.peers = background, tokenizer, timeout_s, peers
        self.rank, self.world_size = (group.rank, group.world_size) if group else (0, 1)
        self.stats = SaveStats(0, 0.0, 0.0, 0.0)
        self._thread: threading.Thread | None = None
        self._error: str | None = None
        self._kinds: dict[str, tuple[Placement, torch.dtype]] | None = None  # what the plan is for
        self._plan: list[Share] = []
        self._places: list[Tensor] = []  # where copies of the plan's shares go

    def save(self, trainer: Trainer) -> None:
        """Every rank calls it. OSError if the disk refuses, or had refused the save before this one: the checkpoints
        that were there are untouched."""
        start = time.perf_counter()
        self.finish()
        waited = time.perf_counter() - start
        state = held(trainer)
        draft = self.folder / f".{name_of(self._agreed_number(state), trainer.steps_done)}"
        pieces, copying = [share.of(state) for share in self._plan], time.perf_counter()
        if self.background or trainer.device.type != "cpu":
            pieces = self._copied(pieces, trainer.device)
        copied = time.perf_counter()
        about = {
            "optimizer": optimizer_numbers(trainer),
            "generators": generator_states(trainer.device),
            "progress": trainer.progress(),
        }
        self._thread = threading.Thread(target=self._write, args=(draft, pieces, about), daemon=True)
        nbytes = sum(piece.content.nbytes for piece in pieces)
        self._thread.start()
        if self.peers:
            self.peers.keep(draft.name.removeprefix("."), pieces, about, self.tokenizer)
        if not self.background:
            self.finish()
        self.stats = SaveStats(nbytes, time.perf_counter() - start, copied - copying, waited)

    def finish(self) -> None:
        """Waits for the save that is under way, if there is one. Every rank calls it; OSError on all if it failed."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        (failed,) = self._most(self._error is not None)
        if failed:
            problems, self._error, self._kinds = self._everyone(self._error), None, None
            raise self._refusal(next(filter(None, problems)))

    # Before: the name of the folder to write to, and what of it is this rank's.

    def _agreed_number(self, state: Held) -> int:
        """Of this save, in the order of saving. Plans anew, on all ranks, if parts of any are not those of the plan."""
        kinds = {name: (placement, part.dtype) for name, (part, placement) in state.items()}
        number = 0 if self.rank else max(map(number_of, committed(self.run)), default=0) + 1
        is_new, number = self._most(kinds != self._kinds, number)
        if is_new:
            placements = {name: placement for name, (placement, _) in kinds.items()}
            told = self._everyone((catalogue_of(placements), self._cleared()))
            if problem := next((problem for _, problem in told if problem), None):
                raise self._refusal(problem)
            self._kinds, self._places = kinds, []
            self._plan = shares_of([catalogue for catalogue, _ in told], self.rank)
        return number

    def _cleared(self) -> str | None:
        """On rank 0, before the first save and after one that failed: removes what saves have left that were killed.
        None, or why it cannot."""
        try:
            for leftover in self.folder.glob(".save-*") if self.rank == 0 else ():
                shutil.rmtree(leftover)
        except OSError as error:
            return str(error)

    def _copied(self, pieces: Sequence[Piece], device: torch.device) -> list[Piece]:
        """The same in host memory that stays for the next save."""
        self._places = self._places or _host_memory([piece.content for piece in pieces], device)
        for place, piece in zip(self._places, pieces, strict=True):
            place.copy_(piece.content, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return [Piece(piece.name, piece.placement, place) for place, piece in zip(self._places, pieces, strict=True)]

    # In the thread: this rank's file and note, and on rank 0 all that makes a checkpoint of them.

    def _write(self, draft: Path, pieces: Sequence[Piece], about: dict[str, Any]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            draft.mkdir(exist_ok=True)  # of all ranks, the first makes it
            note = {"parts": self._write_parts(draft, pieces), **about}
        except Exception as error:  # a thread has nobody to raise it to
            self._error, note = str(error), {"error": str(error)}
        with contextlib.suppress(OSError):
            if "error" in note:
                file_of(draft, self.rank).unlink(missing_ok=True)  # on a full disk, room for the note
            write_whole(_note(draft, self.rank), json.dumps(note))
        if self.rank == 0:
            try:
                self._commit(draft, self._notes(draft))
            except Exception as error:
                self._error = str(error)
                shutil.rmtree(draft, ignore_errors=True)

    def _write_parts(self, draft: Path, pieces: Sequence[Piece]) -> list[list[Any]]:
        return write_parts(file_of(draft, self.rank), self.rank, pieces)

    def _notes(self, draft: Path) -> list[dict[str, Any]]:
        """Of all ranks, once they are there. OSError if one says that it could not write, or says nothing."""
        deadline, notes = time.monotonic() + self.timeout_s, []
        for rank in range(self.world_size):
            while not _note(draft, rank).exists():
                if self._error or time.monotonic() > deadline:
                    raise OSError(self._error or f"rank {rank} has not written its part in {self.timeout_s:.0f} s")
                time.sleep(POLL_S)
            notes.append(json.loads(_note(draft, rank).read_text(encoding="utf-8")))
            if "error" in notes[-1]:
                raise OSError(notes[-1]["error"])
        return notes

    def _commit(self, draft: Path, notes: Sequence[dict[str, Any]]) -> None:
        name = draft.name.removeprefix(".")
        manifest = Manifest.of(name, notes, self.tokenizer)
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
                shutil.rmtree(dropped)

    def _refusal(self, problem: str) -> OSError:
        return OSError(f"cannot save to {self.run} ({problem}); the checkpoint that was there still loads.")

    def _everyone(self, value: Any) -> list[Any]:
        return self.group.gather_objects(value) if self.group else [value]

    def _most(self, *values: int) -> list[int]:
        """The largest of each value over all ranks."""
        if self.group is None:
            return list(values)
        return self.group.all_reduce(torch.tensor(values, dtype=torch.int64, device=self.group.device), "max").tolist()


def _host_memory(like: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors like these, in one block, which is page-locked where a GPU copies into it."""
    starts = list(itertools.accumulate((-(-each.nbytes // 8) * 8 for each in like), initial=0))
    block = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    return [block[start : start + each.nbytes].view(each.dtype) for start, each in zip(starts, like, strict=False)]


def _note(draft: Path, rank: int) -> Path:
    return draft / f"rank-{rank:04d}.json"
