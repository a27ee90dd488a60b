"""Spoilers of lab 11: wrong ways to merge, pack, deal and prefetch that people write, and right ones that look
different."""

import math
import queue
import threading
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch

from minillm.labkit.exercises import alternative, mutant
from minillm.labkit.labs import lab_11 as right


def count_pairs(words):
    counts = Counter()
    for word, times in words.items():
        for pair in pairwise(word):
            counts[pair] += times
    return counts


def glue_all(words, pair):
    return {right._glue(word, pair): times for word, times in words.items()}


# BPE: one merge.


@mutant("bpe-merge-step", "counts each different word once", expect="in 3 different words, which occur")
def counts_words_once(words, ids):
    counts = Counter(pair for word in words for pair in pairwise(word))
    best = min(counts, key=lambda pair: (-counts[pair], ids[pair[0]], ids[pair[1]]))
    return best, glue_all(words, best)


@mutant("bpe-merge-step", "merges the first pair instead of the most frequent", expect="first pair is not the most")
def first_pair(words, ids):
    best = next(pair for word in words for pair in pairwise(word))
    return best, glue_all(words, best)


@mutant("bpe-merge-step", "leaves ties to the order of the text", expect="equally frequent")
def any_of_the_ties(words, ids):
    counts = count_pairs(words)
    best = max(counts, key=lambda pair: (counts[pair], ids[pair[0]], ids[pair[1]]))
    return best, glue_all(words, best)


@mutant("bpe-merge-step", "glues overlapping occurrences", expect="bytes were lost or doubled")
def overlapping(words, ids):
    best, _ = right.merge_step(words, ids)

    def glue(word):
        if best not in pairwise(word):
            return word
        glued = [b"".join(pair) if pair == best else pair[0] for pair in pairwise(word)]
        return tuple(glued) if word[-2:] == best else (*glued, word[-1])

    return best, {glue(word): times for word, times in words.items()}


@mutant("bpe-merge-step", "glues the first occurrence in a word only", expect="every occurrence")
def first_occurrence(words, ids):
    best, _ = right.merge_step(words, ids)

    def glue(word):
        for at, pair in enumerate(pairwise(word)):
            if pair == best:
                return (*word[:at], b"".join(best), *word[at + 2 :])
        return word

    return best, {glue(word): times for word, times in words.items()}


@mutant("bpe-merge-step", "replaces text, so the end of a longer token counts", expect="look like it")
def replaces_text(words, ids):
    best, _ = right.merge_step(words, ids)
    merged = {}
    for word, times in words.items():
        text = b"\0".join(word).replace(b"\0".join(best), b"".join(best))
        merged[tuple(text.split(b"\0"))] = times
    return best, merged


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


@mutant("bpe-encode", "merges in the order of the text", expect="lowest rank")
def text_order(piece, ranks):
    word = tuple(bytes([byte]) for byte in piece)
    while known := [pair for pair in pairwise(word) if pair in ranks]:
        word = right._glue(word, known[0])
    return list(word)


@mutant("bpe-encode", "takes the pair learnt last", expect="lowest rank")
def highest_rank(piece, ranks):
    word = tuple(bytes([byte]) for byte in piece)
    while known := [pair for pair in pairwise(word) if pair in ranks]:
        word = right._glue(word, max(known, key=ranks.__getitem__))
    return list(word)


@mutant("bpe-encode", "longest token first, as WordPiece does", expect="lowest rank")
def longest_first(piece, ranks):
    vocabulary, tokens, at = {b"".join(pair) for pair in ranks}, [], 0
    while at < len(piece):
        end = next((end for end in range(len(piece), at + 1, -1) if piece[at:end] in vocabulary), at + 1)
        tokens.append(piece[at:end])
        at = end
    return tokens


@mutant("bpe-encode", "stops after the first merge", expect="go on until none is left")
def one_merge(piece, ranks):
    word = tuple(bytes([byte]) for byte in piece)
    if known := [pair for pair in pairwise(word) if pair in ranks]:
        word = right._glue(word, min(known, key=ranks.__getitem__))
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


@mutant("bits-per-byte", "leaves nats as they are", expect="a bit is ln 2 nats")
def in_nats(nats_per_token, tokens, text_bytes):
    return nats_per_token * tokens / text_bytes


@mutant("bits-per-byte", "bits per token", expect="bits per token")
def per_token(nats_per_token, tokens, text_bytes):
    return nats_per_token / math.log(2)


@mutant("bits-per-byte", "bytes per token upside down", expect="upside down")
def upside_down(nats_per_token, tokens, text_bytes):
    return nats_per_token / math.log(2) * text_bytes / tokens


@mutant("bits-per-byte", "multiplies by ln 2", expect="so divide")
def times_ln2(nats_per_token, tokens, text_bytes):
    return nats_per_token * math.log(2) * tokens / text_bytes


@alternative("bits-per-byte", "through the perplexity")
def through_perplexity(nats_per_token, tokens, text_bytes):
    return math.log2(math.exp(nats_per_token)) / (text_bytes / tokens)


# Packing.


@mutant("pack-windows", "a window at every token", expect="overlap by one token only")
def stride_one(tokens, seq_len):
    cut = tokens.unfold(0, seq_len + 1, 1)
    return cut[:, :-1], cut[:, 1:]


@mutant("pack-windows", "targets not shifted", expect="targets equal inputs")
def not_shifted(tokens, seq_len):
    n = (len(tokens) - 1) // seq_len
    inputs = tokens[: n * seq_len].view(n, seq_len)
    return inputs, inputs.clone()


