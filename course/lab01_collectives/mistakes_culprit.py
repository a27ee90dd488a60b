"""Spoilers of lab 01, the culprit: the wrong rank blamed for a hang."""

from course.kit.exercises import KnownAnswers

find_the_culprit = KnownAnswers("find-the-culprit")


@find_the_culprit.mistake("most-waited-for", expect="waits itself.*go on from there")
def blames_the_popular_one(waits_for):
    waited = [rank for others in waits_for.values() for rank in others]
    return max(set(waited), key=waited.count)


find_the_culprit.mistake("first-idle-rank", {" and rank in awaited": ""}, expect="has finished and nobody waits for it")
find_the_culprit.mistake("never-none", {"return None": "return min(waits_for)"}, expect="do so in a circle")


@find_the_culprit.mistake("last-in-the-list-only", expect="the same, the other way round.*not None")
def follows_the_last(waits_for):
    rank, seen = next(rank for rank in waits_for if waits_for[rank]), set()
    while waits_for[rank] and rank not in seen:
        seen.add(rank)
        rank = waits_for[rank][-1]
    return None if waits_for[rank] else rank


@find_the_culprit.mistake("from-one-waiting-rank-only", expect="a circle, and above it .*, not None")
def follows_from_the_first(waits_for):
    todo, seen = [next(rank for rank in waits_for if waits_for[rank])], set()
    while todo:
        rank = todo.pop()
        if not waits_for[rank]:
            return rank
        if rank not in seen:
            seen.add(rank)
            todo += waits_for[rank]
    return None


@find_the_culprit.mistake("only-direct", expect="not None|go on from there")
def asks_only_for_unanimity(waits_for):
    for rank in waits_for:
        if all(rank in others for other, others in waits_for.items() if other != rank):
            return rank
    return None


@find_the_culprit.mistake("keys-are-waiters", expect="is waited for and waits for nobody: that is the one, not None")
def takes_every_key_for_a_waiter(waits_for):
    return next(iter({rank for others in waits_for.values() for rank in others} - set(waits_for)), None)


find_the_culprit.mistake(
    "first-in-the-list-only",
    {"for rank in others}": "for rank in others[:1]}"},
    expect="for nobody: that is the one, not None|finished and nobody",
)
find_the_culprit.mistake(
    "an-idle-rank-otherwise",
    {"return None": "return next((rank for rank, others in waits_for.items() if not others), None)"},
    expect="in a circle, and a rank that has finished, .* do so in a circle",
)
find_the_culprit.mistake("a-list", {"return rank": "return [rank]"}, expect="which is none of the ranks")


@find_the_culprit.alternative("follows-all")
def walks(waits_for):
    todo, seen = [rank for others in waits_for.values() for rank in others], set()
    while todo:
        rank = todo.pop()
        if not waits_for[rank]:
            return rank
        if rank not in seen:
            seen.add(rank)
            todo += waits_for[rank]
    return None


@find_the_culprit.alternative("most-waited-for-of-the-idle")
def counts_the_waiting(waits_for):
    waited = [rank for others in waits_for.values() for rank in others if not waits_for[rank]]
    return max(set(waited), key=waited.count, default=None)
