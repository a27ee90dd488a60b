"""Spoilers of lab 12: a cache's bytes, what a step reads and computes, and latencies, all wrong; and right ones."""

import itertools

import torch

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake
from course.lab12_decoding.decoders import Cache

ANSWERS = answers_of("12_decoding")


def counted(change):
    def kv_bytes(config, prompt, answer, itemsize):
        return change(config, prompt + answer - 1, itemsize)

    return kv_bytes


mistake(
    "kv-bytes",
    "prompt and answer",
    says="One entry too many: the last token of the answer never goes through the model.",
)(lambda config, prompt, answer, itemsize: ANSWERS.kv_bytes(config, prompt, answer + 1, itemsize))
mistake("kv-bytes", "query heads", says="Query heads are counted, but only kv heads are kept.")(
    counted(lambda c, entries, itemsize: entries * 2 * c.num_layers * c.num_heads * c.head_dim * itemsize)
)
mistake("kv-bytes", "keys only", says="That is keys or values; both are kept.")(
    counted(lambda c, entries, itemsize: entries * c.num_layers * c.num_kv_heads * c.head_dim * itemsize)
)
mistake(
    "kv-bytes", "doubled once more", says="Twice as much: keys and values are the factor 2, and there is no other."
)(counted(lambda c, entries, itemsize: entries * 4 * c.num_layers * c.num_kv_heads * c.head_dim * itemsize))
mistake("kv-bytes", "one layer", says="That is one layer's; every layer keeps its own.")(
    counted(lambda c, entries, itemsize: entries * 2 * c.num_kv_heads * c.head_dim * itemsize)
)
mistake("kv-bytes", "numbers instead of bytes", says="These are numbers, not bytes: multiply by itemsize.")(
    counted(lambda c, entries, itemsize: entries * 2 * c.num_layers * c.num_kv_heads * c.head_dim)
)


mistake("kv-bytes", "hidden size", says="hidden_size is not kv_heads · head_dim: take the sizes of what is kept.")(
    counted(lambda c, entries, itemsize: entries * 2 * c.num_layers * c.hidden_size * itemsize)
)
mistake("kv-bytes", "two bytes always", says="You count 2 bytes per number whatever itemsize says.")(
    counted(lambda c, entries, itemsize: entries * 2 * c.num_layers * c.num_kv_heads * c.head_dim * 2)
)
mistake("kv-bytes", "the prompt alone", says="The answer's tokens are kept, too, all but its last.")(
    lambda config, prompt, answer, itemsize: ANSWERS.kv_bytes(config, prompt, 1, itemsize)
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


mistake(
    "decode-step", "weights read twice", says="A weight is read once; the factor 2 belongs to FLOPs (multiply and add)."
)(step(read=lambda w, kv, b, c, size: 2 * w * size + b * c * kv))
mistake(
    "decode-step",
    "weights read by every sequence",
    says="The weights are read once per step, for all sequences together.",
)(step(read=lambda w, kv, b, c, size: b * (w * size + c * kv)))
mistake("decode-step", "no cache", says="The cache is missing: every sequence reads its own keys and values.")(
    step(read=lambda w, kv, b, c, size: w * size)
)
mistake("decode-step", "one sequence's cache", says="That is one sequence's cache; each of the batch reads its own.")(
    step(read=lambda w, kv, b, c, size: w * size + c * kv)
)
mistake("decode-step", "one FLOP per weight", says="A multiplication and an addition per weight are two FLOPs.")(
    step(flops=lambda w, b: w * b)
)
mistake("decode-step", "FLOPs of training", says="6 FLOPs per weight belong to training; a forward pass takes 2.")(
    step(flops=lambda w, b: 6 * w * b)
)
mistake(
    "decode-step",
    "one sequence's tokens",
    says="That is one sequence's rate; a step gives a token to each of the batch.",
)(step(tokens=lambda b: 1))
mistake(
    "decode-step",
    "reads, then computes",
    says="Reading and computing overlap: take the slower of the two, not their sum.",
)(step(seconds=lambda read, compute: read + compute))
mistake("decode-step", "the faster of the two", says="The slower of the two decides, not the faster.")(
    step(seconds=min)
)


mistake("decode-step", "kv bytes by itemsize", says="kv_bytes are bytes already; itemsize belongs to the weights.")(
    step(read=lambda w, kv, b, c, size: w * size + b * c * kv * size)
)
mistake("decode-step", "keys and values twice", says="kv_bytes holds keys and values already.")(
    step(read=lambda w, kv, b, c, size: w * size + 2 * b * c * kv)
)
mistake("decode-step", "weights without itemsize", says="The weights are numbers: multiply by itemsize to get bytes.")(
    step(read=lambda w, kv, b, c, size: w + b * c * kv)
)
mistake("decode-step", "FLOPs of one sequence", says="Those are one sequence's FLOPs; the batch does as many each.")(
    step(flops=lambda w, b: 2 * w)
)
mistake("decode-step", "memory alone", says="Computing takes longer than reading at the largest batch here.")(
    step(seconds=lambda read, compute: read)
)
mistake("decode-step", "compute alone", says="Reading takes longer than computing at the small batches here.")(
    step(seconds=lambda read, compute: compute)
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


mistake("ttft-and-tpot", "divides by the number of tokens", says="n tokens have n - 1 gaps between them.")(
    measured(tpot=lambda arrived, at: (at[-1] - at[0]) / len(at))
)
mistake(
    "ttft-and-tpot",
    "the whole request by its tokens",
    says="The time to the first token is in your TPOT, which is about what comes after it.",
)(measured(tpot=lambda arrived, at: (at[-1] - arrived) / len(at)))
mistake(
    "ttft-and-tpot",
    "without the wait in the queue",
    says="The wait in the queue counts: the user does not see when the prefill starts.",
)(measured(ttft=lambda arrived, at, log: at[0] - max(when for when, _, _ in log if when < at[0])))
mistake("ttft-and-tpot", "end to end", says="That is the whole request; TTFT ends with the first token.")(
    measured(ttft=lambda arrived, at, log: at[-1] - arrived)
)
mistake("ttft-and-tpot", "a time on the clock", says="That is a time on the clock, not a wait: subtract the arrival.")(
    measured(ttft=lambda arrived, at, log: at[0])
)
mistake("ttft-and-tpot", "zero for a single token", says="A single token has no time per further token: return None.")(
    measured(single=0.0)
)


mistake(
    "ttft-and-tpot", "the whole time of decoding", says="That is the time of all further tokens: divide by the gaps."
)(measured(tpot=lambda arrived, at: at[-1] - at[0]))
mistake("ttft-and-tpot", "the longest gap", says="That is the longest gap; TPOT is the mean.")(
    measured(tpot=lambda arrived, at: max(b - a for a, b in itertools.pairwise(at)))
)
mistake(
    "ttft-and-tpot", "from the first line of the log", says="Count from this request's arrival, not from the log's."
)(measured(ttft=lambda arrived, at, log: at[0] - log[0][0]))


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
