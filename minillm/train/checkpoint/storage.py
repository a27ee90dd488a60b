"""A checkpoint of a run in one file, complete or not there: everything that the next step depends on.

    runs/NAME/checkpoint.pt     configuration, step, weights, optimizer, masters, loss scale, data position, generators

It is written under another name, flushed to the disk and then renamed over the previous one. A full disk or a killed
process leaves the previous checkpoint, which still loads.
"""

import os
import pickle
import random
import secrets
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

FILE = "checkpoint.pt"
FORMAT = "minillm-run-2"


def save(state: dict[str, Any], folder: Path) -> Path:
    """Makes `state` the checkpoint in `folder`. OSError if the disk refuses; the one before is then untouched."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(f".{FILE}-*.tmp"):
        leftover.unlink(missing_ok=True)
    draft = folder / f".{FILE}-{secrets.token_hex(4)}.tmp"
    try:
        with draft.open("wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, folder / FILE)
        _flush(folder)
    except (OSError, RuntimeError) as error:  # torch's writer turns the disk's errors into RuntimeError
        raise OSError(f"cannot save to {folder} ({error}); the checkpoint that was there still loads.") from error
    finally:
        draft.unlink(missing_ok=True)
    return folder / FILE


def load(folder: Path) -> dict[str, Any]:
    """The state saved in `folder`, on the CPU. ValueError if there is none or if it is damaged."""
    path = folder / FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no checkpoint: name a run that was saved, or start it without --resume.")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["format"] != FORMAT:
            raise KeyError(state["format"])
    except (RuntimeError, OSError, EOFError, KeyError, TypeError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged or of another version: start another run.") from error
    return state


def generator_states() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's random number generators, of every GPU too."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_generators(state: dict[str, Any]) -> None:
    """The inverse of `generator_states`. With another number of GPUs theirs are left alone."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count() > 0:
        torch.cuda.set_rng_state_all(state["cuda"])


def _flush(folder: Path) -> None:
    """The rename is on the disk when this returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
