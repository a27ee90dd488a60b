"""Spoilers of lab 11, batches: wrong ways to pack, deal and prefetch that people write, and right ones that look
different."""

import queue
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from minillm.labkit.answers import answers_of
from minillm.labkit.exercises import alternative, mistake

right = answers_of("11_data_pipeline")

# Packing.


@mistake("pack-windows", "a window at every token", expect="overlap by one token only")
def stride_one(tokens, seq_len):
    cut = tokens.unfold(0, seq_len + 1, 1)
    return cut[:, :-1], cut[:, 1:]


@mistake("pack-windows", "targets not shifted", expect="targets equal inputs")
def not_shifted(tokens, seq_len):
    n = (len(tokens) - 1) // seq_len
    inputs = tokens[: n * seq_len].view(n, seq_len)
    return inputs, inputs.clone()


@mistake("pack-windows", "windows without overlap: the first token of each is no target", expect="is never a target")
def no_overlap(tokens, seq_len):
    n = len(tokens) // (seq_len + 1)
    cut = tokens[: n * (seq_len + 1)].view(n, seq_len + 1)
    return cut[:, :-1], cut[:, 1:]


@mistake("pack-windows", "the last window lost", expect="last window is missing")
def last_lost(tokens, seq_len):
    n = (len(tokens) - 1) // seq_len - 1
    return tokens[: n * seq_len].view(n, seq_len), tokens[1 : n * seq_len + 1].view(n, seq_len)


@mistake("pack-windows", "pads the tail", expect="packing needs no padding")
def padded_tail(tokens, seq_len):
    n = -(-(len(tokens) - 1) // seq_len)
    padded = torch.cat([tokens, tokens.new_zeros(n * seq_len + 1 - len(tokens))])
    return padded[:-1].view(n, seq_len), padded[1:].view(n, seq_len)


@alternative("pack-windows", "unfold with one token of overlap")
def unfolded(tokens, seq_len):
    cut = tokens.unfold(0, seq_len + 1, seq_len)
    return cut[:, :-1], cut[:, 1:]


# Dealing.


@mistake("deal-samples", "the same shuffle every epoch", expect="in the order of epoch 0")
def one_order(position, order, num_samples, batch_size, rank, world_size):
    places = (position + rank + world_size * i for i in range(batch_size))
    return [int(order(0)[place % num_samples]) for place in places]


@mistake("deal-samples", "every rank the same samples", expect="every rank got the same samples")
def forgets_the_rank(position, order, num_samples, batch_size, rank, world_size):
    places = range(position, position + batch_size)
    return [int(order(place // num_samples)[place % num_samples]) for place in places]


@mistake("deal-samples", "each rank shuffles by itself", expect="sample .* is not due")
def own_shuffle(position, order, num_samples, batch_size, rank, world_size):
    mine = np.random.default_rng().permutation(num_samples)
    return [int(mine[(position + rank + world_size * i) % num_samples]) for i in range(batch_size)]


@mistake("deal-samples", "a resumed run begins its epoch again", expect="just resumed.*resumed wrongly")
def restarts_the_epoch(position, order, num_samples, batch_size, rank, world_size):
    step = position // (world_size * batch_size)  # as if all steps so far had been of this size
    return right.deal(step * world_size * batch_size, order, num_samples, batch_size, rank, world_size)


@mistake("deal-samples", "repeats samples to fill an epoch, as torch's sampler does", expect="is not due")
def pads_the_epoch(position, order, num_samples, batch_size, rank, world_size):
    padded = -(-num_samples // world_size) * world_size
    places = (position + rank + world_size * i for i in range(batch_size))
    return [int(order(place // padded)[place % padded % num_samples]) for place in places]


@mistake("deal-samples", "a short batch at the end of an epoch", expect="is filled up from the next epoch")
def short_batch(position, order, num_samples, batch_size, rank, world_size):
    epoch, offset = divmod(position, num_samples)
    return [int(sample) for sample in order(epoch)[offset + rank :: world_size][:batch_size]]


@alternative("deal-samples", "each rank a block of neighbours")
def in_blocks(position, order, num_samples, batch_size, rank, world_size):
    start = position + rank * batch_size
    return [int(order(place // num_samples)[place % num_samples]) for place in range(start, start + batch_size)]


# Prefetching.


@mistake("prefetch", "loads on demand", expect="nothing was made while you computed")
def on_demand(make, total, depth):
    for k in range(total):
        yield make(k)


@mistake("prefetch", "a queue without bound", expect="without a bound a fast loader fills the memory")
def unbounded(make, total, depth):
    return right.prefetch(make, total, 0)  # Queue(maxsize=0) is endless


@mistake("prefetch", "several threads, whoever is quick comes first", expect="order must not depend on who is quick")
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


@mistake("prefetch", "the thread dies with its error", expect="waits for a thread that is gone")
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


@mistake("prefetch", "an error just ends the iteration", expect="its error is lost")
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


@mistake("prefetch", "stops at a batch that is false", expect="is an end mark taken for a batch")
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
