"""What a checkpoint is on disk: a folder with a file per rank, and a manifest that says what is where.

A folder is a checkpoint once it has its name, `save-NUMBER-step-STEP`, which it gets after everything in it is on the
disk. The manifest carries its own SHA-256, each part of a tensor its CRC-32, each file its length.
"""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from minillm.parallel.sharding.placement import FlatShard, Part, Partial, Placement, Replicate, Shard

FOLDER, FILE = "checkpoints", "manifest.json"
FORMAT = "minillm-checkpoint-3"
_NAME = re.compile(r"save-(\d+)-step-(\d+)")
_UNSIGNED = "0" * 64


class Damaged(ValueError):
    """A checkpoint is not what was written."""


@dataclass(frozen=True)
class SavedPart:
    """Part of a tensor: nbytes from `offset` in the file of `rank`, the runs of `placement` one after the other."""

    rank: int
    offset: int
    nbytes: int
    crc32: int
    placement: Placement


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor; its parts lie side by side without overlap."""

    dtype: torch.dtype
    shape: torch.Size
    parts: tuple[SavedPart, ...]

    def joined(self, other: "SavedTensor") -> "SavedTensor":
        return replace(self, parts=(*self.parts, *other.parts))

    def to_json(self) -> dict[str, Any]:
        parts = [[p.rank, p.offset, p.nbytes, p.crc32, *map(_part_text, p.placement.parts)] for p in self.parts]
        return {"dtype": str(self.dtype).removeprefix("torch."), "shape": list(self.shape), "parts": parts}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "SavedTensor":
        shape, parts = torch.Size(raw["shape"]), []
        for rank, offset, nbytes, crc32, *cuts in raw["parts"]:
            words = [cut.split() for cut in cuts]
            placement = Placement(shape, tuple(_KINDS[kind](*map(int, numbers)) for kind, *numbers in words))
            parts.append(SavedPart(rank, offset, nbytes, crc32, placement))
        return cls(getattr(torch, raw["dtype"]), shape, tuple(parts))


@dataclass(frozen=True)
class Manifest:
    """number: of the save, in the order of saving; files: bytes by rank; tokenizer: its fingerprint, if known.

    progress: the trainer's configuration, step, position in the data, loss scale; optimizer: its settings and what it
    counts per parameter; generators: by rank.
    """

    number: int
    step: int
    tokenizer: str | None
    files: tuple[int, ...]
    progress: dict[str, Any]
    optimizer: dict[str, Any]
    generators: list[dict[str, Any]]
    tensors: dict[str, SavedTensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.files)

    def to_text(self) -> str:
        tensors = {name: tensor.to_json() for name, tensor in self.tensors.items()}
        text = json.dumps({"format": FORMAT, "sha256": _UNSIGNED, **vars(self), "tensors": tensors})
        return text.replace(_UNSIGNED, hashlib.sha256(text.encode()).hexdigest(), 1)

    @classmethod
    def of(cls, name: str, notes: Sequence[dict[str, Any]], tokenizer: str | None) -> "Manifest":
        """The manifest of a folder of this name, from what each rank has noted (the parts in its file), the trainer's
        progress, the optimizer's numbers, and each rank's generators."""
        tensors: dict[str, SavedTensor] = {}
        files = []
        for note in notes:
            saved = [(key, SavedTensor.from_json(raw)) for key, raw in note["parts"]]
            files.append(sum(part.nbytes for _, tensor in saved for part in tensor.parts))
            for key, tensor in saved:
                tensors[key] = tensors[key].joined(tensor) if key in tensors else tensor
        counted = {key: numbers for note in notes for key, numbers in note["optimizer"]["counted"].items()}
        groups = []
        for place, group in enumerate(notes[0]["optimizer"]["groups"]):  # a pipeline's ranks step different parameters
            names = (name for note in notes for name in note["optimizer"]["groups"][place]["params"])
            groups.append(group | {"params": list(dict.fromkeys(names))})
        return cls(
            number_of(Path(name)),
            notes[0]["progress"]["step"],
            tokenizer,
            tuple(files),
            notes[0]["progress"],
            {"groups": groups, "counted": counted},
            [note["generators"] for note in notes],
            tensors,
        )

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """The manifest in `folder`. Raises Damaged if it is not what was written, OSError if that cannot be told."""
        path = folder / FILE
        try:
            return cls.from_text(path.read_text(encoding="utf-8"), folder.name)
        except (FileNotFoundError, IsADirectoryError) as error:
            raise Damaged(f"{path} cannot be read: {error.strerror}.") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise Damaged(f"{path} is damaged: {error}.") from error

    @classmethod
    def from_text(cls, text: str, name: str) -> "Manifest":
        """The inverse of `to_text`, for a folder of this name. Raises errors of all kinds for any other text."""
        raw = json.loads(text)
        signature, kind = raw.pop("sha256"), raw.pop("format")
        if kind != FORMAT:
            raise ValueError(f"its format is {kind!r}, not {FORMAT!r}")
        if hashlib.sha256(text.replace(signature, _UNSIGNED, 1).encode()).hexdigest() != signature:
            raise ValueError("its checksum differs")
        if name_of(raw["number"], raw["step"]) != name:
            raise ValueError(f"it belongs to {name_of(raw['number'], raw['step'])}")
        tensors = {name: SavedTensor.from_json(tensor) for name, tensor in raw.pop("tensors").items()}
        return cls(**raw | {"files": tuple(raw["files"]), "tensors": tensors})

    def check_whole(self) -> None:
        """Raises Damaged, which names the tensor, if a part of one is missing or was saved twice."""
        for name, tensor in self.tensors.items():
            saved, nbytes = sum(part.nbytes for part in tensor.parts), tensor.shape.numel() * tensor.dtype.itemsize
            if saved != nbytes:
                raise Damaged(f"of {name} the ranks hold {saved} of {nbytes} bytes")

    def check_files(self, folder: Path) -> None:
        """Raises Damaged, which names the file, if one is missing or has another length."""
        for rank, nbytes in enumerate(self.files):
            path = file_of(folder, rank)
            if not path.is_file():
                raise Damaged(f"{path} is missing.")
            if path.stat().st_size != nbytes:
                raise Damaged(f"{path} is damaged: it has {path.stat().st_size} bytes instead of {nbytes}.")


def name_of(number: int, step: int) -> str:
    return f"save-{number:04d}-step-{step}"


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:04d}.bin"


def number_of(folder: Path) -> int:
    return int(_NAME.fullmatch(folder.name)[1])


def committed(run: Path) -> list[Path]:
    """The checkpoints of the run in a folder, oldest first. OSError if there may be some, but they cannot be listed."""
    try:
        names = os.listdir(run / FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [run / FOLDER / name for name in names if _NAME.fullmatch(name)]
    return sorted((path for path in found if path.is_dir()), key=number_of)


def step_of(folder: Path) -> int:
    return int(_NAME.fullmatch(folder.name)[2])


_KINDS = {kind.__name__: kind for kind in (Replicate, Shard, FlatShard, Partial)}


def _part_text(part: Part) -> str:
    """ "Shard 0 1 4": a part without its copy number, which says nothing about where it lies."""
    part = part.of if isinstance(part, Partial) else part
    return " ".join([type(part).__name__, *(str(value) for key, value in vars(part).items() if key != "copy")])
