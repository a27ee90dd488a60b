"""The two tokenizers that byte-level BPE replaced, small enough to compare with (lab 11).

characters   lossless for the characters of the training text; sequences are as long as the text
words        short sequences, but every word outside the vocabulary becomes <unk>, and the text is gone
"""

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from course.lab11_data_pipeline.bpe import split

UNKNOWN = "<unk>"


class VocabularyTokenizer:
    """Tokens are whole strings of a fixed vocabulary; id 0 is `UNKNOWN`, the only thing left of all other strings."""

    def __init__(self, tokens: list[str], pieces=list):
        self._names = [UNKNOWN, *tokens]
        self._ids = {name: token_id for token_id, name in enumerate(self._names)}
        self._pieces = pieces
        self.vocab_size = len(self._names)

    def encode(self, text: str) -> list[int]:
        """One id per piece of the text."""
        return [self._ids.get(piece, 0) for piece in self._pieces(text)]

    def decode(self, ids: list[int]) -> str:
        """The strings of the ids, joined."""
        return "".join(self._names[token_id] for token_id in ids)

    def unknown_share(self, text: str) -> float:
        """Share of the text's pieces that are out of vocabulary."""
        ids = self.encode(text)
        return ids.count(0) / max(len(ids), 1)


def character_tokenizer(text: str) -> VocabularyTokenizer:
    """Every character that `text` holds."""
    return VocabularyTokenizer(sorted(set(text)))


def word_tokenizer(texts: Iterable[str], vocab_size: int) -> VocabularyTokenizer:
    """The `vocab_size` - 1 most frequent pieces of texts (words with the space before them, numbers, punctuation)."""
    frequent = Counter(chain.from_iterable(map(split, texts))).most_common(vocab_size - 1)
    return VocabularyTokenizer([piece for piece, _ in frequent], split)
