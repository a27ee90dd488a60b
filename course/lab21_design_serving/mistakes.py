"""Lab 21's wrong answers with the sentence each draws, and other right ones."""

from itertools import accumulate

from course.kit.exercises import KnownAnswers

sequences_that_fit = KnownAnswers("sequences-that-fit")

sequences_that_fit.mistake(
    "keys only", {"2 * layers": "layers"}, says="Both keys and values are kept: twice as much per token."
)
sequences_that_fit.mistake(
    "cache not divided",
    {"max(kv_heads / tp, 1)": "kv_heads"},
    says="The kv heads are divided over the tp ranks, as the weights are.",
)
sequences_that_fit.mistake("weights whole", {"parameters / tp": "parameters"}, says="A rank holds 1/tp of the weights.")
sequences_that_fit.mistake(
    "half a kv head",
    {"max(kv_heads / tp, 1)": "kv_heads / tp"},
    says="A kv head is not divided: with more ranks than kv heads they copy one.",
)
sequences_that_fit.mistake(
    "training states", {"2 * parameters": "16 * parameters"}, says="Serving holds weights only, 2 bytes per parameter."
)
sequences_that_fit.mistake(
    "the heads of one model",
    {"max(kv_heads / tp, 1) * head_dim": "max(8 / tp, 1) * 128"},
    expect="kv heads of .* admitting one after the other",
)
sequences_that_fit.mistake(
    "the last one that just fits",
    {
        "int(room // (per_token * context))": "math.ceil(room / (per_token * context)) - 1",
        "room = ": "import math\n\n    room = ",
    },
    expect="What fits to the last byte fits",
)
sequences_that_fit.mistake("negative room", {"max(0, ": "("}, expect="-1. Without room for a whole sequence")
sequences_that_fit.mistake(
    "the model on every GPU",
    {"parameters / tp": "parameters / tp if 2 * parameters <= memory else 0"},
    says="The weights may be larger than one GPU's memory: a GPU has to hold its share only.",
)
sequences_that_fit.mistake("at least one", {"max(0, ": "max(1, "}, expect="1. Without room for a whole sequence")


@sequences_that_fit.alternative("over all ranks")
def over_all_ranks(memory, parameters, tp, layers, kv_heads, head_dim, context):
    room = tp * memory - 2 * parameters
    heads = max(kv_heads, tp)
    return max(0, room // (layers * heads * head_dim * 4 * context))


queue_waits = KnownAnswers("queue-waits")

queue_waits.mistake(
    "service included",
    {"append(wait)": "append(wait + own)"},
    says="That is the time until the answer; the wait ends when the service begins.",
)
queue_waits.mistake(
    "own service", {"wait + service": "wait + own"}, says="Request i waits for the services before it, not for its own."
)
queue_waits.mistake(
    "never below zero left out",
    {"max(0.0, wait + service - gap)": "wait + service - gap if seconds else 0.0"},
    says="An idle server saves nothing up: a wait is never below 0.",
)
queue_waits.mistake(
    "only the one before",
    {"wait + service": "service"},
    says="The one before may have waited too: its wait belongs to yours.",
)
queue_waits.mistake(
    "mean instead of a list",
    {"return seconds": "return sum(seconds) / len(seconds)"},
    expect="the exercise asks for a list",
)


queue_waits.mistake(
    "kept between calls",
    {
        "def waits(gaps, services):": "def waits(gaps, services, seconds=[]):",
        "seconds, wait, service = [], 0.0, 0.0": "wait = service = 0.0",
    },
    expect=r"a list of \d+ waits",
)


queue_waits.mistake(
    "cleared in each call",
    {
        "def waits(gaps, services):": "def waits(gaps, services, seconds=[]):",
        "seconds, wait, service = [], 0.0, 0.0": "seconds.clear()\n    wait = service = 0.0",
    },
    expect="Two calls returned the same list",
)


@queue_waits.mistake("a first wait without a request", expect="a list of 0 waits")
def first_wait_is_zero(gaps, services):
    waits = [0.0]
    for i in range(1, len(gaps)):
        waits.append(max(0.0, waits[-1] + services[i - 1] - gaps[i]))
    return waits


@queue_waits.alternative("with a clock")
def with_a_clock(gaps, services):
    now, free, waits = 0.0, 0.0, []
    for gap, service in zip(gaps, services, strict=True):
        now += gap
        start = max(now, free)
        waits.append(start - now)
        free = start + service
    return waits


@queue_waits.alternative("by prefix sums")
def by_prefix_sums(gaps, services):
    arrivals, done = list(accumulate(gaps)), [0.0, *accumulate(services)]
    ahead = [arrival - before for arrival, before in zip(arrivals, done, strict=False)]
    return [best - own for best, own in zip(accumulate(ahead, max), ahead, strict=True)]
