"""Lab 11's tables about text: what tokenizers make of it, which files are copies of others, and units of loss."""

from collections.abc import Callable, Sequence
from functools import cache

from course.kit.answers import answers_of
from course.lab11_data_pipeline import bpe, experiments, rivals
from course.lab11_data_pipeline import formulas as predict
from course.lab11_data_pipeline.baselines import character_tokenizer, word_tokenizer
from course.lab11_data_pipeline.copies import near_duplicates
from course.shared.table import Table, table
from minillm.data import Tokenizer

answers = answers_of("11_data_pipeline")


@cache
def word_baseline():
    """A word tokenizer with the size and the training text of the committed vocabulary."""
    return word_tokenizer(experiments.documents("train"), 4096)


def tokenizers() -> Table:
    """Characters, words and byte pairs on the held-out files."""
    train = "".join(experiments.documents("train"))
    text, rows = experiments.held_out_text(), []
    named = {"characters": character_tokenizer(train), "words": word_baseline(), "byte pairs": Tokenizer.load()}
    for name, tokenizer in named.items():
        ids = tokenizer.encode(text)
        lost = 0.0 if name == "byte pairs" else tokenizer.unknown_share(text)
        rows.append((name, tokenizer.vocab_size, f"{len(ids):,}", f"{lost:.2%}", str(tokenizer.decode(ids) == text)))
    return table("the held-out files", ("tokens are", "vocabulary", "tokens", "unknown", "text comes back"), rows)


def three_methods(text: str, merges: int = 8) -> Table:
    """The tokens that each method makes of a text, and how it splits the words."""
    words, encode = bpe.words_of(text), answers.encode
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
    changed = [text.replace("self", "this") for text in texts if "self" in text][:5]
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


def units(bits_per_byte: Callable | None = None, sizes: Sequence[int] = (257, 1024, 4096, 8192)) -> Table:
    """The same kind of model, a 2-gram, on several vocabularies, in three units."""
    rows, text_bytes = [], experiments.tokens_by_vocabulary()["bytes"]
    for size in sizes:
        nats, tokens = experiments.ngram_loss(size)
        bits = (bits_per_byte or answers.bits_per_byte)(nats, tokens, text_bytes)
        rows.append((f"{size:,}", f"{nats:.3f}", f"{predict.perplexity(nats):,.1f}", f"{bits:.3f}"))
    return table(
        "2-grams, learnt on an eighth of the files", ("vocabulary", "nats/token", "perplexity", "bits/byte"), rows
    )
