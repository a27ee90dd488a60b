"""Spoilers of lab 19: scaling that sees only today, and diagnoses that jump at the first number."""

import math

from course.kit.exercises import KnownAnswers

# Replicas for later

replicas_wanted = KnownAnswers("replicas-wanted")

replicas_wanted.mistake(
    "no-cold-start",
    {"slope * (now + cold_start_s - middle)": "slope * (now - middle)"},
    says="You plan for the rate of now, and what you order serves only a cold start later.",
)
replicas_wanted.mistake(
    "trusts-a-fall",
    {"max(latest, mean + slope * (now + cold_start_s - middle))": "mean + slope * (now + cold_start_s - middle)"},
    says="You follow a line that falls, and plan for fewer than what comes right now.",
)
replicas_wanted.mistake(
    "forgets-the-queue",
    {"(coming + waiting / drain_s)": "coming"},
    says="What waits already is never worked off: a fleet that only keeps up keeps its queue.",
)
replicas_wanted.mistake(
    "from-the-end-of-the-line",
    {"mean + slope * (now + cold_start_s - middle)": "mean + slope * cold_start_s"},
    says="The mean belongs to the middle of the window, not to now: half a window of slope is missing.",
)
replicas_wanted.mistake(
    "rounds-to-nearest",
    {"math.ceil((coming": "round((coming"},
    says="You round to the nearest number, so that in half of the cases a replica is missing.",
)
replicas_wanted.mistake(
    "down-to-none",
    {"max(1, math.ceil": "max(0, math.ceil"},
    says="Without load nothing is left, and the next request waits for a whole cold start.",
)


replicas_wanted.mistake(
    "halfway-for-the-mean",
    {"sum(at for at, _ in rates) / len(rates)": "(rates[0][0] + rates[-1][0]) / 2"},
    says="The middle between first and last is the mean of the times only if they are evenly spaced.",
)


@replicas_wanted.alternative("from sums of products")
def from_sums(rates, waiting, capacity, utilization, cold_start_s, drain_s):
    n, at = len(rates), [t - rates[-1][0] for t, _ in rates]
    sum_t, sum_r = sum(at), sum(r for _, r in rates)
    below = n * sum(t * t for t in at) - sum_t**2
    slope = (n * sum(t * r for t, (_, r) in zip(at, rates, strict=True)) - sum_t * sum_r) / below if below else 0.0
    coming = max(rates[-1][1], (sum_r - slope * sum_t) / n + slope * cold_start_s)
    return max(1, math.ceil((coming + waiting / drain_s) / capacity / utilization - 1e-12))


# A page of metrics

diagnose_a_fleet = KnownAnswers("diagnose-a-fleet")

diagnose_a_fleet.mistake(
    "cause-before-symptom",
    {"if page.ttft_p99_s <= 1:": "if page.ttft_p99_s <= 1 and not page.preemptions and max(page.prompts) < 1000:"},
    says="You take a fleet for ill whose users wait for nothing: some preemptions or one long prompt harm nobody.",
)
diagnose_a_fleet.mistake(
    "any-long-prompt-is-the-last-cause",
    {
        (
            '    if sum(longest) > 0.5 * sum(page.prompts):\n        return "long prompts"\n'
            '    return "noisy neighbour"'
        ): '    return "long prompts"'
    },
    says="Whatever is left is taken for long prompts: look at whose tokens they are.",
)
diagnose_a_fleet.mistake(
    "retries-unseen",
    {'    if page.attempts > 1.5 * page.requests:\n        return "retry storm"\n': ""},
    says="Three attempts arrive for each request, and you do not compare the two.",
)
diagnose_a_fleet.mistake(
    "starting-unseen",
    {'    if page.starting_s > page.start_s:\n        return "cold-start storm"\n': ""},
    says="Replicas have been starting for many times what a start takes, and you do not look at it.",
)
diagnose_a_fleet.mistake(
    "always-the-neighbour",
    {"page.computed > 1.15 * page.needed": "page.computed > 3 * page.needed"},
    says="A third more tokens are computed than needed: your bound is too high to see it.",
)


diagnose_a_fleet.mistake(
    "seconds-of-a-start",
    {"page.starting_s > page.start_s": "page.starting_s > 60"},
    says="Whether a start takes long depends on what it takes alone: that differs from fleet to fleet.",
)


@diagnose_a_fleet.alternative("by scores")
def by_scores(page):
    if page.ttft_p99_s <= 1:
        return "healthy"
    scores = {
        "cold-start storm": page.starting_s / page.start_s / 2,
        "retry storm": page.attempts / page.requests / 1.5,
        "memory collapse": page.computed / page.needed / 1.15 if page.preemptions else 0.0,
        "long prompts": 2 * sum(sorted(page.prompts)[-max(1, len(page.prompts) // 10) :]) / sum(page.prompts),
    }
    worst = max(scores, key=scores.get)
    return worst if scores[worst] > 1 else "noisy neighbour"
