"""Copies in a corpus: texts that share most of their rows of words, whatever lies between."""

from collections.abc import Sequence
from hashlib import blake2b

SHINGLE = 8  # words


def shingles(text: str, size: int = SHINGLE) -> set[int]:
    """64-bit hashes of every `size` words in a row (Broder 1997, https://doi.org/10.1109/SEQUEN.1997.666900)."""
    words = text.split()
    rows = (" ".join(words[place : place + size]) for place in range(max(1, len(words) - size + 1)))
    return {int.from_bytes(blake2b(row.encode(), digest_size=8).digest()) for row in rows}


def near_duplicates(texts: Sequence[str], alike: float = 0.5) -> list[int]:
    """Places of the texts that share at least this part of their shingles with the texts before them."""
    seen: set[int] = set()
    found = []
    for place, text in enumerate(texts):
        mine = shingles(text)
        if len(mine & seen) >= alike * len(mine):
            found.append(place)
        else:
            seen |= mine
    return found
