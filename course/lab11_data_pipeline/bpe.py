"""What byte-pair encoding needs around the two functions that the learner writes: one merge, and encoding one piece.

    train:   start from the 256 bytes; merge step by step
    encode:  cut the text into pieces (`split`) and encode each; no token crosses a cut

Everything is bytes, so nothing is ever unknown.

Tie rule, the one of the `tokenizers` library: of equally frequent pairs the one with the smallest (left id, right id)
is merged first. Ids 0..255 are the bytes in the order of their printable stand-ins (`BYTE_TO_CHAR`); a merge takes the
next free id, except that a string which already is a token keeps its id. Slow, clear, and equal to the library merge
for merge.

Sources: Sennrich, Haddow and Birch 2016, section 3.2 (merges), https://arxiv.org/abs/1508.07909; Radford et al. 2019,
section 2.2 (bytes), https://openai.com/index/better-language-models
"""

import re
from collections import Counter
from collections.abc import Callable

from course.kit.answers import answers_of
from minillm.data.tokenizer import BYTE_TO_CHAR, CHAR_TO_BYTE

__all__ = ["BYTE_TO_CHAR", "CHAR_TO_BYTE", "encode", "initial_vocabulary", "split", "train", "words_of"]

# GPT-2's cut, with `re`'s character classes: the same for ASCII text. Words, numbers and punctuation take one space
# before them; the indentation of a line stays together but for its last space.
_PIECES = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")

Merge = tuple[bytes, bytes]
Word = tuple[bytes, ...]


def split(text: str) -> list[str]:
    """Cuts text into pieces whose concatenation is the text."""
    return _PIECES.findall(text)


def initial_vocabulary() -> dict[bytes, int]:
    """The 256 single bytes with their ids."""
    return {bytes([CHAR_TO_BYTE[char]]): token_id for token_id, char in enumerate(sorted(CHAR_TO_BYTE))}


def words_of(text: str) -> dict[Word, int]:
    """The pieces of text as tuples of single bytes, each with how often it occurs."""
    return {tuple(bytes([byte]) for byte in piece.encode()): times for piece, times in Counter(split(text)).items()}


def train(text: str, vocab_size: int, merge_step: Callable | None = None) -> list[Merge]:
    """Merges learnt with `merge_step` (else the course's), until there are `vocab_size` tokens or no pair is left."""
    merge_step = merge_step or answers_of("11_data_pipeline").merge_step
    vocabulary, words, merges = initial_vocabulary(), words_of(text), []
    if vocab_size < len(vocabulary):
        raise ValueError(f"vocab_size {vocab_size} is too small: the 256 bytes alone need 256 tokens")
    while len(vocabulary) < vocab_size and any(len(word) > 1 for word in words):
        (left, right), words = merge_step(words, vocabulary)
        merges.append((left, right))
        vocabulary.setdefault(left + right, len(vocabulary))
    return merges


def encode(text: str, merges: list[Merge], encode_piece: Callable | None = None) -> list[bytes]:
    """The tokens of `text`, as byte strings, piece by piece: their concatenation is the text in UTF-8."""
    encode_piece = encode_piece or answers_of("11_data_pipeline").encode
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    pieces = split(text)
    known = {piece: encode_piece(piece.encode(), ranks) for piece in dict.fromkeys(pieces)}
    return [token for piece in pieces for token in known[piece]]
