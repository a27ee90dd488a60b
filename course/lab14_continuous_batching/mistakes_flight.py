"""Spoilers of lab 14's flight recorder: tokens that are none, waits left out, symptoms taken for faults."""

from collections import Counter

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers

ANSWERS = answers_of("14_continuous_batching")


# Latencies

latencies_from_a_flight = KnownAnswers("latencies-from-a-flight")

latencies_from_a_flight.mistake(
    "every-batch-is-a-token",
    {"first + tokens == held[name]": "True"},
    says="A piece of a prompt gives no token: only a step that computes a sequence's last token gives it one more.",
)
latencies_from_a_flight.mistake(
    "wait-left-out",
    {
        "held, times = dict(prompts)": "arrived, held, times = {}, dict(prompts)",
        "            if first": "            arrived.setdefault(name, each.started)\n            if first",
    },
    says="You count from the first step that a request is in. The wait in the queue before it belongs to TTFT.",
)
latencies_from_a_flight.mistake(
    "divided-by-all-tokens", {"len(gaps)": "len(at)"}, says="n tokens have n - 1 gaps between them."
)
latencies_from_a_flight.mistake(
    "end-to-end-per-token",
    {"sum(gaps) / len(gaps)": "(at[-1] - arrived[name]) / len(at)"},
    says="Your TPOT contains the time to the first token.",
)
latencies_from_a_flight.mistake(
    "token-when-the-step-starts",
    {" + each.seconds": ""},
    says="You time a token when its step starts; it is there when the step is over.",
)
latencies_from_a_flight.mistake(
    "computed-again-counts-again",
    {"== held[name]": ">= prompts[name]"},
    says="Tokens that are computed again after a preemption are not new: compare with what the sequence has by then.",
)
latencies_from_a_flight.mistake(
    "every-batch-behind-the-prompt",
    {"first + tokens == held[name]": "first >= prompts[name] - 1 or first + tokens == prompts[name]"},
    says="After a preemption the answer so far is computed again in pieces; only the last gives a new token.",
)
latencies_from_a_flight.mistake(
    "in-milliseconds",
    {"found[name] = (at": "found[name] = tuple(1e3 * each for each in (at", "max(gaps))": "max(gaps)))"},
    says="Seconds are asked for, not milliseconds.",
)
latencies_from_a_flight.mistake(
    "a-clock-without-pauses",
    {
        "held, times =": "clock = records[0].started\n    held, times =",
        "        for name, first": "        clock += each.seconds\n        for name, first",
        "each.started + each.seconds": "clock",
    },
    says="You add up the seconds of the steps, but between two steps the engine may have nothing to do: use started.",
)
latencies_from_a_flight.alternative(
    "by-the-position-computed", {"first + tokens == held[name]": "first + tokens - prompts[name] == len(times[name])"}
)


# Diagnosis

diagnose_a_flight = KnownAnswers("diagnose-a-flight")

diagnose_a_flight.mistake("all-is-well", expect="you say 'healthy', it is")(lambda records, prompts: "healthy")


@diagnose_a_flight.mistake("preempted-twice-is-a-place-lost", expect="place in the queue lost")
def preempted_twice(records, prompts):
    found = ANSWERS.diagnose(records, prompts)
    times = Counter(name for each in records for name in each.preempted)
    if found in ("healthy", "place in the queue lost"):
        return "place in the queue lost" if max(times.values(), default=0) > 1 else "healthy"
    return found


@diagnose_a_flight.mistake("many-preemptions-are-a-livelock", expect="it is 'livelock'|you say 'livelock'")
def many_preemptions(records, prompts):
    found = ANSWERS.diagnose(records, prompts)
    if sum(len(each.preempted) for each in records) >= 3 and found in ("healthy", "place in the queue lost"):
        return "livelock"
    return found


@diagnose_a_flight.mistake("one-preempted-again-and-again-is-a-livelock", expect="livelock")
def one_preempted_often(records, prompts):
    times = Counter(name for each in records for name in each.preempted)
    found = ANSWERS.diagnose(records, prompts)
    if found in ("healthy", "livelock"):
        return "livelock" if max(times.values(), default=0) > 20 else "healthy"
    return found


diagnose_a_flight.alternative(
    "one-missing-is-a-stall-if-a-block-was-to-be-had", {"decoding and not decoding & {name": "decoding - {name"}
)
diagnose_a_flight.mistake(
    "never-follows-the-tokens",
    {'return "tokens that do not exist"': 'return "healthy"'},
    expect="it is 'tokens that do not exist'",
)
diagnose_a_flight.mistake(
    "no-token-for-long-is-a-livelock",
    {" and (any(each.preempted for each in last) or not any(each.batch for each in last))": ""},
    expect="180 chunks of a long prompt",
)
diagnose_a_flight.mistake(
    "waiting-for-a-block-is-a-stall",
    {" and each.free + each.cached > 0 and not each.ended": ""},
    expect="waits for a block, of which none is left",
)
diagnose_a_flight.mistake(
    "names-compared-as-text", {"int(other) < int(name)": "other < name"}, expect="request 10 came after request 9"
)


@diagnose_a_flight.mistake("whatever-has-not-ended-is-a-livelock", expect="is no fault")
def not_ended(records, prompts):
    found = ANSWERS.diagnose(records, prompts)
    return "livelock" if sum(len(each.ended) for each in records) < len(prompts) else found


@diagnose_a_flight.alternative("one-question-after-the-other")
def questions(records, prompts):
    def each_token():
        held = dict(prompts)
        for record in records:
            for name, first, tokens in record.batch:
                yield record, name, first + tokens - held[name]
                held[name] += first + tokens == held[name]

    if any(over > 0 for _, _, over in each_token()):
        return "tokens that do not exist"
    computed, again = set(), not any(record.batch for record in records[-100:])
    for record in records[-100:]:
        for name, first, tokens in record.batch:
            again |= (name, first) in computed
            computed |= {(name, first + n) for n in range(tokens)}
    if again and len(records) >= 100 and sum(record.sampled for record in records[-100:]) == 0:
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
        room = record.free + record.cached and not record.ended
        if ready and room and ready.isdisjoint(name for name, _, _ in record.batch):
            return "phases never mixed"
        ready = (ready | tokens[record.step]) - set(record.ended)
    return "healthy"
