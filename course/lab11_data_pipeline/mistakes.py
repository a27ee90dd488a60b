"""Spoilers of lab 11: merges, encodings and bits per byte as people get them wrong, and right ones that look
different."""

import math
from itertools import pairwise

import numpy as np

from course.lab11_data_pipeline.checks import count_pairs
from minillm.labkit.answers import answers_of
from minillm.labkit.exercises import alternative, mistake

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


def glue_all(words, pair):
    return {glue(word, pair): times for word, times in words.items()}


# BPE: one merge.


@mistake("bpe-merge-step", "counts each different word once", expect="in 3 different words, which occur")
def counts_words_once(words, ids):
    counts = count_pairs(dict.fromkeys(words, 1))
    best = min(counts, key=lambda pair: (-counts[pair], ids[pair[0]], ids[pair[1]]))
    return best, glue_all(words, best)


@mistake("bpe-merge-step", "merges the first pair instead of the most frequent", expect="first pair is not the most")
def first_pair(words, ids):
    best = next(pair for word in words for pair in pairwise(word))
    return best, glue_all(words, best)


@mistake("bpe-merge-step", "leaves ties to the order of the text", expect="equally frequent")
def any_of_the_ties(words, ids):
    counts = count_pairs(words)
    best = max(counts, key=lambda pair: (counts[pair], ids[pair[0]], ids[pair[1]]))
    return best, glue_all(words, best)


@mistake("bpe-merge-step", "glues overlapping occurrences", expect="bytes were lost or doubled")
def overlapping(words, ids):
    best, _ = right.merge_step(words, ids)

    def glued_word(word):
        if best not in pairwise(word):
            return word
        glued = [b"".join(pair) if pair == best else pair[0] for pair in pairwise(word)]
        return tuple(glued) if word[-2:] == best else (*glued, word[-1])

    return best, {glued_word(word): times for word, times in words.items()}


@mistake("bpe-merge-step", "glues the first occurrence in a word only", expect="every occurrence")
def first_occurrence(words, ids):
    best, _ = right.merge_step(words, ids)

    def glued_word(word):
        for at, pair in enumerate(pairwise(word)):
            if pair == best:
                return (*word[:at], b"".join(best), *word[at + 2 :])
        return word

    return best, {glued_word(word): times for word, times in words.items()}


@mistake("bpe-merge-step", "replaces text, so the end of a longer token counts", expect="look like it")
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


@mistake("bpe-encode", "merges in the order of the text", expect="lowest rank")
def text_order(piece, ranks):
    word = tuple(bytes([byte]) for byte in piece)
    while known := [pair for pair in pairwise(word) if pair in ranks]:
        word = glue(word, known[0])
    return list(word)


@mistake("bpe-encode", "takes the pair learnt last", expect="lowest rank")
def highest_rank(piece, ranks):
    word = tuple(bytes([byte]) for byte in piece)
    while known := [pair for pair in pairwise(word) if pair in ranks]:
        word = glue(word, max(known, key=ranks.__getitem__))
    return list(word)


@mistake("bpe-encode", "longest token first, as WordPiece does", expect="lowest rank")
def longest_first(piece, ranks):
    vocabulary, tokens, at = {b"".join(pair) for pair in ranks}, [], 0
    while at < len(piece):
        end = next((end for end in range(len(piece), at + 1, -1) if piece[at:end] in vocabulary), at + 1)
        tokens.append(piece[at:end])
        at = end
    return tokens


@mistake("bpe-encode", "stops after the first merge", expect="go on until none is left")
def one_merge(piece, ranks):
    word = tuple(bytes([byte]) for byte in piece)
    if known := [pair for pair in pairwise(word) if pair in ranks]:
        word = glue(word, min(known, key=ranks.__getitem__))
    return list(word)


@alternative("bpe-encode", "one occurrence at a time")
def one_at_a_time(piece, ranks):
    word = [piece[i : i + 1] for i in range(len(piece))]
    while True:
        candidates = [(ranks[pair], at) for at, pair in enumerate(pairwise(word)) if pair in ranks]
        if not candidates:
            return word
        at = min(candidates)[1]
        word[at : at + 2] = [word[at] + word[at + 1]]


# Bits per byte.


@mistake("bits-per-byte", "leaves nats as they are", expect="a bit is ln 2 nats")
def in_nats(nats_per_token, tokens, text_bytes):
    return nats_per_token * tokens / text_bytes


@mistake("bits-per-byte", "bits per token", expect="bits per token")
def per_token(nats_per_token, tokens, text_bytes):
    return nats_per_token / math.log(2)


@mistake("bits-per-byte", "bytes per token upside down", expect="upside down")
def upside_down(nats_per_token, tokens, text_bytes):
    return nats_per_token / math.log(2) * text_bytes / tokens


@mistake("bits-per-byte", "multiplies by ln 2", expect="so divide")
def times_ln2(nats_per_token, tokens, text_bytes):
    return nats_per_token * math.log(2) * tokens / text_bytes


@alternative("bits-per-byte", "through the perplexity")
def through_perplexity(nats_per_token, tokens, text_bytes):
    return math.log2(math.exp(nats_per_token)) / (text_bytes / tokens)


@alternative("bits-per-byte", "in float32")
def in_float32(nats_per_token, tokens, text_bytes):
    return float(np.float32(nats_per_token) / np.float32(np.log(2)) * np.float32(tokens) / np.float32(text_bytes))
