"""Spoilers of lab 11, batches: wrong ways to pack, deal and prefetch that people write, and right ones that look
different."""

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count, islice

import numpy as np
import torch

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers
from minillm.data import Prefetcher

right = answers_of("11_data_pipeline")

# Packing.

pack_windows = KnownAnswers("pack-windows")

pack_windows.mistake(
    "a window at every token",
    {
        "tokens[: n * seq_len].view(n, seq_len)": "tokens[:-1].unfold(0, seq_len, 1)",
        "tokens[1 : n * seq_len + 1].view(n, seq_len)": "tokens[1:].unfold(0, seq_len, 1)",
    },
    says="You begin a window at every token, so most tokens are a target many times. Begin one every seq_len tokens.",
)
pack_windows.mistake(
    "targets not shifted",
    {"tokens[1 : n * seq_len + 1]": "tokens[: n * seq_len]"},
    says="Targets equal inputs: a target is the token after its input.",
)
pack_windows.mistake(
    "windows without overlap: the first token of each is no target",
    {
        "tokens[: n * seq_len].view(n, seq_len)": "tokens[:-1].unfold(0, seq_len, seq_len + 1)",
        "tokens[1 : n * seq_len + 1].view(n, seq_len)": "tokens[1:].unfold(0, seq_len, seq_len + 1)",
    },
    says="You cut the text into pieces of seq_len + 1 tokens, so the first token of each piece is never a target.",
)
pack_windows.mistake(
    "the last window lost",
    {"- 1) // seq_len": "- 1) // seq_len - 1"},
    says="The last window is missing, although its tokens are all there.",
)
pack_windows.mistake(
    "pads the tail",
    {
        "n = (len(tokens) - 1) // seq_len": (
            "n, text = -(-(len(tokens) - 1) // seq_len), tokens\n"
            "    tokens = text.new_zeros(n * seq_len + 1)\n"
            "    tokens[: len(text)] = text"
        )
    },
    says="You padded the tail to another window: leave it out, packing needs no padding.",
)
pack_windows.mistake(
    "targets rolled round the end",
    {"(len(tokens) - 1) //": "len(tokens) //", "tokens[1 : n * seq_len + 1]": "tokens.roll(-1)[: n * seq_len]"},
    says="Your targets wrap around: torch.roll brings the first token back as the last target, and counts T // seq_len "
    "windows where (T - 1) // seq_len have all their targets.",
)
pack_windows.mistake(
    "targets shifted inside each window",
    {"tokens[1 : n * seq_len + 1].view(n, seq_len)": "tokens[: n * seq_len].view(n, seq_len).roll(-1, 1)"},
    says="You shifted inside each window: its last target is the next window's first token, not its own first one.",
)
pack_windows.mistake(
    "targets are the tokens before",
    {"return": "inputs, targets =", "+ 1].view(n, seq_len)": "+ 1].view(n, seq_len)\n    return targets, inputs"},
    says="Inputs and targets are swapped: the target is the later of the two tokens.",
)


pack_windows.mistake(
    "targets are the inputs plus one",
    {"tokens[1 : n * seq_len + 1].view(n, seq_len)": "tokens[: n * seq_len].view(n, seq_len) + 1"},
    says="You add 1 to the tokens: a target is the token in the next place, whatever its number.",
)


@pack_windows.alternative("a list of slices, stacked")
def stacked(tokens, seq_len):
    starts = range(0, len(tokens) - seq_len, seq_len)
    inputs, targets = zip(*((tokens[s : s + seq_len], tokens[s + 1 : s + seq_len + 1]) for s in starts), strict=True)
    return torch.stack(inputs), torch.stack(targets)


@pack_windows.alternative("unfold with one token of overlap")
def unfolded(tokens, seq_len):
    cut = tokens.unfold(0, seq_len + 1, seq_len)
    return cut[:, :-1], cut[:, 1:]


# Dealing.

deal_samples = KnownAnswers("deal-samples")

deal_samples.mistake(
    "the same shuffle every epoch", {"order(place // num_samples)": "order(0)"}, expect="in the order of epoch 0"
)
deal_samples.mistake(
    "every rank the same samples",
    {"position + rank + world_size * i": "position + i"},
    expect="every rank got the same samples",
)


@deal_samples.mistake("each rank shuffles by itself", expect="sample .* is not due")
def own_shuffle(position, order, num_samples, batch_size, rank, world_size):
    mine = np.random.default_rng().permutation(num_samples)
    return [int(mine[(position + rank + world_size * i) % num_samples]) for i in range(batch_size)]


