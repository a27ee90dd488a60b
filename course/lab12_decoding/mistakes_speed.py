"""Spoilers of lab 12: a cache's bytes, what a step reads and computes, and latencies, all wrong; and right ones."""

import torch

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake
from course.lab12_decoding.decoders import Cache

ANSWERS = answers_of("12_decoding")


mistake(
    "kv-bytes",
    "prompt and answer",
    {"prompt + answer - 1": "prompt + answer"},
    says="One entry too many: the last token of the answer never goes through the model.",
)
mistake(
    "kv-bytes",
    "query heads",
    {"* config.num_kv_heads": "* config.num_heads"},
    says="Query heads are counted, but only kv heads are kept.",
)
mistake("kv-bytes", "keys only", {"entries * 2": "entries"}, says="That is keys or values; both are kept.")
mistake("kv-bytes", "one layer", {" * config.num_layers": ""}, says="That is one layer's; every layer keeps its own.")
mistake(
    "kv-bytes",
    "numbers instead of bytes",
    {" * itemsize": ""},
    says="These are numbers, not bytes: multiply by itemsize.",
)
mistake(
    "kv-bytes",
    "hidden size",
    {"config.num_kv_heads * config.head_dim": "config.hidden_size"},
    says="hidden_size is not kv_heads · head_dim: take the sizes of what is kept.",
)
mistake(
    "kv-bytes", "two bytes always", {"* itemsize": "* 2"}, says="You count 2 bytes per number whatever itemsize says."
)
mistake(
    "kv-bytes",
    "the prompt alone",
    {"prompt + answer - 1": "prompt"},
    says="The answer's tokens are kept, too, all but its last.",
)


@alternative("kv-bytes", "makes a cache and asks it")
def asks_a_cache(config, prompt, answer, itemsize):
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[itemsize]
    cache = Cache(config, prompt + answer - 1, ANSWERS.attend, dtype)
    return cache.keys.nbytes + cache.values.nbytes


mistake(
    "decode-step",
    "weights read twice",
    {"read = weights": "read = 2 * weights"},
    says="A weight is read once; the factor 2 belongs to FLOPs (multiply and add).",
)
mistake(
    "decode-step",
    "weights read by every sequence",
    {"weights * itemsize + batch * context * kv_bytes": "batch * (weights * itemsize + context * kv_bytes)"},
    says="The weights are read once per step, for all sequences together.",
)
mistake(
    "decode-step",
    "no cache",
    {" + batch * context * kv_bytes": ""},
    says="The cache is missing: every sequence reads its own keys and values.",
)
mistake(
    "decode-step",
    "one sequence's cache",
    {"batch * context": "context"},
    says="That is one sequence's cache; each of the batch reads its own.",
)
mistake(
    "decode-step",
    "one FLOP per weight",
    {"2 * weights": "weights"},
    says="A multiplication and an addition per weight are two FLOPs.",
)
mistake(
    "decode-step",
    "one sequence's tokens",
    {"batch / max": "1 / max"},
    says="That is one sequence's rate; a step gives a token to each of the batch.",
)
mistake(
    "decode-step",
    "reads, then computes",
    {"max(read / bandwidth, flops / peak_flops)": "(read / bandwidth + flops / peak_flops)"},
    says="Reading and computing overlap: take the slower of the two, not their sum.",
)
mistake("decode-step", "the faster of the two", {"max(": "min("}, says="The slower of the two decides, not the faster.")
mistake(
    "decode-step",
    "kv bytes by itemsize",
    {"context * kv_bytes": "context * kv_bytes * itemsize"},
    says="kv_bytes are bytes already; itemsize belongs to the weights.",
)
mistake(
    "decode-step",
    "keys and values twice",
    {"batch * context": "2 * batch * context"},
    says="kv_bytes holds keys and values already.",
)
for _name, _tokens in (("one token too few in each cache", "(context - 1)"), ("one too many", "(context + 1)")):
    mistake(
        "decode-step",
        _name,
        {"batch * context": f"batch * {_tokens}"},
        says="Each sequence reads `context` tokens of its cache, the new one among them.",
    )
mistake(
    "decode-step",
    "weights without itemsize",
    {"weights * itemsize": "weights"},
    says="The weights are numbers: multiply by itemsize to get bytes.",
)
mistake(
    "decode-step",
    "FLOPs of one sequence",
    {"2 * weights * batch": "2 * weights"},
    says="Those are one sequence's FLOPs; the batch does as many each.",
)
mistake(
    "decode-step",
    "memory alone",
    {"max(read / bandwidth, flops / peak_flops)": "(read / bandwidth)"},
    says="Computing takes longer than reading at the largest batch here.",
)
mistake(
    "decode-step",
    "compute alone",
    {"max(read / bandwidth, flops / peak_flops)": "(flops / peak_flops)"},
    says="Reading takes longer than computing at the small batches here.",
)


@alternative("decode-step", "by arithmetic intensity")
def by_intensity(weights, kv_bytes, batch, context, itemsize, peak_flops, bandwidth):
    read, flops, _ = ANSWERS.decode_step(weights, kv_bytes, batch, context, itemsize, peak_flops, bandwidth)
    return read, flops, batch * min(peak_flops, bandwidth * flops / read) / flops


mistake(
    "ttft-and-tpot",
    "divides by the number of tokens",
    {"/ (len(at) - 1)": "/ len(at)"},
    says="n tokens have n - 1 gaps between them.",
)
mistake(
    "ttft-and-tpot",
    "the whole request by its tokens",
    {"(at[-1] - at[0]) / (len(at) - 1)": "(at[-1] - arrived[request]) / len(at)"},
    says="The time to the first token is in your TPOT, which is about what comes after it.",
)
mistake(
    "ttft-and-tpot",
    "without the wait in the queue",
    {"at[0] - arrived[request]": "at[0] - max(when for when, _, _ in log if when < at[0])"},
    says="The wait in the queue counts: the user does not see when the prefill starts.",
)
mistake(
    "ttft-and-tpot",
    "end to end",
    {"at[0] - arrived[request]": "at[-1] - arrived[request]"},
    says="That is the whole request; TTFT ends with the first token.",
)
mistake(
    "ttft-and-tpot",
    "a time on the clock",
    {"at[0] - arrived[request]": "at[0]"},
    says="That is a time on the clock, not a wait: subtract the arrival.",
)
mistake(
    "ttft-and-tpot",
    "zero for a single token",
    {"else None": "else 0.0"},
    says="A single token has no time per further token: return None.",
)
mistake(
    "ttft-and-tpot",
    "the whole time of decoding",
    {" / (len(at) - 1)": ""},
    says="That is the time of all further tokens: divide by the gaps.",
)
mistake(
    "ttft-and-tpot",
    "the longest gap",
    {"(at[-1] - at[0]) / (len(at) - 1)": "max(b - a for a, b in zip(at, at[1:]))"},
    says="That is the longest gap; TPOT is the mean.",
)
mistake(
    "ttft-and-tpot",
    "from the first line of the log",
    {"at[0] - arrived[request]": "at[0] - log[0][0]"},
    says="Count from this request's arrival, not from the log's.",
)
mistake("ttft-and-tpot", "breaks at a single token", {" if len(at) > 1 else None": ""}, expect="ZeroDivisionError")


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
