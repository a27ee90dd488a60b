"""Lab 21's wrong answers with the sentence each draws, and other right ones."""

from itertools import accumulate

from course.kit.exercises import alternative, mistake
from course.lab21_design_serving.checks import ANSWERS


def _fit(memory, weights, token, context):
    return max(0, int((memory - weights) // (token * context)))


mistake("sequences-that-fit", "keys only", says="Both keys and values are kept: twice as much per token.")(
    lambda memory, parameters, tp, layers, kv_heads, head_dim, context: _fit(
        memory, 2 * parameters / tp, 2 * layers * max(kv_heads / tp, 1) * head_dim, context
    )
)
mistake(
    "sequences-that-fit", "cache not divided", says="The kv heads are divided over the tp ranks, as the weights are."
)(
    lambda memory, parameters, tp, layers, kv_heads, head_dim, context: _fit(
        memory, 2 * parameters / tp, 4 * layers * kv_heads * head_dim, context
    )
)
mistake("sequences-that-fit", "weights whole", says="A rank holds 1/tp of the weights.")(
    lambda memory, parameters, tp, layers, kv_heads, head_dim, context: _fit(
        memory, 2 * parameters, 4 * layers * max(kv_heads / tp, 1) * head_dim, context
    )
)
mistake(
    "sequences-that-fit",
    "half a kv head",
    says="A kv head is not divided: with more ranks than kv heads they copy one.",
)(
    lambda memory, parameters, tp, layers, kv_heads, head_dim, context: _fit(
        memory, 2 * parameters / tp, 4 * layers * kv_heads / tp * head_dim, context
    )
)
mistake("sequences-that-fit", "training states", says="Serving holds weights only, 2 bytes per parameter.")(
    lambda memory, parameters, tp, layers, kv_heads, head_dim, context: _fit(
        memory, 16 * parameters / tp, 4 * layers * max(kv_heads / tp, 1) * head_dim, context
    )
)
mistake("sequences-that-fit", "negative room", expect="not for a negative number")(
    lambda memory, parameters, tp, layers, kv_heads, head_dim, context: int(
        (memory - 2 * parameters / tp) // (4 * layers * max(kv_heads / tp, 1) * head_dim * context)
    )
)


@alternative("sequences-that-fit", "over all ranks")
def over_all_ranks(memory, parameters, tp, layers, kv_heads, head_dim, context):
    room = tp * memory - 2 * parameters
    heads = max(kv_heads, tp)
    return max(0, room // (layers * heads * head_dim * 4 * context))


mistake(
    "queue-waits", "service included", says="That is the time until the answer; the wait ends when the service begins."
)(lambda gaps, services: [a + b for a, b in zip(ANSWERS.waits(gaps, services), services, strict=True)])
mistake("queue-waits", "own service", says="Request i waits for the services before it, not for its own.")(
    lambda gaps, services: list(
        accumulate(zip(gaps, services, strict=True), lambda w, gs: max(0.0, w + gs[1] - gs[0]), initial=0.0)
    )[1:]
)


@mistake("queue-waits", "never below zero left out", says="An idle server saves nothing up: a wait is never below 0.")
def without_floor(gaps, services):
    waits = [0.0]
    for gap, service in zip(gaps[1:], services, strict=False):
        waits.append(waits[-1] + service - gap)
    return waits


@mistake("queue-waits", "only the one before", says="The one before may have waited too: its wait belongs to yours.")
def only_the_last_service(gaps, services):
    return [0.0] + [max(0.0, service - gap) for gap, service in zip(gaps[1:], services, strict=False)]


mistake("queue-waits", "mean instead of a list", expect="the exercise asks for a list")(
    lambda gaps, services: sum(ANSWERS.waits(gaps, services)) / len(gaps)
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
