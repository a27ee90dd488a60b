"""A file of weights that counts what is read from it, and what each rank of a layout should have read."""

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minillm.predict.serving.handover import heads_of

ROWS, COLUMNS, WHOLE, KV, WORDS = KINDS = ("rows", "columns", "whole", "kv", "words")


@dataclass
class WeightsFile:
    """Named matrices on disk, as safetensors' slices give them. bytes_read: so far."""

    tensors: dict[str, Tensor] = field(repr=False)
    bytes_read: int = 0

    def shape(self, name: str) -> tuple[int, int]:
        """(rows, columns), which stand in the file's head: nothing is read for them."""
        rows, columns = self.tensors[name].shape
        return rows, columns

    def read(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """A part of a matrix; slices are clipped to it, as Python's are."""
        part = self.tensors[name][rows, columns].clone()
        self.bytes_read += part.nbytes
        return part

    @classmethod
    def draw(
        cls, world_size: int, kv_heads: int, dtype: torch.dtype, words: int | None = None
    ) -> "tuple[WeightsFile, dict[str, str]]":
        """A small model's matrices and how each is cut. words: rows of its embedding, drawn if None."""
        n, d = world_size, random.randint(2, 3)
        h, vocab = n * random.randint(2, 3), words or n * random.randint(3, 5) - random.randint(0, n - 1)
        heads, inner = max(n, kv_heads) * random.randint(1, 2), n * random.randint(2, 4)
        shapes = {
            "embedding": (vocab, h, WORDS), "q": (heads * d, h, ROWS), "k": (kv_heads * d, h, KV),
            "v": (kv_heads * d, h, KV), "o": (h, heads * d, COLUMNS), "norm": (1, h, WHOLE),
            "up": (inner, h, ROWS), "down": (h, inner, COLUMNS),
        }  # fmt: skip
        names = random.sample(list(shapes), len(shapes))
        tensors = {name: torch.randn(shapes[name][:2]).to(dtype) for name in names}
        return cls(tensors), {name: shapes[name][2] for name in names}

    def part(self, name: str, kind: str, kv_heads: int, rank: int, n: int) -> Tensor:
        """What a rank holds, cut from the whole matrix."""
        whole = self.tensors[name]
        if kind == WHOLE:
            return whole
        if kind == KV:
            return whole.unflatten(0, (kv_heads, -1))[list(heads_of(kv_heads, n, rank))].flatten(0, 1)
        if kind == WORDS:
            padded = whole.new_zeros(-(-len(whole) // n) * n, whole.shape[1])
            padded[: len(whole)] = whole
            return padded.chunk(n)[rank]
        return whole.chunk(n, 0 if kind == ROWS else 1)[rank]

    def held_bytes(self, cuts: dict[str, str], kv_heads: int, rank: int, n: int) -> int:
        """Bytes of a rank's parts that are in the file: without the padding."""
        total = 0
        for name, kind in cuts.items():
            part = self.part(name, kind, kv_heads, rank, n)
            beyond = max(0, (rank + 1) * len(part) - len(self.tensors[name])) if kind == WORDS else 0
            total += (len(part) - min(beyond, len(part))) * part.shape[1] * part.itemsize
        return total
