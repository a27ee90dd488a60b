"""Lab 21's wrong answers with the sentence each draws, and other right ones."""

from itertools import accumulate

from course.kit.exercises import alternative, mistake

mistake(
    "sequences-that-fit",
    "keys only",
    {"2 * layers": "layers"},
    says="Both keys and values are kept: twice as much per token.",
)
mistake(
    "sequences-that-fit",
    "cache not divided",
    {"max(kv_heads / tp, 1)": "kv_heads"},
    says="The kv heads are divided over the tp ranks, as the weights are.",
)
mistake(
    "sequences-that-fit", "weights whole", {"parameters / tp": "parameters"}, says="A rank holds 1/tp of the weights."
)
mistake(
    "sequences-that-fit",
    "half a kv head",
    {"max(kv_heads / tp, 1)": "kv_heads / tp"},
    says="A kv head is not divided: with more ranks than kv heads they copy one.",
)
mistake(
    "sequences-that-fit",
    "training states",
    {"2 * parameters": "16 * parameters"},
    says="Serving holds weights only, 2 bytes per parameter.",
)
mistake(
    "sequences-that-fit",
    "the heads of one model",
    {"max(kv_heads / tp, 1) * head_dim": "max(8 / tp, 1) * 128"},
    expect="tp 2, .* admitting one after the other",
)
mistake(
    "sequences-that-fit",
    "the last one that just fits",
    {
        "int(room // (per_token * context))": "math.ceil(room / (per_token * context)) - 1",
        "room = ": "import math\n\n    room = ",
    },
    expect="What fits to the last byte fits",
)
mistake("sequences-that-fit", "negative room", {"max(0, ": "("}, expect="not for a negative number")


@alternative("sequences-that-fit", "over all ranks")
def over_all_ranks(memory, parameters, tp, layers, kv_heads, head_dim, context):
    room = tp * memory - 2 * parameters
    heads = max(kv_heads, tp)
    return max(0, room // (layers * heads * head_dim * 4 * context))


mistake(
    "queue-waits",
    "service included",
    {"append(wait)": "append(wait + own)"},
    says="That is the time until the answer; the wait ends when the service begins.",
)
mistake(
    "queue-waits",
    "own service",
    {"wait + service": "wait + own"},
    says="Request i waits for the services before it, not for its own.",
)
mistake(
    "queue-waits",
    "never below zero left out",
    {"max(0.0, wait + service - gap)": "wait + service - gap if seconds else 0.0"},
    says="An idle server saves nothing up: a wait is never below 0.",
)
mistake(
    "queue-waits",
    "only the one before",
    {"wait + service": "service"},
    says="The one before may have waited too: its wait belongs to yours.",
)
mistake(
    "queue-waits",
    "mean instead of a list",
    {"return seconds": "return sum(seconds) / len(seconds)"},
    expect="the exercise asks for a list",
)


mistake(
    "queue-waits",
    "kept between calls",
    {
        "def waits(gaps, services):": "def waits(gaps, services, seconds=[]):",
        "seconds, wait, service = [], 0.0, 0.0": "wait = service = 0.0",
    },
    expect="a list of 200 waits",
)


@alternative("queue-waits", "with a clock")
def with_a_clock(gaps, services):
    now, free, waits = 0.0, 0.0, []
    for gap, service in zip(gaps, services, strict=True):
        now += gap
        start = max(now, free)
        waits.append(start - now)
        free = start + service
    return waits


@alternative("queue-waits", "by prefix sums")
def by_prefix_sums(gaps, services):
    arrivals, done = list(accumulate(gaps)), [0.0, *accumulate(services)]
    ahead = [arrival - before for arrival, before in zip(arrivals, done, strict=False)]
    return [best - own for best, own in zip(accumulate(ahead, max), ahead, strict=True)]
