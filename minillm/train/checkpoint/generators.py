"""The states of random number generators, as text: every rank has its own."""

import base64
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def generator_states(device: torch.device) -> Callable[[], dict[str, Any]]:
    """Captures the states of this rank's Python, numpy, torch and, on a GPU, device generators. The returned function
    makes them text."""
    (version, internal, gauss), (kind, keys, *rest) = random.getstate(), np.random.get_state()
    host = torch.get_rng_state()
    own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return lambda: {
        "python": [version, _text(np.array(internal, dtype=np.uint64)), gauss],
        "numpy": [kind, _text(keys), *rest],
        "torch": _text(host.numpy()),
        "cuda": None if own is None else _text(own.numpy()),
    }


def restore_generators(state: dict[str, Any], device: torch.device) -> None:
    """The inverse of `generator_states`. A GPU's generator is left alone if the state was taken without a GPU."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(_array(internal, np.uint64).tolist()), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, _array(keys, np.uint32), *rest))
    torch.set_rng_state(torch.from_numpy(_array(state["torch"], np.uint8)))
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(torch.from_numpy(_array(state["cuda"], np.uint8)), device)


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(text: str, dtype: type) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=dtype).copy()
