"""Lab 11, the data pipeline: text into tokens, by merging byte pairs, and what a token is worth in bits.

    checks.py           byte pairs merged, text encoded, bits per byte
    checks_batches.py   windows packed, samples dealt to ranks, batches made ahead

Tokens are compared with the `tokenizers` library, on text drawn anew each time.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from course.lab11_data_pipeline import bpe, experiments
from course.shared.diagnose import expect_number
from minillm.labkit.answers import answers_of
from minillm.labkit.exercises import CheckFailed, exercise
from minillm.labkit.receipts import Receipt, Row, receipt, row

Word = tuple[bytes, ...]
Pair = tuple[bytes, bytes]


ANSWERS = answers_of("11_data_pipeline")


def count_pairs(words: dict[Word, int]) -> Counter[Pair]:
    """How often each adjacent pair occurs in words that occur so many times."""
    counts: Counter[Pair] = Counter()
    for word, times in words.items():
        for pair in pairwise(word):
            counts[pair] += times
    return counts


# What they are held to.


@exercise(
    "bpe-merge-step",
    minutes=15,
    difficulty=2,
    hints=(
        "Count first, glue second. A word that occurs 50 times brings each of its pairs 50 times.",
        "pairwise(word) gives the adjacent pairs. The best has the largest count and, among equals, the smallest "
        "(ids[left], ids[right]): min over (-count, id, id). Glue from the left; a glued token is used up.",
        "best = min(counts, key=lambda p: (-counts[p], ids[p[0]], ids[p[1]])). Then walk over each word with an index: "
        "if word[at:at + 2] == best, append best[0] + best[1] and go on by 2, else append word[at] and go on by 1.",
    ),
)
def check_merge_step(learner: Callable) -> Receipt:
    for words, ids, lesson in _small_words():
        _judge_merge(learner, words, ids, lesson)
    text = _some_text(20_000)
    pieces = Counter(bpe.split(text))
    words = {tuple(bytes([byte]) for byte in piece.encode()): times for piece, times in pieces.items()}
    ids, found, steps = bpe.initial_vocabulary(), [], 40
    start = sum(len(word) * times for word, times in words.items())
    for _ in range(steps):
        pair, words = _judge_merge(learner, words, ids, "text of the standard library")
        found.append(pair)
        ids.setdefault(pair[0] + pair[1], len(ids))
    end = sum(len(word) * times for word, times in words.items())
    theirs = experiments.library_merges(text, 256 + steps)
    same = sum(ours == other for ours, other in zip(found, theirs, strict=False))
    return receipt(
        f"{steps} merges on {start:,} bytes of text",
        [
            row("merges equal to those of the tokenizers library", steps, same),
            row("bytes in the tokens afterwards", start, sum(len(b"".join(w)) * times for w, times in words.items())),
            row("tokens afterwards", None, end),
        ],
    )


def _small_words() -> Iterator[tuple[dict[Word, int], dict[bytes, int], str]]:
    """Words small enough to see the mistake, letters drawn anew."""
    a, b, c, d, e, f = (bytes([byte]) for byte in random.sample(range(ord("a"), ord("z") + 1), 6))
    ids = bpe.initial_vocabulary()
    yield {(a, b): 9, (c, d): 2, (c, d, e): 2, (f, c, d): 2}, ids, "how often a word occurs"
    yield {(a, b, c): 1, (d, e): 5, (d, e, f): 1}, ids, "the most frequent pair"
    yield {(a, b): 3, (c, d): 3, (e, f): 1}, ids, "equally frequent pairs"
    yield {(a, a, a): 2, (a, a, a, a, a): 1, (b, c): 1}, ids, "a letter in a row"
    yield {(a, b, c, a, b): 4, (c, a): 1}, ids, "a pair twice in a word"
    yield {(c + a, b): 2, (a, b): 7, (a, b + d): 2}, ids | {c + a: 256, b + d: 257}, "tokens of several bytes"


def _judge_merge(learner: Callable, words: dict[Word, int], ids: dict[bytes, int], lesson: str):
    right, after = ANSWERS.merge_step(words, ids)
    given = dict(words), dict(ids)
    result = learner(*given)
    if given != (words, ids):
        raise CheckFailed("your function changed its argument: the words of a step are also the input of other checks")
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise CheckFailed(f"you returned {type(result).__name__}; asked for are two things: (pair, words)")
    pair, found = result
    pair = tuple(pair)
    if pair != right:
        raise CheckFailed(f"{lesson}: you merged {_show(pair)}, but {_show(right)} is due{_why(pair, words)}")
    by_bytes = {b"".join(word): word for word in found}
    for before, word in zip(words, after, strict=True):
        mine = by_bytes.get(b"".join(word))
        if mine == word:
            if found[mine] != after[word]:
                raise CheckFailed(f"{lesson}: {_show(word)} occurs {after[word]} times, in your words {found[mine]}")
            continue
        if mine is None:
            odd = next((w for w in found if w not in after), ())
            raise CheckFailed(
                f"{lesson}: bytes were lost or doubled: {_show(before)} is now missing, and there is {_show(odd)}. "
                "A token that was glued is used up and cannot be glued again"
            )
        if right in pairwise(mine):
            raise CheckFailed(f"{lesson}: {_show(mine)} still holds {_show(right)}: glue every occurrence, from left")
        raise CheckFailed(
            f"{lesson}: {_show(before)} became {_show(mine)}, not {_show(word)}: only the tokens {_show(right)} "
            "side by side are that pair, not bytes that look like it"
        )
    return pair, found


def _why(pair: Pair, words: dict[Word, int]) -> str:
    counts, kinds = count_pairs(words), count_pairs(dict.fromkeys(words, 1))
    most = max(counts.values())
    if pair not in counts:
        return ": no word has yours"
    if counts[pair] == most:
        return ": equally frequent, but its pair of ids is smaller"
    if kinds[pair] == max(kinds.values()) and max(kinds.values()) > 1:
        return f": yours is in {kinds[pair]} different words, which occur {counts[pair]} times in all, the other {most}"
    first = next(each for word in words for each in pairwise(word))
    return (": the first pair is not the most frequent" if pair == first else "") + f" ({counts[pair]} against {most})"


@exercise(
    "bpe-encode",
    minutes=10,
    difficulty=2,
    hints=(
        "New text has to be cut as the training text was: the merges happen in the order in which they were learnt.",
        "While some adjacent pair is in `ranks`: take the one with the smallest rank, wherever it stands, and glue it.",
        "while known := [pair for pair in pairwise(word) if pair in ranks]: best = min(known, key=ranks.get), "
        "then glue best in word as in the exercise before.",
    ),
)
def check_encode(learner: Callable) -> Receipt:
    a, b, c, d = (bytes([byte]) for byte in random.sample(range(ord("a"), ord("z") + 1), 4))
    for ranks, piece in (
        ({}, a + b),
        ({(b, c): 0, (a, b): 1}, a + b + c),
        ({(a, b): 0, (b, c): 1, (a + b, c): 2, (c, d): 3}, a + b + c + d),
        ({(c, d): 0, (a, b): 1, (a + b, c): 2}, a + b + c + d),
        ({(a, b): 0, (a + b, a + b): 1}, (a + b) * 4),
    ):
        _judge_encode(learner, piece, ranks)
    text, other = _some_text(20_000), _some_text(3_000)
    merges = experiments.library_merges(text, 256 + 120)
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    pieces = [piece.encode() for piece in bpe.split(other)]
    found = [token for piece in pieces for token in _judge_encode(learner, piece, ranks)]
    theirs = experiments.library_encode(merges, other)
    return receipt(
        f"{len(pieces)} pieces of text nobody trained on, {len(merges)} merges",
        [
            row("tokens, yours and the tokenizers library's", len(theirs), len(found)),
            row("the same tokens", True, found == theirs),
            row("bytes of the text come back", len(other.encode()), len(b"".join(found)), "B"),
        ],
    )


def _judge_encode(learner: Callable, piece: bytes, ranks: dict[Pair, int]) -> list[bytes]:
    found, right = learner(piece, dict(ranks)), ANSWERS.encode(piece, ranks)
    if not isinstance(found, (list, tuple)):
        raise CheckFailed(f"you returned {type(found).__name__}; asked for is a list of tokens, each a bytes object")
    found = list(found)
    if found == right:
        return found
    got = f"{piece!r} became {_show(found)}, not {_show(right)}"
    if b"".join(found) != piece:
        raise CheckFailed(f"{got}: the tokens do not join to the text")
    if left := [pair for pair in pairwise(found) if pair in ranks]:
        raise CheckFailed(f"{got}: {_show(left[0])} was learnt and still stands side by side: go on until none is left")
    singles = [bytes([byte]) for byte in piece]
    first = min((pair for pair in pairwise(singles) if pair in ranks), key=ranks.__getitem__)
    raise CheckFailed(
        f"{got}: of all learnt pairs the one learnt first (lowest rank) is glued first, wherever it stands; "
        f"here that is {_show(first)}, rank {ranks[first]}"
    )


@exercise(
    "bits-per-byte",
    minutes=3,
    difficulty=1,
    hints=(
        "How many nats does the whole text cost? How many bits is that, and over how many bytes do they spread?",
        "nats_per_token · tokens are the nats of the whole text. A bit is ln 2 nats.",
        "return nats_per_token * tokens / math.log(2) / text_bytes",
    ),
)
def check_bits_per_byte(learner: Callable) -> list[Row]:
    rows = []
    for name in ("long tokens", "single bytes"):
        text_bytes = random.randint(2_000, 9_000)
        tokens = text_bytes if name == "single bytes" else random.randint(text_bytes // 4, text_bytes // 2)
        chances = np.random.default_rng(random.getrandbits(32)).uniform(0.001, 0.9, tokens)
        nats, right = float(-np.log(chances).mean()), float(-np.log2(chances).sum() / text_bytes)
        found = expect_number(learner(nats, tokens, text_bytes), "one number, bits per byte")
        rows.append(row(f"{name}: -Σ log2 p / bytes", right, found, "bit/B", tolerance=1e-6))  # float32 will do
        if rows[-1].verdict == "ok":
            continue
        known = {
            nats * tokens / text_bytes: "that is nats per byte: a bit is ln 2 nats, so divide by ln 2",
            nats / math.log(2): "that is bits per token: a token is several bytes",
            nats / math.log(2) * text_bytes / tokens: "upside down: more bytes per token mean fewer bits for each",
            nats * math.log(2) * tokens / text_bytes: "multiplied by ln 2: a nat is 1.44 bits, so divide",
            math.exp(nats): "that is the perplexity",
        }
        said = next((said for wrong, said in known.items() if math.isclose(found, wrong, rel_tol=1e-6)), "see the row")
        raise CheckFailed(f"{name}: you found {found:.6g}, but it is {right:.6g}: {said}", rows)
    return rows


def _some_text(characters: int) -> str:
    """A random stretch of the held-out standard library, ASCII only (beyond it, cuts of other libraries differ)."""
    text = experiments.held_out_text().encode("ascii", "ignore").decode()
    start = random.randrange(len(text) - characters)
    return text[start : start + characters]


def _show(tokens: Sequence[bytes]) -> str:
    return "[" + " ".join(token.decode("utf-8", "backslashreplace") for token in tokens) + "]"