deal_samples.mistake(
    "a resumed run begins its epoch again",
    {"    places = [": "    position -= position % (world_size * batch_size)\n    places = ["},
    expect="just resumed.*resumed wrongly",
)
deal_samples.mistake(
    "repeats samples to fill an epoch, as torch's sampler does",
    {
        "    places = [": "    padded = -(-num_samples // world_size) * world_size\n    places = [",
        "place // num_samples)[place": "place // padded)[place % padded",
    },
    expect="is not due",
)
deal_samples.mistake(
    "a short batch at the end of an epoch",
    {"for place in places]": "for place in places if place // num_samples == position // num_samples]"},
    expect="is filled up from the next epoch",
)
deal_samples.mistake(
    "the epoch of the first place for all", {"order(place //": "order(position //"}, expect="ask order.epoch. for each"
)
deal_samples.mistake(
    "takes the position for this rank's own",
    {"position + rank + world_size * i": "rank + world_size * (position + i)"},
    expect="is not due",
)


@deal_samples.mistake("this epoch and the next, then no more", expect="sample")
def two_epochs(position, order, num_samples, batch_size, rank, world_size):
    epoch, offset = divmod(position, num_samples)
    stream = [*order(epoch), *order(epoch + 1)]
    return [int(each) for each in stream[offset : offset + world_size * batch_size][rank::world_size]]


@deal_samples.alternative("a generator over the whole stream")
def from_the_stream(position, order, num_samples, batch_size, rank, world_size):
    stream = chain.from_iterable(order(epoch) for epoch in count())
    return np.array(list(islice(stream, position + rank, position + world_size * batch_size, world_size)))


@deal_samples.alternative("each rank a block of neighbours")
def in_blocks(position, order, num_samples, batch_size, rank, world_size):
    start = position + rank * batch_size
    return [int(order(place // num_samples)[place % num_samples]) for place in range(start, start + batch_size)]


# Prefetching.

prefetch = KnownAnswers("prefetch")


@prefetch.mistake("loads on demand", expect="nothing was made while you computed")
def on_demand(make, total, depth):
    for k in range(total):
        yield make(k)


prefetch.mistake(
    "a queue without bound", {"maxsize=depth": "maxsize=0"}, expect="without a bound a fast loader fills the memory"
)
prefetch.mistake(
    "several threads, whoever is quick comes first",
    {
        "def produce():": "numbers = iter(range(total))\n\n    def produce():",
        "for k in range(total)": "for k in numbers",
        "threading.Thread(target=produce, daemon=True).start()": (
            "for _ in range(2):\n        threading.Thread(target=produce, daemon=True).start()"
        ),
    },
    expect="order must not depend on who is quick",
)
prefetch.mistake(
    "the thread dies with its error", {"ready.put((None, error))": "pass"}, expect="waits for a thread that is gone"
)
prefetch.mistake("an error just ends the iteration", {"raise error": "return"}, expect="its error is lost")
prefetch.mistake(
    "stops at a batch that is false",
    {"yield batch": "if not batch:\n            return\n        yield batch"},
    expect="is an end mark taken for a batch",
)
prefetch.mistake(
    "one batch too few in the queue, which at depth 1 is no bound",
    {"maxsize=depth": "maxsize=depth - 1"},
    expect="without a bound",
)


@prefetch.mistake("one batch ahead, whatever the depth", expect="does not overlap|were made while")
def one_ahead(make, total, depth):
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(make, 0)
        for k in range(total):
            item = future.result()
            if k + 1 < total:
                future = pool.submit(make, k + 1)
            yield item


prefetch.mistake("a thread that is no daemon", {", daemon=True": ""}, expect="your thread is no daemon")
prefetch.mistake(
    "passes on errors of the disk alone",
    {"ready.put((None, error))": "if isinstance(error, OSError):\n                    ready.put((None, error))"},
    expect="waits for a thread that is gone",
)
prefetch.mistake(
    "a pool's thread that fills a queue",
    {
        "threading.Thread(target=produce, daemon=True).start()": (
            "from concurrent.futures import ThreadPoolExecutor\n\n    ThreadPoolExecutor(1).submit(produce)"
        )
    },
    expect="still waits inside its task",
)


@prefetch.alternative("a list and a condition instead of a queue")
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


@prefetch.alternative("a pool of one thread and a row of futures")
def with_futures(make, total, depth):
    with ThreadPoolExecutor(1, thread_name_prefix="loader") as pool:
        pending = deque(pool.submit(make, k) for k in range(min(depth, total)))
        for k in range(total):
            future = pending.popleft()
            if k + depth < total:
                future.result()
                pending.append(pool.submit(make, k + depth))
            yield future.result()


@prefetch.alternative("the package's own")
def packaged(make, total, depth):
    return Prefetcher(make, total, 1, depth)
