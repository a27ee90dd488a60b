"""Byte-level byte-pair encoding from scratch: the mechanism behind tokenizer.json, in plain Python.

    train:   start from the 256 bytes; again and again glue the most frequent adjacent pair into a new token
    encode:  glue the pair that was learnt earliest, until no learnt pair is left

Text is first cut into pieces (`split`) and no token crosses a cut. Everything is bytes, so nothing is ever unknown.

Tie rule, the one of the `tokenizers` library: of equally frequent pairs the one with the smallest (left id, right id)
is merged first. Ids 0..255 are the bytes in the order of their printable stand-ins (`BYTE_TO_CHAR`); a merge takes the
next free id, except that a string which already is a token keeps its id. Slow (every merge recounts the pieces that
hold the pair), clear, and equal to the library merge for merge.

Sources: Sennrich, Haddow, Birch 2016, section 3.2 (merges); Radford et al. 2019, section 2.2 (bytes).
"""

import re
from collections import Counter
from itertools import pairwise

from minillm.data.tokenizer import BYTE_TO_CHAR, CHAR_TO_BYTE

__all__ = ["BYTE_TO_CHAR", "CHAR_TO_BYTE", "encode", "initial_vocabulary", "split", "train"]

# GPT-2's cut, with `re`'s character classes: the same for ASCII text. Words, numbers and punctuation take one space
# before them; the indentation of a line stays together but for its last space.
_PIECES = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")

Merge = tuple[bytes, bytes]


def split(text: str) -> list[str]:
    """Cuts text into pieces whose concatenation is the text."""
    return _PIECES.findall(text)


def initial_vocabulary() -> dict[bytes, int]:
    """The 256 single bytes with their ids."""
    return {bytes([CHAR_TO_BYTE[char]]): token_id for token_id, char in enumerate(sorted(CHAR_TO_BYTE))}


def train(text: str, vocab_size: int) -> list[Merge]:
    """Learns merges until the vocabulary holds `vocab_size` tokens or every piece is one token."""
    vocabulary = initial_vocabulary()
    if vocab_size < len(vocabulary):
        raise ValueError(f"vocab_size {vocab_size} is too small: the 256 bytes alone need 256 tokens")
    pieces = Counter(split(text))
    words = {piece: [bytes([byte]) for byte in piece.encode()] for piece in pieces}
    pairs: Counter[Merge] = Counter()
    holders: dict[Merge, set[str]] = {}  # a pair -> the pieces it was seen in
    for piece, word in words.items():
        _count(pairs, holders, piece, word, pieces[piece])

    merges: list[Merge] = []
    while len(vocabulary) < vocab_size and pairs:
        best = min(pairs, key=lambda pair: (-pairs[pair], vocabulary[pair[0]], vocabulary[pair[1]]))
        for piece in list(holders[best]):
            _count(pairs, holders, piece, words[piece], -pieces[piece])
            words[piece] = _merge(words[piece], best)
            _count(pairs, holders, piece, words[piece], pieces[piece])
        pairs.pop(best, None)
        merges.append(best)
        vocabulary.setdefault(best[0] + best[1], len(vocabulary))
    return merges


def encode(text: str, merges: list[Merge]) -> list[bytes]:
    """The tokens of `text`, as byte strings: their concatenation is the text in UTF-8."""
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    tokens: list[bytes] = []
    for piece in split(text):
        word = [bytes([byte]) for byte in piece.encode()]
        while known := [pair for pair in pairwise(word) if pair in ranks]:
            word = _merge(word, min(known, key=ranks.__getitem__))
        tokens += word
    return tokens


def _merge(word: list[bytes], pair: Merge) -> list[bytes]:
    """Replaces each occurrence of `pair`, from the left, by its concatenation."""
    merged, at = [], 0
    while at < len(word):
        found = tuple(word[at : at + 2]) == pair
        merged.append(pair[0] + pair[1] if found else word[at])
        at += 2 if found else 1
    return merged


def _count(pairs: Counter[Merge], holders: dict[Merge, set[str]], piece: str, word: list[bytes], times: int) -> None:
    for pair in pairwise(word):
        pairs[pair] += times
        holders.setdefault(pair, set()).add(piece)
        if not pairs[pair]:
            del pairs[pair]
