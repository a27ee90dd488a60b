"""Spoilers of lab 12: a cache's bytes, what a step reads and computes, and latencies, all wrong; and right ones."""

import torch

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers
from course.lab12_decoding.decoders import Cache

ANSWERS = answers_of("12_decoding")


bytes_kept = KnownAnswers("kv-bytes")

bytes_kept.mistake(
    "prompt and answer",
    {"prompt + answer - 1": "prompt + answer"},
    says="One entry too many: the last token of the answer never goes through the model.",
)
bytes_kept.mistake(
    "query heads",
    {"* config.num_kv_heads": "* config.num_heads"},
    says="Query heads are counted, but only kv heads are kept.",
)
bytes_kept.mistake("keys only", {"entries * 2": "entries"}, says="That is keys or values; both are kept.")
bytes_kept.mistake("one layer", {" * config.num_layers": ""}, says="That is one layer's; every layer keeps its own.")
bytes_kept.mistake(
    "numbers instead of bytes", {" * itemsize": ""}, says="These are numbers, not bytes: multiply by itemsize."
)
bytes_kept.mistake(
    "hidden size",
    {"config.num_kv_heads * config.head_dim": "config.hidden_size"},
    says="hidden_size is not kv_heads · head_dim: take the sizes of what is kept.",
)
bytes_kept.mistake(
    "two bytes always", {"* itemsize": "* 2"}, says="You count 2 bytes per number whatever itemsize says."
)
bytes_kept.mistake(
    "the prompt alone", {"prompt + answer - 1": "prompt"}, says="The answer's tokens are kept, too, all but its last."
)


@bytes_kept.alternative("makes a cache and asks it")
def asks_a_cache(config, prompt, answer, itemsize):
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[itemsize]
    cache = Cache(config, prompt + answer - 1, ANSWERS.attend, dtype)
    return cache.keys.nbytes + cache.values.nbytes


decode_step = KnownAnswers("decode-step")

decode_step.mistake(
    "weights read twice",
    {"read = weights": "read = 2 * weights"},
    says="A weight is read once; the factor 2 belongs to FLOPs (multiply and add).",
)
decode_step.mistake(
    "weights read by every sequence",
    {"weights * itemsize + batch * context * kv_bytes": "batch * (weights * itemsize + context * kv_bytes)"},
    says="The weights are read once per step, for all sequences together.",
)
decode_step.mistake(
    "no cache",
    {" + batch * context * kv_bytes": ""},
    says="The cache is missing: every sequence reads its own keys and values.",
)
decode_step.mistake(
    "one sequence's cache",
    {"batch * context": "context"},
    says="That is one sequence's cache; each of the batch reads its own.",
)
decode_step.mistake(
    "one FLOP per weight", {"2 * weights": "weights"}, says="A multiplication and an addition per weight are two FLOPs."
)
decode_step.mistake(
    "one sequence's tokens",
    {"batch / max": "1 / max"},
    says="That is one sequence's rate; a step gives a token to each of the batch.",
)
decode_step.mistake(
    "reads, then computes",
    {"max(read / bandwidth, flops / peak_flops)": "(read / bandwidth + flops / peak_flops)"},
    says="Reading and computing overlap: take the slower of the two, not their sum.",
)
decode_step.mistake("the faster of the two", {"max(": "min("}, says="The slower of the two decides, not the faster.")
decode_step.mistake(
    "kv bytes by itemsize",
    {"context * kv_bytes": "context * kv_bytes * itemsize"},
    says="kv_bytes are bytes already; itemsize belongs to the weights.",
)
decode_step.mistake(
    "keys and values twice", {"batch * context": "2 * batch * context"}, says="kv_bytes holds keys and values already."
)
for _name, _tokens in (("one token too few in each cache", "(context - 1)"), ("one too many", "(context + 1)")):
    decode_step.mistake(
        _name,
        {"batch * context": f"batch * {_tokens}"},
        says="Each sequence reads `context` tokens of its cache, the new one among them.",
    )
decode_step.mistake(
    "weights without itemsize",
    {"weights * itemsize": "weights"},
    says="The weights are numbers: multiply by itemsize to get bytes.",
)
decode_step.mistake(
    "FLOPs of one sequence",
    {"2 * weights * batch": "2 * weights"},
    says="Those are one sequence's FLOPs; the batch does as many each.",
)
decode_step.mistake(
    "memory alone",
    {"max(read / bandwidth, flops / peak_flops)": "(read / bandwidth)"},
    says="Computing takes longer than reading at the largest batch here.",
)
decode_step.mistake(
    "compute alone",
    {"max(read / bandwidth, flops / peak_flops)": "(flops / peak_flops)"},
    says="Reading takes longer than computing at the small batches here.",
)


@decode_step.alternative("by arithmetic intensity")
def by_intensity(weights, kv_bytes, batch, context, itemsize, peak_flops, bandwidth):
    read, flops, _ = ANSWERS.decode_step(weights, kv_bytes, batch, context, itemsize, peak_flops, bandwidth)
    return read, flops, batch * min(peak_flops, bandwidth * flops / read) / flops


ttft_and_tpot = KnownAnswers("ttft-and-tpot")

ttft_and_tpot.mistake(
    "divides by the number of tokens", {"/ (len(at) - 1)": "/ len(at)"}, says="n tokens have n - 1 gaps between them."
)
ttft_and_tpot.mistake(
    "the whole request by its tokens",
    {"(at[-1] - at[0]) / (len(at) - 1)": "(at[-1] - arrived[request]) / len(at)"},
    says="The time to the first token is in your TPOT, which is about what comes after it.",
)
ttft_and_tpot.mistake(
    "without the wait in the queue",
    {"at[0] - arrived[request]": "at[0] - max(when for when, _, _ in log if when < at[0])"},
    says="The wait in the queue counts: the user does not see when the prefill starts.",
)
ttft_and_tpot.mistake(
    "end to end",
    {"at[0] - arrived[request]": "at[-1] - arrived[request]"},
    says="That is the whole request; TTFT ends with the first token.",
)
ttft_and_tpot.mistake(
    "a time on the clock",
    {"at[0] - arrived[request]": "at[0]"},
    says="That is a time on the clock, not a wait: subtract the arrival.",
)
ttft_and_tpot.mistake(
    "zero for a single token",
    {"else None": "else 0.0"},
    says="A single token has no time per further token: return None.",
)
ttft_and_tpot.mistake(
    "the whole time of decoding",
    {" / (len(at) - 1)": ""},
    says="That is the time of all further tokens: divide by the gaps.",
)
ttft_and_tpot.mistake(
    "the longest gap",
    {"(at[-1] - at[0]) / (len(at) - 1)": "max(b - a for a, b in zip(at, at[1:]))"},
    says="That is the longest gap; TPOT is the mean.",
)
ttft_and_tpot.mistake(
    "from the first line of the log",
    {"at[0] - arrived[request]": "at[0] - log[0][0]"},
    says="Count from this request's arrival, not from the log's.",
)
ttft_and_tpot.mistake(
    "tokens of one time count once",
    {"in times.items()": "in ((name, sorted(set(each))) for name, each in times.items())"},
    says="A pass may yield several tokens at one time: each is a token, so do not drop equal times.",
)
ttft_and_tpot.mistake("a text for none", {"else None": 'else "none"'}, expect="a text")
ttft_and_tpot.mistake("breaks at a single token", {" if len(at) > 1 else None": ""}, expect="ZeroDivisionError")


@ttft_and_tpot.alternative("one walk over the log")
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
