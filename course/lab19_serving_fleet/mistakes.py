"""Spoilers of lab 19: latencies that hide a stall, buckets without a bottom or a top, choices that are none."""

import math

from course.kit.exercises import KnownAnswers

# Percentiles

latency_percentile = KnownAnswers("latency-percentile")

latency_percentile.mistake(
    "from-when-it-was-sent",
    {"call.ended - call.due": "call.ended - call.sent"},
    says="You count from when the generator came to send the call. Its user waited from when it was due.",
)
latency_percentile.mistake(
    "without-the-failed",
    {
        "math.inf if call.ended is None else call.ended - call.due for call in calls": (
            "call.ended - call.due for call in calls if call.ended is not None"
        )
    },
    says="You leave out the calls that failed. They are the slowest ones: their users are still waiting.",
)
latency_percentile.mistake(
    "place-rounded-down",
    {"math.ceil(share * len(seconds)) - 1": "max(0, int(share * len(seconds)) - 1)"},
    says="You round the place down, so fewer than that share of the calls are within your value.",
)
latency_percentile.mistake(
    "one-place-later",
    {"math.ceil(share * len(seconds)) - 1": "min(len(seconds) - 1, int(share * len(seconds)))"},
    says="You take the value one place too late: lists count from 0, so place n of n values has index n - 1.",
)
latency_percentile.mistake(
    "failed-were-instant",
    {"math.inf if": "0.0 if"},
    says="A call that failed counts as 0 s here, as if it were the fastest of all.",
)


@latency_percentile.alternative("by counting")
def counted(calls, share):
    seconds = [math.inf if call.ended is None else call.ended - call.due for call in calls]
    return min(each for each in seconds if sum(other <= each for other in seconds) >= share * len(seconds) - 1e-9)


# Token bucket

bucket_per_tenant = KnownAnswers("bucket-per-tenant")

bucket_per_tenant.mistake(
    "no-top",
    {"min(self.burst, self.tokens + (now - self.at) * self.rate)": "self.tokens + (now - self.at) * self.rate"},
    says="Your bucket has no top: after a pause a tenant may send far more than its burst at once.",
)
bucket_per_tenant.mistake(
    "empty-at-the-start",
    {"self.tokens, self.at = burst, 0.0": "self.tokens, self.at = 0.0, 0.0"},
    says="Your bucket is empty at the start, so the first requests of a new tenant are refused.",
)
bucket_per_tenant.mistake(
    "pays-when-refused",
    {
        "        return (cost - self.tokens) / self.rate": (
            "        wait = (cost - self.tokens) / self.rate\n        self.tokens -= cost\n        return wait"
        )
    },
    says="A request that is refused still takes tokens: whoever tries again pushes its own turn away.",
)
bucket_per_tenant.mistake(
    "clock-only-on-success",
    {
        "        self.at = now\n        if cost <= self.tokens:\n": (
            "        if cost <= self.tokens:\n            self.at = now\n"
        )
    },
    says="After a refusal the time is not noted, so the same seconds are paid out again at the next call.",
)
bucket_per_tenant.mistake(
    "a-whole-refill",
    {"return (cost - self.tokens) / self.rate": "return cost / self.rate"},
    says="You return the time to earn the whole cost; the tokens that are there need not be earned again.",
)


@bucket_per_tenant.alternative("by the time at which it will be full")
class FullAt:
    def __init__(self, rate, burst):
        self.rate, self.burst, self.full_at = rate, burst, 0.0

    def take(self, now, cost):
        after = max(self.full_at, now) + cost / self.rate
        wait = after - now - self.burst / self.rate
        if wait > 1e-12:
            return wait
        self.full_at = after
        return 0.0


bucket_per_tenant.mistake(
    "one-for-all",
    {
        "self.rate, self.burst = rate, burst": "self = type(self)\n        self.rate, self.burst = rate, burst",
        "        self.tokens = min(": "        self = type(self)\n        self.tokens = min(",
    },
    expect="each bucket keeps tokens of its own",
)


# Two choices

two_choices = KnownAnswers("two-choices")

two_choices.mistake(
    "with-the-same-twice",
    {
        "first, second = rng.sample(range(len(outstanding)), 2)": (
            "first = rng.randrange(len(outstanding))\n    second = rng.randrange(len(outstanding))"
        )
    },
    expect="the least loaded of 2 replicas was chosen in",
)
two_choices.mistake(
    "the-fuller-one",
    {"outstanding[first] <= outstanding[second]": "outstanding[first] >= outstanding[second]"},
    expect="the less loaded would be it",
)
two_choices.mistake(
    "asks-all",
    {
        "return first if outstanding[first] <= outstanding[second] else second": (
            "return min(range(len(outstanding)), key=lambda each: outstanding[each])"
        )
    },
    expect="replicas were asked, and two may be|the less loaded would be it",
)
two_choices.mistake(
    "one-choice",
    {"return first if outstanding[first] <= outstanding[second] else second": "return first"},
    expect="the less loaded would be it",
)
two_choices.mistake(
    "neighbours",
    {
        "first, second = rng.sample(range(len(outstanding)), 2)": (
            "first = rng.randrange(len(outstanding))\n    second = (first + 1) % len(outstanding)"
        )
    },
    expect="of the draws; of two different ones",
)


two_choices.mistake(
    "none-among-equals",
    {
        "return first if outstanding[first] <= outstanding[second] else second": (
            "if outstanding[first] != "
            "outstanding[second]:\n        return first if outstanding[first] < outstanding[second] else second"
        )
    },
    expect="you returned None",
)
two_choices.mistake(
    "counts-itself",
    {
        "return first if outstanding[first] <= outstanding[second] else second": (
            "chosen = first if outstanding[first] "
            "<= outstanding[second] else second\n    outstanding[chosen] += 1\n    return chosen"
        )
    },
    expect="`outstanding` is changed|changed its input",
)
two_choices.mistake(
    "draws-without-rng",
    {"first, second = rng.sample": "import random\n\n    first, second = random.sample"},
    expect="what decides besides `rng`",
)


@two_choices.alternative("a second one by its distance")
def by_distance(outstanding, rng):
    if len(outstanding) == 1:
        return 0
    first = rng.randrange(len(outstanding))
    second = (first + rng.randrange(1, len(outstanding))) % len(outstanding)
    return min(first, second, key=lambda index: outstanding[index])
