"""Lab 11's tables about text: how three methods cut it into tokens, and which files are copies of others."""

from collections.abc import Sequence

from course.kit.answers import answers_of
from course.lab11_data_pipeline import bpe, experiments, rivals
from course.lab11_data_pipeline.copies import near_duplicates
from course.shared.table import Table, table


def three_methods(text: str, merges: int = 8) -> Table:
    """The tokens that each method makes of a text, and how it splits the words."""
    words, encode = bpe.words_of(text), answers_of("11_data_pipeline").encode
    pairs, pieces, scores = (
        bpe.train(text, 256 + merges),
        rivals.wordpiece_merges(words, merges),
        rivals.unigram_pieces(words),
    )
    ranks = {pair: rank for rank, pair in enumerate(pairs)}
    whole = [b"".join(word) for word in words]
    likely = sorted((piece for piece in scores if len(piece) > 1), key=scores.__getitem__, reverse=True)
    methods = {
        "BPE": ([left + right for left, right in pairs], lambda word: encode(word, ranks)),
        "WordPiece": (pieces, lambda word: rivals.longest_first(word, pieces)),
        "Unigram": (likely, lambda word: rivals.likeliest(word, scores)),
    }
    lines = [
        (name, " ".join(_shown(made[:4])), *("|".join(_shown(split(word))) for word in whole))
        for name, (made, split) in methods.items()
    ]
    return table("the small text", ("", "first or likeliest tokens", *_shown(whole)), lines)


def _shown(tokens: Sequence[bytes]) -> list[str]:
    return [token.decode().replace(" ", "·") for token in tokens]


def copies() -> Table:
    """Near duplicates among the held-out files, and among copies of some that were planted."""
    texts = list(experiments.documents("validation"))
    changed = [text.replace("self", "this") for text in texts[:5]]
    found = near_duplicates(texts + changed)
    natural = sum(place < len(texts) for place in found)
    return table(
        "files that share half of their rows of 8 words with files before them",
        ("", "files", "found"),
        [
            ("held-out files", len(texts), natural),
            ("copies of five of them, every self renamed", len(changed), len(found) - natural),
        ],
    )
