"""Spoilers of lab 11: merges, encodings and bits per byte as people get them wrong, and right ones that look
different."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers

right = answers_of("11_data_pipeline")


def glue(word, pair):
    """The word with each occurrence of the pair glued, from the left."""
    out = []
    for token in word:
        if out and out[-1] == [pair[0]] and token == pair[1]:
            out[-1] = [pair[0], pair[1]]
        else:
            out.append([token])
    return tuple(b"".join(tokens) for tokens in out)


# BPE: one merge.

bpe_merge_step = KnownAnswers("bpe-merge-step")

bpe_merge_step.mistake(
    "counts each different word once",
    {"counts[pair] += times": "counts[pair] += 1"},
    says="You count each different word once: multiply by how often the word occurs.",
)
bpe_merge_step.mistake(
    "the count of the last word alone",
    {"counts[pair] += times": "counts[pair] = times"},
    says="Each word overwrites the count of a pair that others have, too: add to it.",
)
bpe_merge_step.mistake(
    "a long word counts more",
    {"counts[pair] += times": "counts[pair] += times * len(word)"},
    says="A word brings each of its pairs as often as it occurs, however long it is.",
)
bpe_merge_step.mistake(
    "merges the first pair instead of the most frequent",
    {"min(counts, key=lambda pair: (-counts[pair], ids[pair[0]], ids[pair[1]]))": "next(iter(counts))"},
    says="That is the first pair of the text, whatever its count.",
)
bpe_merge_step.mistake(
    "leaves ties to the order of the text",
    {", ids[pair[0]], ids[pair[1]]": ""},
    says="Of equally frequent pairs you take the one that the text has first: the smallest ids go first.",
)
bpe_merge_step.mistake(
    "the largest ids of a tie",
    {"ids[pair[0]], ids[pair[1]]": "-ids[pair[0]], -ids[pair[1]]"},
    says="Of equally frequent pairs you take the one with the largest ids: max does that, where the rule asks for min.",
)
bpe_merge_step.mistake(
    "ties by the left id alone",
    {", ids[pair[1]]": ""},
    says="Pairs with the same left token tie again: compare the id of the right token next.",
)
bpe_merge_step.mistake(
    "ties by the right id first",
    {"ids[pair[0]], ids[pair[1]]": "ids[pair[1]], ids[pair[0]]"},
    says="Compare the id of the left token first, that of the right one second.",
)
bpe_merge_step.mistake(
    "ties by the bytes",
    {"ids[pair[0]], ids[pair[1]]": "pair"},
    says="You compare tokens as bytes. Among equals the smallest ids decide, and a long token has a large id.",
)
bpe_merge_step.mistake(
    "a pair counts once per word",
    {"in pairwise(word)": "in set(pairwise(word))"},
    says="A pair that stands twice in a word counts twice: do not make a set of a word's pairs.",
)
bpe_merge_step.mistake(
    "counts pairs that overlap once",
    {
        "        for pair in pairwise(word):\n            counts[pair] += times": (
            "        at = 0\n"
            "        while at + 1 < len(word):\n"
            "            counts[word[at : at + 2]] += times\n"
            "            at += 2 if word[at : at + 2] == word[at + 1 : at + 3] else 1"
        )
    },
    says="`b b b` holds the pair b, b twice: all neighbours count, although only one of the two can be merged.",
)
bpe_merge_step.mistake(
    "merges from the right",
    {
        "glued, at = [], 0": "glued, at, word = [], 0, word[::-1]",
        "== best": "== best[::-1]",
        "tuple(glued)": "tuple(glued[::-1])",
    },
    says="You merge from the right: of three equal tokens the first two belong together.",
)
bpe_merge_step.mistake(
    "glues overlapping occurrences",
    {"2 if found else 1": "1 + (found and at + 2 == len(word))"},
    says="A token that was merged is used up: you merged it with its next neighbour as well.",
)
bpe_merge_step.mistake(
    "glues the first occurrence in a word only",
    {"== best": "== best and len(glued) == at"},
    says="Go on after the first merge: a word may hold the pair again.",
)
bpe_merge_step.mistake(
    "replaces text, so the end of a longer token counts",
    {"tuple(glued)": 'tuple(b"\\0".join(word).replace(b"\\0".join(best), b"".join(best)).split(b"\\0"))'},
    says="You compare bytes, not tokens: a longer token that ends in the same bytes is not part of the pair.",
)
bpe_merge_step.mistake(
    "glues in the words it was given",
    {"return best, merged": "words.clear()\n    words.update(merged)\n    return best, words"},
    expect="changed its input",
)


@bpe_merge_step.alternative("sorts the pairs, glues with a stack")
def with_a_stack(words, ids):
    counts = Counter(pair for word, times in words.items() for pair in [*pairwise(word)] * times)
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

bpe_encode = KnownAnswers("bpe-encode")

bpe_encode.mistake(
    "merges in the order of the text",
    {"min(known)": "known[0]"},
    says="You merge the leftmost known pair first: the pair that was learnt first goes first, wherever it stands.",
)
bpe_encode.mistake(
    "takes the pair learnt last",
    {"(ranks[pair], at)": "(-ranks[pair], at)"},
    says="You merge the pair that was learnt last: the lowest rank goes first.",
)


@bpe_encode.mistake(
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


bpe_encode.mistake(
    "the rank of the bytes, however they were split",
    {
        "while True": "ranks = {left + right: rank for (left, right), rank in ranks.items()}\n    while True",
        "ranks[pair]": 'ranks[b"".join(pair)]',
        "if pair in ranks": 'if b"".join(pair) in ranks',
    },
    says="You look up the bytes of the pair. Only the very two tokens that were merged in training have that rank.",
)
bpe_encode.mistake(
    "stops after the first merge",
    {
        "while True": "lowest = sorted(set(pairwise(word)) & set(ranks), key=ranks.get)[:1]\n    while True",
        "if pair in ranks": "if pair in lowest",
    },
    says="You stop after one merge: look for known pairs again, until none is left.",
)
bpe_encode.mistake(
    "merges from the right",
    {"(ranks[pair], at)": "(ranks[pair], -at)", "min(known)[1]": "-min(known)[1]"},
    says="Of three equal tokens the first two are merged, not the last two.",
)
bpe_encode.mistake(
    "uses only the pairs of the bytes",
    {"while True": "ranks = {pair: ranks[pair] for pair in pairwise(word) if pair in ranks}\n    while True"},
    says="You merge only pairs of single bytes: a merged token can be part of a further pair.",
)
bpe_encode.mistake(
    "gives ranks instead of tokens",
    {"return word": "return [ranks.get((token[:-1], token[-1:]), token[0]) for token in word]"},
    expect="each a bytes object",
)


bpe_encode.mistake(
    "characters instead of bytes",
    {"bytes([byte]) for byte in piece": 'char.encode() for char in piece.decode(errors="ignore")'},
    says="You start from characters: the vocabulary starts from single bytes, and a character may be several.",
)


@bpe_encode.mistake(
    "one sweep per merge, in the order of the dict",
    says="You go through `ranks` in the order of the dict, which need not be that of the ranks: compare its values.",
)
def dict_order(piece, ranks):
    word = tuple(bytes([byte]) for byte in piece)
    for pair in ranks:
        word = glue(word, pair)
    return list(word)


@bpe_encode.mistake("the leftmost pair whose neighbours rank no lower", expect="merges")
def leftmost_local_minimum(piece, ranks):
    word = [bytes([byte]) for byte in piece]
    while True:
        known = [ranks.get(pair, math.inf) for pair in pairwise(word)]
        around = [math.inf, *known, math.inf]
        lowest = [at for at, rank in enumerate(known) if rank < math.inf and rank <= min(around[at], around[at + 2])]
        if not lowest:
            return word
        word[lowest[0] : lowest[0] + 2] = [word[lowest[0]] + word[lowest[0] + 1]]


@bpe_encode.alternative("all occurrences of the lowest pair at a time")
def all_at_once(piece, ranks):
    word = tuple(bytes([byte]) for byte in piece)
    while known := [pair for pair in pairwise(word) if pair in ranks]:
        word = glue(word, min(known, key=ranks.__getitem__))
    return word


@bpe_encode.alternative("one sweep per merge, in the order of the ranks")
def one_sweep_each(piece, ranks):
    word = tuple(bytes([byte]) for byte in piece)
    for pair in sorted(ranks, key=ranks.get):
        word = glue(word, pair)
    return list(word)


# Bits per byte.

bits_per_byte = KnownAnswers("bits-per-byte")

bits_per_byte.mistake(
    "leaves nats as they are", {" / math.log(2)": ""}, says="These are nats per byte: divide by ln 2 to have bits."
)
bits_per_byte.mistake(
    "bits per token", {" * tokens / text_bytes": ""}, says="These are bits per token; a token is several bytes."
)
bits_per_byte.mistake(
    "bytes per token upside down",
    {"tokens / text_bytes": "text_bytes / tokens"},
    says="Tokens and bytes are swapped: the more bytes a token has, the fewer bits each of them costs.",
)
bits_per_byte.mistake(
    "multiplies by ln 2",
    {"/ math.log(2)": "* math.log(2)"},
    says="You multiplied by ln 2: a nat is 1.44 bits, so divide.",
)
bits_per_byte.mistake(
    "the perplexity",
    {"nats_per_token / math.log(2) * tokens / text_bytes": "math.exp(nats_per_token)"},
    says="That is the perplexity, exp(nats per token).",
)
bits_per_byte.mistake(
    "log10", {"log(2)": "log(10)"}, says="You divided by ln 10, which gives decimal digits and not bits."
)
bits_per_byte.mistake(
    "divided by 8 as well",
    {"/ text_bytes": "/ (8 * text_bytes)"},
    says="Divided by 8: the bytes are those of the text, and are not converted to bits.",
)
bits_per_byte.mistake(
    "of the whole text", {" / text_bytes": ""}, says="These are the bits of the whole text: divide by its bytes."
)


@bits_per_byte.alternative("through the perplexity")
def through_perplexity(nats_per_token, tokens, text_bytes):
    return math.log2(math.exp(nats_per_token)) / (text_bytes / tokens)


@bits_per_byte.alternative("in float32")
def in_float32(nats_per_token, tokens, text_bytes):
    return float(np.float32(nats_per_token) / np.float32(np.log(2)) * np.float32(tokens) / np.float32(text_bytes))
