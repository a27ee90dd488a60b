"""Spoilers of lab 11: merges, encodings and bits per byte as people get them wrong, and right ones that look
different."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake

right = answers_of("11_data_pipeline")


def count_pairs(words):
    """How often each adjacent pair occurs in words that occur so many times."""
    counts = Counter()
    for word, times in words.items():
        for pair in pairwise(word):
            counts[pair] += times
    return counts


def glue(word, pair):
    """The word with each occurrence of the pair glued, from the left."""
    out = []
    for token in word:
        if out and out[-1] == [pair[0]] and token == pair[1]:
            out[-1] = [pair[0], pair[1]]
        else:
            out.append([token])
    return tuple(b"".join(tokens) for tokens in out)


def glue_all(words, pair):
    return {glue(word, pair): times for word, times in words.items()}


# BPE: one merge.


@mistake(
    "bpe-merge-step",
    "counts each different word once",
    says="You count each different word once: multiply by how often the word occurs.",
)
def counts_words_once(words, ids):
    counts = count_pairs(dict.fromkeys(words, 1))
    best = min(counts, key=lambda pair: (-counts[pair], ids[pair[0]], ids[pair[1]]))
    return best, glue_all(words, best)


@mistake(
    "bpe-merge-step",
    "merges the first pair instead of the most frequent",
    says="That is the first pair of the text, whatever its count.",
)
def first_pair(words, ids):
    best = next(pair for word in words for pair in pairwise(word))
    return best, glue_all(words, best)


def with_ties_by(key):
    """merge_step, with the tie rule `key(pair, ids)`: the smallest goes first."""

    def merge_step(words, ids):
        counts = count_pairs(words)
        best = min(counts, key=lambda pair: (-counts[pair], key(pair, ids)))
        return best, glue_all(words, best)

    return merge_step


TIES = {
    "leaves ties to the order of the text": (
        lambda pair, ids: 0,
        "Of equally frequent pairs you take the one that the text has first: the smallest ids go first.",
    ),
    "the largest ids of a tie": (
        lambda pair, ids: (-ids[pair[0]], -ids[pair[1]]),
        "Of equally frequent pairs you take the one with the largest ids: max does that, where the rule asks for min.",
    ),
    "ties by the left id alone": (
        lambda pair, ids: ids[pair[0]],
        "Pairs with the same left token tie again: compare the id of the right token next.",
    ),
    "ties by the right id first": (
        lambda pair, ids: (ids[pair[1]], ids[pair[0]]),
        "Compare the id of the left token first, that of the right one second.",
    ),
    "ties by the bytes": (
        lambda pair, ids: pair,
        "You compare tokens as bytes. Among equals the smallest ids decide, and a long token has a large id.",
    ),
}
for label, (key, says) in TIES.items():
    mistake("bpe-merge-step", label, says=says)(with_ties_by(key))


@mistake(
    "bpe-merge-step",
    "a pair counts once per word",
    says="A pair that stands twice in a word counts twice: do not make a set of a word's pairs.",
)
def once_per_word(words, ids):
    counts = Counter()
    for word, times in words.items():
        counts.update(dict.fromkeys(pairwise(word), times))
    best = min(counts, key=lambda pair: (-counts[pair], ids[pair[0]], ids[pair[1]]))
    return best, glue_all(words, best)


@mistake(
    "bpe-merge-step",
    "counts pairs that overlap once",
    says="`b b b` holds the pair b, b twice: all neighbours count, although only one of the two can be merged.",
)
def without_overlaps(words, ids):
    counts = Counter()
    for word, times in words.items():
        at = 0
        while at < len(word) - 1:
            counts[word[at : at + 2]] += times
            at += 2 if word[at : at + 2] == word[at + 1 : at + 3] else 1
    best = min(counts, key=lambda pair: (-counts[pair], ids[pair[0]], ids[pair[1]]))
    return best, glue_all(words, best)


@mistake(
    "bpe-merge-step",
    "merges from the right",
    says="You merge from the right: of three equal tokens the first two belong together.",
)
def from_the_right(words, ids):
    best, _ = right.merge_step(words, ids)

    def backwards(word):
        return tuple(
            token[::-1] for token in glue([token[::-1] for token in word[::-1]], [t[::-1] for t in best[::-1]])
        )[::-1]

    return best, {backwards(word): times for word, times in words.items()}


@mistake(
    "bpe-merge-step",
    "glues overlapping occurrences",
    says="A token that was merged is used up: you merged it with its next neighbour as well.",
)
def overlapping(words, ids):
    best, _ = right.merge_step(words, ids)

    def glued_word(word):
        if best not in pairwise(word):
            return word
        glued = [b"".join(pair) if pair == best else pair[0] for pair in pairwise(word)]
        return tuple(glued) if word[-2:] == best else (*glued, word[-1])

    return best, {glued_word(word): times for word, times in words.items()}


@mistake(
    "bpe-merge-step",
    "glues the first occurrence in a word only",
    says="Go on after the first merge: a word may hold the pair again.",
)
def first_occurrence(words, ids):
    best, _ = right.merge_step(words, ids)

    def glued_word(word):
        for at, pair in enumerate(pairwise(word)):
            if pair == best:
                return (*word[:at], b"".join(best), *word[at + 2 :])
        return word

    return best, {glued_word(word): times for word, times in words.items()}


@mistake(
    "bpe-merge-step",
    "replaces text, so the end of a longer token counts",
    says="You compare bytes, not tokens: a longer token that ends in the same bytes is not part of the pair.",
)
def replaces_text(words, ids):
    best, _ = right.merge_step(words, ids)
    merged = {}
    for word, times in words.items():
        text = b"\0".join(word).replace(b"\0".join(best), b"".join(best))
        merged[tuple(text.split(b"\0"))] = times
    return best, merged


@mistake("bpe-merge-step", "glues in the words it was given", expect="changed its argument")
def in_place(words, ids):
    best, merged = right.merge_step(words, ids)
    words.clear()
    words.update(merged)
    return best, words


@alternative("bpe-merge-step", "sorts the pairs, glues with a stack")
def with_a_stack(words, ids):
    counts = count_pairs(words)
    best = sorted(counts, key=lambda pair: (-counts[pair], ids[pair[0]], ids[pair[1]]))[0]
    merged = {}
    for word, times in words.items():
        stack, fresh = [], False  # fresh: the top was glued just now and is used up
        for token in word:
            if stack and not fresh and (stack[-1], token) == best:
                stack[-1], fresh = stack[-1] + token, True
            else:
                stack.append(token)
                fresh = False
        merged[tuple(stack)] = times
    return best, merged


# BPE: encoding.


@mistake(
    "bpe-encode",
    "merges in the order of the text",
    says="You merge the leftmost known pair first: the pair that was learnt first goes first, wherever it stands.",
)
def text_order(piece, ranks):
    word = tuple(bytes([byte]) for byte in piece)
    while known := [pair for pair in pairwise(word) if pair in ranks]:
        word = glue(word, known[0])
    return list(word)


@mistake(
    "bpe-encode",
    "takes the pair learnt last",
    says="You merge the pair that was learnt last: the lowest rank goes first.",
)
def highest_rank(piece, ranks):
    word = tuple(bytes([byte]) for byte in piece)
    while known := [pair for pair in pairwise(word) if pair in ranks]:
        word = glue(word, max(known, key=ranks.__getitem__))
    return list(word)


@mistake(
    "bpe-encode",
    "longest token first, as WordPiece does",
    says="You take the longest known token from the left, as WordPiece does; byte pairs are merged by rank.",
)
def longest_first(piece, ranks):
    vocabulary, tokens, at = {b"".join(pair) for pair in ranks}, [], 0
    while at < len(piece):
        end = next((end for end in range(len(piece), at + 1, -1) if piece[at:end] in vocabulary), at + 1)
        tokens.append(piece[at:end])
        at = end
    return tokens


@mistake(
    "bpe-encode",
    "stops after the first merge",
    says="You stop after one merge: look for known pairs again, until none is left.",
)
def one_merge(piece, ranks):
    word = tuple(bytes([byte]) for byte in piece)
    if known := [pair for pair in pairwise(word) if pair in ranks]:
        word = glue(word, min(known, key=ranks.__getitem__))
    return list(word)


@mistake(
    "bpe-encode",
    "merges from the right",
    says="Of three equal tokens the first two are merged, not the last two.",
)
def encode_from_the_right(piece, ranks):
    word = [piece[i : i + 1] for i in range(len(piece))]
    while known := [(ranks[pair], -at) for at, pair in enumerate(pairwise(word)) if pair in ranks]:
        at = -min(known)[1]
        word[at : at + 2] = [word[at] + word[at + 1]]
    return word


@mistake(
    "bpe-encode",
    "uses only the pairs of the bytes",
    says="You merge only pairs of single bytes: a merged token can be part of a further pair.",
)
def bytes_only(piece, ranks):
    singles = [bytes([byte]) for byte in piece]
    word = tuple(singles)
    for pair in sorted(set(pairwise(singles)) & set(ranks), key=ranks.__getitem__):
        word = glue(word, pair)
    return list(word)


@mistake("bpe-encode", "gives ranks instead of tokens", expect="each a bytes object")
def as_numbers(piece, ranks):
    return [ranks.get((token[:-1], token[-1:]), token[0]) for token in right.encode(piece, ranks)]


@alternative("bpe-encode", "all occurrences of the lowest pair at a time")
def all_at_once(piece, ranks):
    word = tuple(bytes([byte]) for byte in piece)
    while known := [pair for pair in pairwise(word) if pair in ranks]:
        word = glue(word, min(known, key=ranks.__getitem__))
    return word


@alternative("bpe-encode", "one sweep per merge, in the order of the ranks")
def one_sweep_each(piece, ranks):
    word = tuple(bytes([byte]) for byte in piece)
    for pair in sorted(ranks, key=ranks.get):
        word = glue(word, pair)
    return list(word)


# Bits per byte.


@mistake("bits-per-byte", "leaves nats as they are", says="These are nats per byte: divide by ln 2 to have bits.")
def in_nats(nats_per_token, tokens, text_bytes):
    return nats_per_token * tokens / text_bytes


@mistake("bits-per-byte", "bits per token", says="These are bits per token; a token is several bytes.")
def per_token(nats_per_token, tokens, text_bytes):
    return nats_per_token / math.log(2)


@mistake(
    "bits-per-byte",
    "bytes per token upside down",
    says="Tokens and bytes are swapped: the more bytes a token has, the fewer bits each of them costs.",
)
def upside_down(nats_per_token, tokens, text_bytes):
    return nats_per_token / math.log(2) * text_bytes / tokens


@mistake("bits-per-byte", "multiplies by ln 2", says="You multiplied by ln 2: a nat is 1.44 bits, so divide.")
def times_ln2(nats_per_token, tokens, text_bytes):
    return nats_per_token * math.log(2) * tokens / text_bytes


@mistake("bits-per-byte", "the perplexity", says="That is the perplexity, exp(nats per token).")
def as_perplexity(nats_per_token, tokens, text_bytes):
    return math.exp(nats_per_token)


@mistake("bits-per-byte", "log10", says="You divided by ln 10, which gives decimal digits and not bits.")
def in_digits(nats_per_token, tokens, text_bytes):
    return nats_per_token / math.log(10) * tokens / text_bytes


@mistake(
    "bits-per-byte",
    "divided by 8 as well",
    says="Divided by 8: the bytes are those of the text, and are not converted to bits.",
)
def per_bit(nats_per_token, tokens, text_bytes):
    return nats_per_token / math.log(2) * tokens / (8 * text_bytes)


@mistake("bits-per-byte", "of the whole text", says="These are the bits of the whole text: divide by its bytes.")
def in_total(nats_per_token, tokens, text_bytes):
    return nats_per_token / math.log(2) * tokens


@alternative("bits-per-byte", "through the perplexity")
def through_perplexity(nats_per_token, tokens, text_bytes):
    return math.log2(math.exp(nats_per_token)) / (text_bytes / tokens)


@alternative("bits-per-byte", "in float32")
def in_float32(nats_per_token, tokens, text_bytes):
    return float(np.float32(nats_per_token) / np.float32(np.log(2)) * np.float32(tokens) / np.float32(text_bytes))
