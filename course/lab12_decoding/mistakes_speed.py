"""Spoilers of lab 12: a cache's bytes, what a step reads and computes, and latencies, all wrong; and right ones."""

import torch

from course.lab12_decoding.decoders import Cache
from minillm.labkit.answers import answers_of
from minillm.labkit.exercises import alternative, mistake

ANSWERS = answers_of("12_decoding")


def counted(change):
    def kv_bytes(config, prompt, answer, itemsize):
        return change(config, prompt + answer - 1, itemsize)

    return kv_bytes


mistake("kv-bytes", "prompt and answer", expect="one entry too many")(
    lambda config, prompt, answer, itemsize: ANSWERS.kv_bytes(config, prompt, answer + 1, itemsize)
)
mistake("kv-bytes", "query heads", expect="only kv heads are kept")(
    counted(lambda c, entries, itemsize: entries * 2 * c.num_layers * c.num_heads * c.head_dim * itemsize)
)
mistake("kv-bytes", "keys only", expect="both are kept")(
    counted(lambda c, entries, itemsize: entries * c.num_layers * c.num_kv_heads * c.head_dim * itemsize)
)
mistake("kv-bytes", "doubled once more", expect="there is no other")(
    counted(lambda c, entries, itemsize: entries * 4 * c.num_layers * c.num_kv_heads * c.head_dim * itemsize)
)
mistake("kv-bytes", "one layer", expect="Every layer keeps its own")(
    counted(lambda c, entries, itemsize: entries * 2 * c.num_kv_heads * c.head_dim * itemsize)
)
mistake("kv-bytes", "numbers instead of bytes", expect="numbers, not bytes")(
    counted(lambda c, entries, itemsize: entries * 2 * c.num_layers * c.num_kv_heads * c.head_dim)
)


@alternative("kv-bytes", "makes a cache and asks it")
def asks_a_cache(config, prompt, answer, itemsize):
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[itemsize]
    cache = Cache(config, prompt + answer - 1, ANSWERS.attend, dtype)
    return cache.keys.nbytes + cache.values.nbytes


def step(
    read=lambda w, kv, b, c, size: w * size + b * c * kv,
    flops=lambda w, b: 2 * w * b,
    seconds=max,
    tokens=lambda b: b,
):
    def decode_step(weights, kv_bytes, batch, context, itemsize, peak_flops, bandwidth):
        moved, done = read(weights, kv_bytes, batch, context, itemsize), flops(weights, batch)
        return moved, done, tokens(batch) / seconds(moved / bandwidth, done / peak_flops)

    return decode_step


mistake("decode-step", "weights read twice", expect="the factor 2 belongs to FLOPs")(
    step(read=lambda w, kv, b, c, size: 2 * w * size + b * c * kv)
)
mistake("decode-step", "weights read by every sequence", expect="once per step, for all sequences together")(
    step(read=lambda w, kv, b, c, size: b * (w * size + c * kv))
)
mistake("decode-step", "no cache", expect="the cache is missing")(step(read=lambda w, kv, b, c, size: w * size))
mistake("decode-step", "one sequence's cache", expect="each of the batch reads its own")(
    step(read=lambda w, kv, b, c, size: w * size + c * kv)
)
mistake("decode-step", "one FLOP per weight", expect="two FLOPs")(step(flops=lambda w, b: w * b))
mistake("decode-step", "FLOPs of training", expect="6 is training")(step(flops=lambda w, b: 6 * w * b))
mistake("decode-step", "one sequence's tokens", expect="a token to each of the batch")(step(tokens=lambda b: 1))
mistake("decode-step", "reads, then computes", expect="the slower of the two, not their sum")(
    step(seconds=lambda read, compute: read + compute)
)
mistake("decode-step", "the faster of the two", expect="longer here, so|the slower of the two decides")(
    step(seconds=min)
)


@alternative("decode-step", "by arithmetic intensity")
def by_intensity(weights, kv_bytes, batch, context, itemsize, peak_flops, bandwidth):
    read, flops, _ = ANSWERS.decode_step(weights, kv_bytes, batch, context, itemsize, peak_flops, bandwidth)
    return read, flops, batch * min(peak_flops, bandwidth * flops / read) / flops


def measured(ttft=lambda arrived, at, log: at[0] - arrived, tpot=None, single=None):
    def latencies(log):
        found = {}
        for began, request, event in log:
            if event == "arrived":
                at = [when for when, who, what in log if who == request and what == "token"]
                gaps = (tpot or right_tpot)(began, at) if len(at) > 1 else single
                found[request] = (ttft(began, at, log), gaps)
        return found

    return latencies


def right_tpot(arrived, at):
    return (at[-1] - at[0]) / (len(at) - 1)


mistake("ttft-and-tpot", "divides by the number of tokens", expect="gaps between them")(
    measured(tpot=lambda arrived, at: (at[-1] - at[0]) / len(at))
)
mistake("ttft-and-tpot", "the whole request by its tokens", expect="the time to the first token is in it")(
    measured(tpot=lambda arrived, at: (at[-1] - arrived) / len(at))
)
mistake("ttft-and-tpot", "without the wait in the queue", expect="the wait in the queue counts")(
    measured(ttft=lambda arrived, at, log: at[0] - max(when for when, _, _ in log if when < at[0]))
)
mistake("ttft-and-tpot", "end to end", expect="ends with the first token")(
    measured(ttft=lambda arrived, at, log: at[-1] - arrived)
)
mistake("ttft-and-tpot", "a time on the clock", expect="subtract the arrival")(
    measured(ttft=lambda arrived, at, log: at[0])
)
mistake("ttft-and-tpot", "zero for a single token", expect="a single token has no time")(measured(single=0.0))


@mistake("ttft-and-tpot", "breaks at a single token", expect="ZeroDivisionError")
def divides_by_no_gap(log):
    arrived = {who: at for at, who, event in log if event == "arrived"}
    times = {who: [at for at, each, event in log if (each, event) == (who, "token")] for who in arrived}
    return {who: (at[0] - arrived[who], (at[-1] - at[0]) / (len(at) - 1)) for who, at in times.items()}


@alternative("ttft-and-tpot", "one walk over the log")
def one_walk(log):
    seen = {}
    for at, who, event in log:
        if event == "arrived":
            seen[who] = [at, None, None, 0]
        else:
            seen[who][1] = at if seen[who][1] is None else seen[who][1]
            seen[who][2], seen[who][3] = at, seen[who][3] + 1
    return {
        who: (first - arrived, (last - first) / (count - 1) if count > 1 else None)
        for who, (arrived, first, last, count) in seen.items()
    }
