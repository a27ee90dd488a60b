"""Packing: one long row of tokens cut into windows, no padding anywhere.

    tokens    a b c d e <sep> f g h i j k ...
    window 0  a b c d            inputs  a b c      targets  b c d           (seq_len 3)
    window 1        d e <sep> f  inputs  d e <sep>  targets  e <sep> f

Windows overlap by one token, so every token but the first is a target exactly once, and the waste is the tail that
does not fill a window. A window may span documents; the separator tells the model where one ends, and `documents` its
attention, if tokens are to see their own document only.
"""

import zlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from minillm.data.tokens import Tokens

SAMPLES, SAMPLE = 64, 1024  # how many pieces, of how many tokens
IGNORE = -100  # a target that does not count, as in torch's cross_entropy


class TokenDataset:
    """Map-style dataset of (inputs, targets), each int64 [seq_len]; torch's DataLoader takes it as it is.

    `tokens`: a `Tokens` or any one-dimensional array or tensor of ids. Raises ValueError if it is shorter than one
    window. `positions`: the places of a window to read, where several ranks share a window (context parallelism);
    nothing else is read, and inputs and targets are [len(positions)]. Those from seq_len on are padding, whose target
    is `IGNORE`.
    """

    def __init__(
        self,
        tokens: Tokens | np.ndarray | torch.Tensor | Sequence[int],
        seq_len: int,
        positions: np.ndarray | torch.Tensor | None = None,
    ):
        array = tokens.array if isinstance(tokens, Tokens) else np.asarray(tokens)
        if seq_len < 1:
            raise ValueError(f"seq_len {seq_len} is too small: a window needs at least 1 input token")
        if len(array) < seq_len + 1:
            raise ValueError(
                f"{len(array)} tokens are too few for seq_len {seq_len}: give more text or a shorter seq_len"
            )
        self.tokens, self.seq_len = tokens, seq_len
        on_host = positions.cpu() if isinstance(positions, torch.Tensor) else positions
        self.positions = None if positions is None else np.asarray(on_host, dtype=np.int64)

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    @property
    def _array(self) -> np.ndarray:
        return self.tokens.array if isinstance(self.tokens, Tokens) else np.asarray(self.tokens)

    @cached_property
    def crc32(self) -> int:
        """Checksum of a sample of tokens spread over all of them: it tells texts of the same length apart."""
        starts = np.linspace(0, max(0, len(self._array) - SAMPLE), SAMPLES).astype(np.int64)
        return zlib.crc32(b"".join(self._array[at : at + SAMPLE].astype("<i8").tobytes() for at in starts))

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = self.batch([index])
        return inputs[0], targets[0]

    def batch(self, indices: Sequence[int] | np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets), each int64 [len(indices), seq_len], or [len(indices), len(positions)]."""
        wanted = np.asarray(indices, dtype=np.int64).reshape(-1)
        if (outside := wanted[(wanted < 0) | (wanted >= len(self))]).size:
            raise IndexError(f"window {outside[0]} is outside 0..{len(self) - 1}")
        array = self._array
        if self.positions is not None:
            return self._parts(array, wanted[:, None] * self.seq_len)
        windows = array[wanted[:, None] * self.seq_len + np.arange(self.seq_len + 1)].astype(np.int64)
        return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())

    def spread(self, count: int) -> list[int]:
        """The indices of `count` windows at even distances, from the first on; of all, if there are not so many."""
        count = min(count, len(self))
        return [index * len(self) // count for index in range(count)]

    def documents(self, indices: Sequence[int] | np.ndarray) -> torch.Tensor:
        """int64 [len(indices), seq_len]: for each token of the windows, in full, the number of its
        document in the text. A separator belongs to the document that it ends."""
        starts = np.asarray(indices, dtype=np.int64).reshape(-1, 1) * self.seq_len
        return torch.from_numpy(np.searchsorted(self._separators, starts + np.arange(self.seq_len)))

    @cached_property
    def _separators(self) -> np.ndarray:
        """Where documents end. ValueError for tokens that do not know their separator."""
        if not isinstance(self.tokens, Tokens):
            raise ValueError(f"{type(self.tokens).__name__} does not say where documents end: give a Tokens.")
        return np.flatnonzero(self.tokens.array == self.tokens.separator)

    def _parts(self, array: np.ndarray, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """starts: [windows, 1], where they begin in `array`."""
        places = starts + np.minimum(self.positions, self.seq_len - 1)
        inputs, targets = (array[each].astype(np.int64) for each in (places, places + 1))
        targets[:, self.positions >= self.seq_len] = IGNORE
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    @property
    def waste(self) -> float:
        """Share of the tokens that no window uses as a target: the tail, and the first token."""
        return 1 - len(self) * self.seq_len / len(self.tokens)
