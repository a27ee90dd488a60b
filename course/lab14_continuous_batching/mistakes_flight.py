"""Spoilers of lab 14's flight recorder: tokens that are none, waits left out, symptoms taken for faults."""

from collections import Counter
from itertools import pairwise

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake

ANSWERS = answers_of("14_continuous_batching")


# Latencies


def _times(records, prompts, gives):
    held, times = dict(prompts), {name: [] for name in prompts}
    for each in records:
        for name, first, tokens in each.batch:
            if gives(name, first, tokens, held):
                held[name] += 1
                times[name].append(each.started + each.seconds)
    return times


def _sum_up(times, arrived):
    gaps = {name: [b - a for a, b in pairwise(at)] for name, at in times.items()}
    return {
        name: (at[0] - arrived[name], sum(gaps[name]) / len(gaps[name]), max(gaps[name])) for name, at in times.items()
    }


def _last(name, first, tokens, held):
    return first + tokens == held[name]


@mistake(
    "latencies-from-a-flight",
    "every-batch-is-a-token",
    says="A piece of a prompt gives no token: only a step that computes a sequence's last token gives it one more.",
)
def every_batch(records, prompts, arrived):
    return _sum_up(_times(records, prompts, lambda *_: True), arrived)


@mistake(
    "latencies-from-a-flight",
    "wait-left-out",
    says="You count from the first step that a request is in. The wait in the queue before it belongs to TTFT.",
)
def from_admission(records, prompts, arrived):
    scheduled = {}
    for each in records:
        for name, _, _ in each.batch:
            scheduled.setdefault(name, each.started)
    return _sum_up(_times(records, prompts, _last), scheduled)


@mistake("latencies-from-a-flight", "divided-by-all-tokens", says="n tokens have n - 1 gaps between them.")
def by_all_tokens(records, prompts, arrived):
    counts = {name: len(at) for name, at in _times(records, prompts, _last).items()}
    found = ANSWERS.latencies(records, prompts, arrived)
    return {name: (a, b * (counts[name] - 1) / counts[name], c) for name, (a, b, c) in found.items()}


@mistake("latencies-from-a-flight", "end-to-end-per-token", says="Your TPOT contains the time to the first token.")
def with_the_prompt(records, prompts, arrived):
    times = _times(records, prompts, _last)
    found = ANSWERS.latencies(records, prompts, arrived)
    return {name: (a, (times[name][-1] - arrived[name]) / len(times[name]), c) for name, (a, _, c) in found.items()}


@mistake(
    "latencies-from-a-flight",
    "token-when-the-step-starts",
    says="You time a token when its step starts; it is there when the step is over.",
)
def at_the_start(records, prompts, arrived):
    held, times = dict(prompts), {name: [] for name in prompts}
    for each in records:
        for name, first, tokens in each.batch:
            if first + tokens == held[name]:
                held[name] += 1
                times[name].append(each.started)
    return _sum_up(times, arrived)


@mistake(
    "latencies-from-a-flight",
    "computed-again-counts-again",
    says="Tokens that are computed again after a preemption are not new: compare with what the sequence has by then.",
)
def counts_again(records, prompts, arrived):
    return _sum_up(_times(records, prompts, lambda name, first, tokens, held: first + tokens >= prompts[name]), arrived)


@mistake(
    "latencies-from-a-flight",
    "every-batch-behind-the-prompt",
    says="After a preemption the answer so far is computed again in pieces; only the last gives a new token.",
)
def behind_the_prompt(records, prompts, arrived):
    gives = lambda name, first, tokens, held: first >= prompts[name] - 1 or first + tokens == prompts[name]  # noqa: E731
    return _sum_up(_times(records, prompts, gives), arrived)


@mistake("latencies-from-a-flight", "in-milliseconds", says="Seconds are asked for, not milliseconds.")
def in_milliseconds(records, prompts, arrived):
    found = ANSWERS.latencies(records, prompts, arrived)
    return {name: tuple(1e3 * each for each in one) for name, one in found.items()}


@alternative("latencies-from-a-flight", "by-the-position-computed")
def by_position(records, prompts, arrived):
    times = {name: {} for name in prompts}
    for each in records:
        for name, first, tokens in each.batch:
            answered = first + tokens - prompts[name]
            if answered == len(times[name]):
                times[name][answered] = each.started + each.seconds
    return _sum_up({name: list(at.values()) for name, at in times.items()}, arrived)


# Diagnosis


@mistake("diagnose-a-flight", "all-is-well", expect="you say 'healthy', it is")
def all_is_well(records, prompts):
    return "healthy"


@mistake("diagnose-a-flight", "preempted-twice-is-a-place-lost", expect="place in the queue lost")
def preempted_twice(records, prompts):
    found = ANSWERS.diagnose(records, prompts)
    times = Counter(name for each in records for name in each.preempted)
    if found in ("healthy", "place in the queue lost"):
        return "place in the queue lost" if max(times.values(), default=0) > 1 else "healthy"
    return found


@mistake("diagnose-a-flight", "many-preemptions-are-a-livelock", expect="it is 'livelock'|you say 'livelock'")
def many_preemptions(records, prompts):
    found = ANSWERS.diagnose(records, prompts)
    if sum(len(each.preempted) for each in records) >= 3 and found in ("healthy", "place in the queue lost"):
        return "livelock"
    return found


@mistake("diagnose-a-flight", "one-missing-is-a-stall", expect="you say 'phases never mixed'")
def one_missing(records, prompts):
    running = set()
    for each in records:
        batch = {name for name, _, _ in each.batch}
        if running - batch - set(each.preempted):
            return "phases never mixed"
        running = (running | batch) - set(each.ended) - set(each.preempted)
    return ANSWERS.diagnose(records, prompts)


@mistake("diagnose-a-flight", "never-follows-the-tokens", expect="it is 'tokens that do not exist'")
def without_tokens(records, prompts):
    found = ANSWERS.diagnose(records, prompts)
    return "healthy" if found == "tokens that do not exist" else found


@alternative("diagnose-a-flight", "one-question-after-the-other")
def questions(records, prompts):
    def each_token():
        held = dict(prompts)
        for record in records:
            for name, first, tokens in record.batch:
                yield record, name, first + tokens - held[name]
                held[name] += first + tokens == held[name]

    if any(over > 0 for _, _, over in each_token()):
        return "tokens that do not exist"
    if len(records) > 150 and sum(record.sampled for record in records[-100:]) == 0:
        return "livelock"
    away = []
    for record in records:
        away += record.preempted
        for name in record.admitted:
            away = [other for other in away if other != name]
            if away and min(map(int, away)) < int(name):
                return "place in the queue lost"
    tokens = {record.step: {name for r, name, over in each_token() if r is record and over == 0} for record in records}
    ready = set()
    for record in records:
        ready -= set(record.preempted)
        if ready and ready.isdisjoint(name for name, _, _ in record.batch):
            return "phases never mixed"
        ready = (ready | tokens[record.step]) - set(record.ended)
    return "healthy"


@mistake("diagnose-a-flight", "whatever-has-not-ended-is-a-livelock", expect="is no fault")
def not_ended(records, prompts):
    found = ANSWERS.diagnose(records, prompts)
    return "livelock" if sum(len(each.ended) for each in records) < len(prompts) else found
