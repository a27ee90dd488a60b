"""Checkpoints of earlier versions: all of a run in one file, runs/NAME/checkpoint.pt. They are read, not written."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

FILE = "checkpoint.pt"
FORMAT = "minillm-run-2"
KEYS = ("config", "step", "loader", "recent_losses", "scaler", "model", "optimizer")


def load(run: Path) -> dict[str, Any]:
    """What `Trainer.load_state_dict` takes, without the states of generators, on which no training step depends.
    ValueError if the file is damaged."""
    path = run / FILE
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["format"] != FORMAT:
            raise KeyError(state["format"])
        return {key: state[key] for key in KEYS}
    except (RuntimeError, OSError, EOFError, KeyError, TypeError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged or of another version: start another run.") from error
