"""Dropout whose mask depends on what is dropped, not on who drops it: the same numbers in every layout of ranks.

    key of a row    step and window, from the run's seed    ┐
    layer           a hash of its name                      ├─ mixed ─▶ 32 bits ─▶ below p · 2³²: the input is dropped
    place           position in the sequence, input         ┘

Random numbers from a counter instead of a state (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): a
rank works out the mask of the rows, positions and inputs that it has, and nothing else. So tensor-parallel ranks agree
where they hold the same activation and have parts of one mask where it is cut; a block that is computed again for
backward drops the same inputs; and a run that goes on with another layout does, too.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

BITS = 0xFFFFFFFF


@dataclass
class Rows:
    """What the layers of a model know of the pass that they are in.

    keys: [batch], of its rows; None = whoever makes the pass says nothing, and torch's generator draws the masks.
    positions_of: of a model whose sequences are cut over ranks, see `Decoder.positions_of`.
    """

    keys: Tensor | None = None
    positions_of: Callable[[int, torch.device], Tensor] | None = None


def window_keys(seed: int, step: int, windows: Sequence[int] | np.ndarray) -> Tensor:
    """[len(windows)]: what tells the rows of all steps of a run apart. windows: their numbers in the data."""
    return mix(mix(mix(torch.tensor(seed)) ^ step) ^ torch.as_tensor(np.asarray(windows, dtype=np.int64)))


def layer_key(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")


def mask_of(rows: Rows, layer: int, share: float, x: Tensor, seq: int, first: int = 0) -> Tensor:
    """What a layer's input is multiplied with: 0 for about that share of it, else 1 / (1 - share).

    x: [batch, any, inputs], for dtype and device. seq: positions that the mask is for. first: the place of x's inputs
    among those of the whole layer. Returns [batch, seq, inputs].
    """
    device, keys = x.device, rows.keys.to(x.device)
    if len(keys) != len(x):
        raise ValueError(f"{len(keys)} rows have keys for their dropout, and the pass has {len(x)}: give each row one.")
    positions = rows.positions_of(seq, device) if rows.positions_of else torch.arange(seq, device=device)
    inputs = torch.arange(first, first + x.shape[-1], device=device)
    of_tokens = mix(mix(keys ^ layer)[:, None] ^ positions)
    bits = mix(of_tokens[:, :, None] ^ mix(inputs + 1))
    return (bits >= round(share * (BITS + 1))).to(x.dtype).div_(1 - share)


def mix(x: Tensor) -> Tensor:
    """int64 -> int64 of 32 bits, of which each depends on all of x's lower 32: MurmurHash3's last step (Appleby
    2011)."""
    x = x & BITS
    x = (x ^ x >> 16) * 0x85EBCA6B & BITS
    x = (x ^ x >> 13) * 0xC2B2AE35 & BITS
    return x ^ x >> 16


@contextmanager
def numbered(model: nn.Module, keys: Tensor | None) -> Iterator[None]:
    """Inside, the rows of the model's passes have these keys; None = none."""
    found = [] if keys is None else [each.rows for each in model.modules() if hasattr(each, "lora_A")]
    rows = {id(each): each for each in found}.values()
    for each in rows:
        each.keys = keys
    try:
        yield
    finally:
        for each in rows:
            each.keys = None