@mutant("pack-windows", "windows without overlap: the first token of each is no target", expect="is never a target")
def no_overlap(tokens, seq_len):
    n = len(tokens) // (seq_len + 1)
    cut = tokens[: n * (seq_len + 1)].view(n, seq_len + 1)
    return cut[:, :-1], cut[:, 1:]


@mutant("pack-windows", "the last window lost", expect="last window is missing")
def last_lost(tokens, seq_len):
    n = (len(tokens) - 1) // seq_len - 1
    return tokens[: n * seq_len].view(n, seq_len), tokens[1 : n * seq_len + 1].view(n, seq_len)


@mutant("pack-windows", "fills up the tail", expect="packing needs no fill")
def padded_tail(tokens, seq_len):
    n = -(-(len(tokens) - 1) // seq_len)
    padded = torch.cat([tokens, tokens.new_zeros(n * seq_len + 1 - len(tokens))])
    return padded[:-1].view(n, seq_len), padded[1:].view(n, seq_len)


@alternative("pack-windows", "unfold with one token of overlap")
def unfolded(tokens, seq_len):
    cut = tokens.unfold(0, seq_len + 1, seq_len)
    return cut[:, :-1], cut[:, 1:]


# Dealing.


@mutant("deal-samples", "the same shuffle every epoch", expect="in the order of epoch 0")
def one_order(position, order, num_samples, batch_size, rank, world_size):
    places = (position + rank + world_size * i for i in range(batch_size))
    return [int(order(0)[place % num_samples]) for place in places]


@mutant("deal-samples", "every rank the same samples", expect="every rank got the same samples")
def forgets_the_rank(position, order, num_samples, batch_size, rank, world_size):
    places = range(position, position + batch_size)
    return [int(order(place // num_samples)[place % num_samples]) for place in places]


@mutant("deal-samples", "each rank shuffles by itself", expect="sample .* is not due")
def own_shuffle(position, order, num_samples, batch_size, rank, world_size):
    mine = np.random.default_rng().permutation(num_samples)
    return [int(mine[(position + rank + world_size * i) % num_samples]) for i in range(batch_size)]


@mutant("deal-samples", "a resumed run begins its epoch again", expect="just resumed.*resumed wrongly")
def restarts_the_epoch(position, order, num_samples, batch_size, rank, world_size):
    step = position // (world_size * batch_size)  # as if all steps so far had been of this size
    return right.deal(step * world_size * batch_size, order, num_samples, batch_size, rank, world_size)


@mutant("deal-samples", "repeats samples to fill an epoch, as torch's sampler does", expect="is not due")
def pads_the_epoch(position, order, num_samples, batch_size, rank, world_size):
    padded = -(-num_samples // world_size) * world_size
    places = (position + rank + world_size * i for i in range(batch_size))
    return [int(order(place // padded)[place % padded % num_samples]) for place in places]


@mutant("deal-samples", "a short batch at the end of an epoch", expect="is filled up from the next epoch")
def short_batch(position, order, num_samples, batch_size, rank, world_size):
    epoch, offset = divmod(position, num_samples)
    return [int(sample) for sample in order(epoch)[offset + rank :: world_size][:batch_size]]


@alternative("deal-samples", "each rank a block of neighbours")
def in_blocks(position, order, num_samples, batch_size, rank, world_size):
    start = position + rank * batch_size
    return [int(order(place // num_samples)[place % num_samples]) for place in range(start, start + batch_size)]


# Prefetching.


@mutant("prefetch", "loads on demand", expect="nothing was made while you computed")
def on_demand(make, total, depth):
    for k in range(total):
        yield make(k)


@mutant("prefetch", "a queue without bound", expect="without a bound a fast loader fills the memory")
def unbounded(make, total, depth):
    return right.prefetch(make, total, 0)  # Queue(maxsize=0) is endless


@mutant("prefetch", "several threads, whoever is quick comes first", expect="order must not depend on who is quick")
def out_of_order(make, total, depth):
    ready, numbers = queue.Queue(maxsize=depth), iter(range(total))
    lock = threading.Lock()

    def produce():
        while True:
            with lock:
                k = next(numbers, None)
            if k is None:
                return
            ready.put(make(k))

    for _ in range(2):
        threading.Thread(target=produce, daemon=True).start()
    for _ in range(total):
        yield ready.get()


@mutant("prefetch", "the thread dies with its error", expect="waits for a thread that is gone")
def error_lost(make, total, depth):
    ready = queue.Queue(maxsize=depth)

    def produce():
        try:
            for k in range(total):
                ready.put(make(k))
        except Exception:
            pass  # what an unhandled error in a thread amounts to

    threading.Thread(target=produce, daemon=True).start()
    for _ in range(total):
        yield ready.get()


@mutant("prefetch", "an error just ends the iteration", expect="its error is lost")
def error_is_the_end(make, total, depth):
    ready, end = queue.Queue(maxsize=depth), object()

    def produce():
        try:
            for k in range(total):
                ready.put(make(k))
        except Exception:
            pass
        finally:
            ready.put(end)

    threading.Thread(target=produce, daemon=True).start()
    while (item := ready.get()) is not end:
        yield item


@mutant("prefetch", "stops at a batch that is false", expect="is an end mark taken for a batch")
def falsy_end(make, total, depth):
    batches = right.prefetch(make, total, depth)
    while item := next(batches, None):
        yield item


@alternative("prefetch", "a pool of one thread and a row of futures")
def with_futures(make, total, depth):
    with ThreadPoolExecutor(1) as pool:
        pending = deque(pool.submit(make, k) for k in range(min(depth, total)))
        for k in range(total):
            future = pending.popleft()
            if k + depth < total:
                future.result()
                pending.append(pool.submit(make, k + depth))
            yield future.result()
