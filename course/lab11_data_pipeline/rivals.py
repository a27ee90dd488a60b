"""Two other ways to choose tokens, on the words of the small text: WordPiece and Unigram.

BPE        merges the most frequent pair                                              count(ab)
WordPiece  merges the pair that is most frequent beside its parts                      count(ab) / (count(a) count(b))
           (Schuster and Nakajima 2012, https://doi.org/10.1109/ICASSP.2012.6289079), and encodes longest first
Unigram    gives every piece a probability, and splits a word into its likeliest pieces (Kudo 2018, section 3.2,
           https://arxiv.org/abs/1804.10959); training starts from many pieces and drops those of least use
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import inf, log

from course.lab11_data_pipeline.bpe import Word

Counts = Mapping[Word, int]


def wordpiece_merges(words: Counts, merges: int) -> list[bytes]:
    """The first tokens that WordPiece's score makes of words, each a tuple of single bytes with how often it occurs."""
    words, made = dict(words), []
    for _ in range(merges):
        single, pairs = Counter(), Counter()
        for word, times in words.items():
            single.update({token: 0 for token in word})
            for token in word:
                single[token] += times
            for pair in pairwise(word):
                pairs[pair] += times
        if not pairs:
            break
        left, right = max(sorted(pairs), key=lambda pair: pairs[pair] / (single[pair[0]] * single[pair[1]]))
        words = {_merged(word, left, right): times for word, times in words.items()}
        made.append(left + right)
    return made


def _merged(word: Word, left: bytes, right: bytes) -> Word:
    tokens: list[bytes] = []
    for token in word:
        if tokens and tokens[-1] == left and token == right:
            tokens[-1] = left + right
        else:
            tokens.append(token)
    return tuple(tokens)


def longest_first(word: bytes, vocabulary: Iterable[bytes]) -> list[bytes]:
    """WordPiece's encoding: the longest token that fits, again and again. Single bytes are always tokens."""
    known, found = set(vocabulary), []
    while word:
        size = next(size for size in range(len(word), 0, -1) if size == 1 or word[:size] in known)
        found.append(word[:size])
        word = word[size:]
    return found


def unigram_pieces(words: Counts, longest: int = 6, rounds: int = 8) -> dict[bytes, float]:
    """Log probabilities of all pieces of at most `longest` bytes, after some rounds of counting the likeliest splits
    (Viterbi training; pieces that no split uses are dropped, single bytes stay)."""
    counts: Counter[bytes] = Counter()
    for word, times in words.items():
        text = b"".join(word)
        for start in range(len(text)):
            for end in range(start + 1, min(len(text), start + longest) + 1):
                counts[text[start:end]] += times
    for _ in range(rounds):
        total = sum(counts.values())
        scores = {piece: log(count / total) for piece, count in counts.items()}
        used: Counter[bytes] = Counter({piece: 0.01 for piece in counts if len(piece) == 1})
        for word, times in words.items():
            for piece in likeliest(b"".join(word), scores):
                used[piece] += times
        counts = used
    return scores


def likeliest(word: bytes, scores: Mapping[bytes, float]) -> list[bytes]:
    """The split of word into pieces whose probabilities have the largest product."""
    best: list[tuple[float, int]] = [(0.0, 0)] + [(-inf, 0)] * len(word)
    for end in range(1, len(word) + 1):
        for start in range(end):
            if word[start:end] in scores:
                best[end] = max(best[end], (best[start][0] + scores[word[start:end]], start))
    found, end = [], len(word)
    while end:
        found.append(word[best[end][1] : end])
        end = best[end][1]
    return found[::-1]
