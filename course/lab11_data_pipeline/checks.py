"""Lab 11, the data pipeline: text into tokens, by merging byte pairs, and what a token is worth in bits.

    checks.py           byte pairs merged, text encoded, bits per byte
    checks_batches.py   windows packed, samples dealt to ranks, batches made ahead

Tokens are compared with the `tokenizers` library, on text drawn anew each time.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, Row, receipt, row
from course.lab11_data_pipeline import bpe, experiments
from course.shared.diagnose import expect, expect_list, expect_number

Word = tuple[bytes, ...]
Pair = tuple[bytes, bytes]
ANSWERS = answers_of("11_data_pipeline")


@exercise(
    "bpe-merge-step",
    minutes=15,
    difficulty=2,
    hints=(
        "Count first, glue second. A word that occurs 50 times brings each of its pairs 50 times.",
        "pairwise(word) gives the adjacent pairs. The best has the largest count and, among equals, the smallest "
        "(ids[left], ids[right]): min over (-count, id, id). Glue from the left; a glued token is used up.",
    ),
)
def check_merge_step(learner: Callable) -> Receipt:
    for words, ids, lesson in _small_words():
        _judge_merge(learner, words, ids, lesson)
    text = _some_text(20_000, half=0)
    words, ids, found, steps = bpe.words_of(text), bpe.initial_vocabulary(), [], 40
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
    """Words small enough to see the mistake, letters drawn anew (a < b < c, and so on)."""
    a, b, c, d, e, f = (bytes([byte]) for byte in sorted(random.sample(range(ord("a"), ord("z") + 1), 6)))
    ids = bpe.initial_vocabulary()
    yield {(a, b): 9, (c, d): 2, (c, d, e): 2, (f, c, d): 2}, ids, "how often a word occurs"
    yield {(a, c): 1, (b, f): 2, (d, e): 5, (d, e, f): 1}, ids, "a pair in two words"
    yield {(a, b): 5, (c, d, e, f): 3}, ids, "a long word, which counts as often as it occurs"
    yield {(a, b, c): 1, (d, e): 5, (d, e, f): 1}, ids, "the most frequent pair"
    yield {(c, d): 3, (a, b): 3, (e, f): 3}, ids, "equally frequent pairs"
    yield {(a, d): 3, (a, c): 3, (e, f): 1}, ids, "equally frequent pairs of the same left token"
    yield {(b, c): 3, (a, d): 3}, ids, "equally frequent pairs, left token first"
    yield {(a + b, d): 3, (b, c): 3}, ids | {a + b: 256}, "equally frequent pairs of long and short tokens"
    yield {(a, b, c, a, b): 4, (c, a): 1}, ids, "a pair twice in a word"
    yield {(a, a, a): 2, (a, a, a, a, a): 1, (b, c): 1}, ids, "a letter in a row"
    yield {(b, b, b): 4, (a, c): 6}, ids, "pairs that overlap"
    yield {(c + a, b): 2, (a, b): 7, (a, b + d): 2}, ids | {c + a: 256, b + d: 257}, "tokens of several bytes"


def _judge_merge(learner: Callable, words: dict[Word, int], ids: dict[bytes, int], lesson: str):
    right, merged = ANSWERS.merge_step(words, ids)
    given = dict(words), dict(ids)
    result = learner(*given)
    if given != (words, ids):
        raise CheckFailed("your function changed its argument: the words of a step are also the input of other checks")
    fits = isinstance(result, tuple | list) and len(result) == 2 and isinstance(result[1], dict)
    expect(fits and _is_pair(result[0]), result, "two things: (pair, words), the pair two tokens")
    pair, found = tuple(result[0]), dict(result[1])
    if pair != right:
        raise CheckFailed(f"{lesson}: you merged {_show(pair)}, but {_show(right)} is due", evidence=pair)
    if found == merged:
        return pair, found
    wrong = [(old, new) for old, new in zip(words, merged, strict=True) if found.get(new) != merged[new]]
    if not wrong:
        more = next(word for word in found if word not in merged)
        raise CheckFailed(
            f"{lesson}: your words hold {_show(more)}, which is none of this step's words: begin with an empty dict",
            evidence=found,
        )
    before, word = wrong[0]
    who = f"{lesson}: merging {_show(right)}, {_show(before)} should become {_show(word)}"
    if word in found:
        raise CheckFailed(f"{who}, {merged[word]} times; in your words it occurs {found[word]} times", evidence=found)
    others = [word for word in found if word not in merged]
    raise CheckFailed(f"{who}; your words hold {_show(others[0]) if others else 'no such word'}", evidence=found)


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(token, bytes) for token in pair)


@exercise(
    "bpe-encode",
    minutes=10,
    difficulty=2,
    hints=(
        "New text has to be cut as the training text was: the merges happen in the order in which they were learnt.",
        "While some adjacent pair is in `ranks`: take the one with the smallest rank, wherever it stands, and glue it.",
    ),
)
def check_encode(learner: Callable) -> Receipt:
    a, b, c, d = (bytes([byte]) for byte in random.sample(range(ord("a"), ord("z") + 1), 4))
    for merges, piece in (
        ([], a + b),
        ([(b, c), (c, d)], b + c + d),
        ([(a, b), (c, d), (b, c), (a, b + c)], a + b + c + d),
        ([(a, b), (b, c), (a, b + c)], a + b + c),
        ([(b, c), (a, b)], a + b + c),
        ([(a, b), (b, c), (a + b, c), (c, d)], a + b + c + d),
        ([(c, d), (a, b), (a + b, c)], a + b + c + d),
        ([(a, b), (a + b, a + b)], (a + b) * 4),
        ([(a, a)], a * 5),
        ([(a, b), (b, c), (b + c, d)], a + b + c + d),
        ([(a, b), (c, d), (a + b, c + d)], a + b + c + d + a),
        ([(c, d), (b, c + d), (a, b)], a + b + c + d),
    ):
        _judge_encode(learner, piece, {pair: rank for rank, pair in enumerate(merges)})
    _judge_encode(learner, a + b + c + d, {(b, c): 1, (a, b): 0, (c, d): 2})  # the order of the keys says nothing
    for piece in ("naïve, 恢复".encode(), random.randbytes(30) + b"\xff"):
        pairs = sorted(set(pairwise(piece[at : at + 1] for at in range(len(piece)))))
        _judge_encode(learner, piece, {pair: rank for rank, pair in enumerate(random.sample(pairs, 6))})
    text, other = _some_text(20_000, half=0), _some_text(3_000, half=1)
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
    found, right = learner(piece, given := dict(ranks)), ANSWERS.encode(piece, ranks)
    if given != ranks:
        raise CheckFailed("your function changed `ranks`, which later pieces need as it is")
    found = expect_list(found, "a list of tokens, each a bytes object", of=bytes)
    if found == right:
        return right
    learnt = ", ".join(_show(pair) for pair in sorted(ranks, key=ranks.get)[:4]) + (", ..." if len(ranks) > 4 else "")
    raise CheckFailed(
        f"{piece!r} became {_show(found)}, but it should be {_show(right)}; the merges, in the order in which they "
        f"were learnt: {learnt}",
        evidence=found,
    )


@exercise(
    "bits-per-byte",
    minutes=3,
    difficulty=1,
    hints=(
        "How many nats does the whole text cost? How many bits is that, and over how many bytes do they spread?",
        "nats_per_token · tokens are the nats of the whole text. A bit is ln 2 nats.",
    ),
)
def check_bits_per_byte(learner: Callable) -> list[Row]:
    rows = []
    for name in ("long tokens", "single bytes and separators"):
        text_bytes = random.randint(2_000, 9_000)
        fewest, most = (
            (text_bytes // 4, text_bytes // 2) if name == "long tokens" else (text_bytes + 5, text_bytes + 50)
        )
        tokens = random.randint(fewest, most)
        chances = np.random.default_rng(random.getrandbits(32)).uniform(0.001, 0.9, tokens)
        nats, right = float(-np.log(chances).mean()), float(-np.log2(chances).sum() / text_bytes)
        found = expect_number(learner(nats, tokens, text_bytes), "one number, bits per byte")
        rows.append(row(f"{name}: -Σ log2 p / bytes", right, found, "bit/B", tolerance=1e-6))  # float32 will do
        if rows[-1].verdict == "ok":
            continue
        raise CheckFailed(f"{name}: you found {found:.6g}, but it is {right:.6g}", rows, evidence=found)
    return rows


def _some_text(characters: int, half: int) -> str:
    """A random stretch of this half (0 or 1) of the held-out standard library, ASCII only (beyond it, cuts of other
    libraries differ)."""
    text = experiments.held_out_text().encode("ascii", "ignore").decode()
    start = half * len(text) // 2 + random.randrange(len(text) // 2 - characters)
    return text[start : start + characters]


def _show(tokens: Sequence[bytes]) -> str:
    return "[" + " ".join(token.decode("utf-8", "backslashreplace") for token in tokens) + "]"
