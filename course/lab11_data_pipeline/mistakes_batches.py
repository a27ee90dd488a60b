"""Spoilers of lab 11, batches: wrong ways to pack, deal and prefetch that people write, and right ones that look
different."""

import queue
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count, islice

import numpy as np
import torch

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake

right = answers_of("11_data_pipeline")

# Packing.


@mistake(
    "pack-windows",
    "a window at every token",
    says="You begin a window at every token, so most tokens are a target many times. Begin one every seq_len tokens.",
)
def stride_one(tokens, seq_len):
    cut = tokens.unfold(0, seq_len + 1, 1)
    return cut[:, :-1], cut[:, 1:]


@mistake(
    "pack-windows",
    "targets not shifted",
    says="Targets equal inputs: a target is the token after its input.",
)
def not_shifted(tokens, seq_len):
    n = (len(tokens) - 1) // seq_len
    inputs = tokens[: n * seq_len].view(n, seq_len)
    return inputs, inputs.clone()


@mistake(
    "pack-windows",
    "windows without overlap: the first token of each is no target",
    says="You cut the text into pieces of seq_len + 1 tokens, so the first token of each piece is never a target.",
)
def no_overlap(tokens, seq_len):
    n = len(tokens) // (seq_len + 1)
    cut = tokens[: n * (seq_len + 1)].view(n, seq_len + 1)
    return cut[:, :-1], cut[:, 1:]


@mistake("pack-windows", "the last window lost", says="The last window is missing, although its tokens are all there.")
def last_lost(tokens, seq_len):
    n = (len(tokens) - 1) // seq_len - 1
    return tokens[: n * seq_len].view(n, seq_len), tokens[1 : n * seq_len + 1].view(n, seq_len)


@mistake(
    "pack-windows",
    "pads the tail",
    says="You padded the tail to another window: leave it out, packing needs no padding.",
)
def padded_tail(tokens, seq_len):
    n = -(-(len(tokens) - 1) // seq_len)
    padded = torch.cat([tokens, tokens.new_zeros(n * seq_len + 1 - len(tokens))])
    return padded[:-1].view(n, seq_len), padded[1:].view(n, seq_len)


@mistake(
    "pack-windows",
    "targets rolled round the end",
    says="Your targets wrap around: torch.roll brings the first token back as the last target, and counts T // seq_len "
    "windows where (T - 1) // seq_len have all their targets.",
)
def rolled(tokens, seq_len):
    n = len(tokens) // seq_len
    return tokens[: n * seq_len].view(n, seq_len), torch.roll(tokens, -1)[: n * seq_len].view(n, seq_len)


@mistake(
    "pack-windows",
    "targets shifted inside each window",
    says="You shifted inside each window: its last target is the next window's first token, not its own first one.",
)
def shifted_inside(tokens, seq_len):
    n = (len(tokens) - 1) // seq_len
    inputs = tokens[: n * seq_len].view(n, seq_len)
    return inputs, torch.roll(inputs, -1, 1)


@mistake(
    "pack-windows",
    "targets are the tokens before",
    says="Inputs and targets are swapped: the target is the later of the two tokens.",
)
def swapped(tokens, seq_len):
    return right.windows(tokens, seq_len)[::-1]


@alternative("pack-windows", "a list of slices, stacked")
def stacked(tokens, seq_len):
    starts = range(0, len(tokens) - seq_len, seq_len)
    inputs, targets = zip(*((tokens[s : s + seq_len], tokens[s + 1 : s + seq_len + 1]) for s in starts), strict=True)
    return torch.stack(inputs), torch.stack(targets)


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


@mistake("deal-samples", "the epoch of the first place for all", expect="ask order.epoch. for each")
def epoch_of_the_start(position, order, num_samples, batch_size, rank, world_size):
    mine = order(position // num_samples)
    return [int(mine[(position + rank + world_size * i) % num_samples]) for i in range(batch_size)]


@mistake("deal-samples", "takes the position for this rank's own", expect="is not due")
def position_per_rank(position, order, num_samples, batch_size, rank, world_size):
    places = [rank + world_size * (position + i) for i in range(batch_size)]
    return [int(order(place // num_samples)[place % num_samples]) for place in places]


@alternative("deal-samples", "a generator over the whole stream")
def from_the_stream(position, order, num_samples, batch_size, rank, world_size):
    stream = chain.from_iterable(order(epoch) for epoch in count())
    return np.array(list(islice(stream, position + rank, position + world_size * batch_size, world_size)))


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


@mistake("prefetch", "one batch too few in the queue, which at depth 1 is no bound", expect="without a bound")
def one_less(make, total, depth):
    return right.prefetch(make, total, depth - 1)


@mistake("prefetch", "one batch ahead, whatever the depth", expect="does not overlap|were made while")
def one_ahead(make, total, depth):
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(make, 0)
        for k in range(total):
            item = future.result()
            if k + 1 < total:
                future = pool.submit(make, k + 1)
            yield item


@alternative("prefetch", "a list and a condition instead of a queue")
def with_condition(make, total, depth):
    ready, changed = deque(), threading.Condition()

    def produce():
        for k in range(total):
            try:
                item = (make(k), None)
            except Exception as error:
                item = (None, error)
            with changed:
                changed.wait_for(lambda: len(ready) < depth)
                ready.append(item)
                changed.notify_all()
            if item[1]:
                return

    threading.Thread(target=produce, daemon=True).start()
    for _ in range(total):
        with changed:
            changed.wait_for(lambda: ready)
            item, error = ready.popleft()
            changed.notify_all()
        if error:
            raise RuntimeError("a batch could not be made") from error
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
