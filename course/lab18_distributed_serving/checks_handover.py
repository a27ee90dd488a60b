"""Lab 18, hand-overs: the side that decodes sets blocks aside first, and knows a message of an attempt that is over."""

import random
from dataclasses import dataclass
from typing import Any

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row


@exercise(
    "hand-over",
    minutes=25,
    difficulty=3,
    hints=(
        "Two requests that each hold half of the blocks they need wait for each other for ever. And of a block that is "
        "free, or another request's, a message that comes late knows nothing.",
        "allocate: free what an older attempt holds; if count blocks are free, take all of them, else none. Keep for "
        "each request its attempt, its blocks and the indices still missing. arrive: only for that very attempt, and "
        "only for an index that is missing, write; True when none is missing any more.",
    ),
)
def check_hand_over(learner: Any) -> Receipt:
    if not isinstance(learner, type):
        raise CheckFailed("the exercise asks for the class DecodeSide")
    _both_want_three_of_four(learner)
    _a_late_message(learner)
    _a_list_of_the_callers(learner)
    _an_older_attempt(learner)
    _a_message_twice(learner)
    _given_up_too_late(learner)
    rows = []
    for num_blocks, requests in ((6, 3), (9, 5), (random.randint(10, 20), 8)):
        seen = _play(learner, num_blocks, requests)
        rows.append(row(f"{num_blocks} blocks: blocks that messages of older attempts changed", 0, seen.changed))
        rows.append(row("    requests that were handed over whole", seen.whole, seen.said_whole))
        rows.append(row("    blocks free in the end", num_blocks, seen.free))
    return receipt("blocks of the side that decodes", rows)


def _both_want_three_of_four(learner: type) -> None:
    side = learner(4)
    first, second = side.allocate("a", 1, 3), side.allocate("b", 1, 3)
    if not isinstance(first, list) or len(set(first)) != 3:
        raise CheckFailed(
            f"4 blocks are free and a asks for 3: it got {first!r:.60}, not a list of three", evidence=first
        )
    if second is not None or len(side.free) != 1:
        raise CheckFailed(
            f"1 block is free and b asks for 3: it got {second!r:.60}, and {len(side.free)} are free then. It gets "
            "nothing, None: blocks that wait for others are missing elsewhere, and two such requests wait for ever",
            evidence=(second, len(side.free)),
        )


def _a_late_message(learner: type) -> None:
    """a's first attempt is given up; its block goes to b, and then a's message comes."""
    side = learner(1)
    side.allocate("a", 1, 1)
    side.give_up("a")
    if len(side.free) != 1:
        raise CheckFailed(f"a was given up, and {len(side.free)} of 1 blocks is free", evidence=len(side.free))
    block = _one_block(side, "b", 1)
    answered = side.arrive("b", 1, 0, "b's")
    if side.cache.get(block) != "b's":
        raise CheckFailed(f"b's only block, {block}, arrived, and the cache holds {side.cache!r:.60}")
    if not answered:
        raise CheckFailed(f"b's only block arrived, so b is whole: you answer {answered!r:.20}", evidence=answered)
    answered = side.arrive("a", 1, 0, "a's")
    if side.cache.get(block) != "b's":
        raise CheckFailed(
            "a was given up and its block is b's: then a's message came late, and b decodes on a's keys and values",
            evidence=dict(side.cache),
        )
    if answered:
        raise CheckFailed("a was given up, and a late message made it whole", evidence=answered)


def _a_list_of_the_callers(learner: type) -> None:
    side = learner(2)
    side.allocate("a", 1, 2).clear()
    side.give_up("a")
    if len(side.free) != 2:
        raise CheckFailed(
            f"a was given up, and {len(side.free)} of 2 blocks are free: its caller had emptied the list that allocate "
            "returned. Return a list of its own",
            evidence=len(side.free),
        )


def _an_older_attempt(learner: type) -> None:
    """Its message comes when the next attempt waits; and the next one asks for more than there are."""
    side = learner(4)
    side.allocate("a", 1, 1)
    (block,) = side.allocate("a", 2, 1) or (None,)
    answered = side.arrive("a", 1, 0, "of attempt 1")
    if answered or "of attempt 1" in side.cache.values():
        raise CheckFailed(
            f"a's second attempt waits for its block, and a message of the first comes: you answer {answered!r:.20}, "
            f"and its block {block} holds {side.cache.get(block)!r:.40}. It changes nothing",
            evidence=dict(side.cache),
        )
    side = learner(4)
    side.allocate("a", 1, 2)
    got = side.allocate("a", 2, 5)
    if got is not None or len(side.free) != 4:
        raise CheckFailed(
            f"a's first attempt holds 2 of 4 blocks, and its second asks for 5: it got {got!r:.60}, and "
            f"{len(side.free)} are free then. It gets None and holds nothing, and what the first one held is free",
            evidence=(got, list(side.free)),
        )


def _a_message_twice(learner: type) -> None:
    """a is whole and decodes into its last block when its message comes again; b's content is what a's was."""
    side = learner(1)
    block = _one_block(side, "a", 1)
    side.arrive("a", 1, 0, "the prompt")
    side.cache[block] = "the prompt and two tokens"
    answered = side.arrive("a", 1, 0, "the prompt")
    if answered or side.cache.get(block) != "the prompt and two tokens":
        raise CheckFailed(
            "a is whole and has decoded two tokens into its block, and the block's message comes a second time: you "
            f"answer {answered!r:.20}, and the block holds {side.cache.get(block)!r:.40}. It changes nothing",
            evidence=dict(side.cache),
        )
    side.cache[block] = "the prompt"
    side.release("a")
    _one_block(side, "b", 1)
    answered = side.arrive("b", 1, 0, "the prompt")
    if not answered:
        raise CheckFailed(
            "a has ended, and b, with an equal prompt, got its block: b's only message arrived, and you answer "
            f"{answered!r:.20}. That a block holds the same already does not say that b's message has come",
            evidence=answered,
        )


def _one_block(side: Any, name: str, free: int) -> int:
    found = side.allocate(name, 1, 1)
    if not isinstance(found, list) or len(found) != 1:
        raise CheckFailed(f"{free} of its blocks free, {name} asks for 1: it got {found!r:.60}", evidence=found)
    return found[0]


def _given_up_too_late(learner: type) -> None:
    """A request is whole when the time to give it up comes; another was never heard of."""
    side = learner(2)
    block = _one_block(side, "a", 2)
    side.arrive("a", 1, 0, "a's")
    for name, what in (("a", "a is whole and decodes"), ("b", "nobody asked for blocks for b")):
        side.give_up(name)
        if block in side.free or len(side.free) != 1:
            raise CheckFailed(
                f"{what}, and give_up({name!r}) comes: then {len(side.free)} of 2 blocks are free, where a holds one. "
                "It frees what a request that is not whole holds, and nothing else",
                evidence=(name, list(side.free)),
            )


@dataclass
class _Seen:
    """whole: requests that all blocks came for; said_whole: those that arrive said so of; changed: entries of the cache
    that messages of older attempts changed; free: blocks in the end."""

    whole: int = 0
    said_whole: int = 0
    changed: int = 0
    free: int = 0


def _play(learner: type, num_blocks: int, requests: int) -> _Seen:
    """Drawn calls beside a model of what they should do."""
    side, beside = learner(num_blocks), learner(num_blocks + 1)
    beside.allocate("r0", 1, 2)
    beside.arrive("r0", 1, 0, "of another object")
    if "of another object" in side.cache.values():
        raise CheckFailed("what arrived in one DecodeSide is in the cache of another")
    attempt = {f"r{number}": 0 for number in range(requests)}
    held: dict[str, list[int]] = {}  # by request, allocated or whole
    missing: dict[str, set[int]] = {}
    sent: list[tuple[str, int, int]] = []  # messages on their way, some of older attempts
    content: dict[str, dict[int, str]] = {}  # what arrived for each request's newest attempt, by block
    seen = _Seen()
    for _ in range(60 * requests):
        name = random.choice(list(attempt))
        act = random.choices(("allocate", "arrive", "give up", "release"), (4, 10, 1, 2))[0]
        if act == "allocate" and (name not in held or name in missing):
            attempt[name] += 1
            count = random.randint(1, max(2, num_blocks // 2))
            free = num_blocks - sum(map(len, held.values())) + len(held.get(name, ()))
            others = {block for other, blocks in held.items() if other != name for block in blocks}
            blocks = side.allocate(name, attempt[name], count)
            held.pop(name, None), missing.pop(name, None)
            if count > free:
                if blocks is not None:
                    raise CheckFailed(
                        f"{free} blocks are free and {name} asks for {count}: it got {blocks!r:.60}, not None",
                        evidence=blocks,
                    )
            else:
                _judge_blocks(name, attempt[name], blocks, count, others, num_blocks)
                held[name], missing[name], content[name] = list(blocks), set(range(count)), {}
                sent += [(name, attempt[name], index) for index in random.sample(range(count), count)]
                sent += [(name, attempt[name], 0)] * (random.random() < 0.3)  # a message that comes twice
        elif act == "arrive" and sent:
            name, number, index = sent.pop(random.randrange(len(sent)))
            wanted = name in missing and number == attempt[name] and index in missing[name]
            told, before = f"{name}, attempt {number}, block {index}", dict(side.cache)
            done = side.arrive(name, number, index, told)
            if wanted:
                missing[name].discard(index)
                content[name][held[name][index]] = told
            if number != attempt[name]:
                seen.changed += len(dict(side.cache).items() ^ before.items())
            complete = wanted and not missing[name]
            seen.whole, seen.said_whole = seen.whole + complete, seen.said_whole + bool(done)
            if complete:
                del missing[name]
            if bool(done) != complete:
                raise CheckFailed(
                    f"{told} arrived{'' if wanted else ', which is no longer waited for'}: you answer {done!r:.20}, "
                    f"and the request {'is' if complete else 'is not'} whole with it",
                    evidence=(told, done),
                )
        elif act == "give up" and name in missing:
            side.give_up(name)
            del held[name], missing[name]
        elif act == "release" and name in held and name not in missing:
            side.release(name)
            del held[name]
        _judge_state(side, num_blocks, held, content)
    beside.give_up("r0")
    if len(beside.free) != num_blocks + 1:
        raise CheckFailed(
            f"another DecodeSide gave its only request up: {len(beside.free)} of {num_blocks + 1} are free"
        )
    for name in list(held):
        (side.give_up if name in missing else side.release)(name)
    if sorted(side.free) != list(range(num_blocks)):
        raise CheckFailed(
            f"all requests are gone, and {len(set(side.free))} of {num_blocks} blocks are free",
            evidence=sorted(side.free),
        )
    seen.free = len(side.free)
    return seen


def _judge_blocks(name: str, attempt: int, blocks: Any, count: int, others: set[int], num_blocks: int) -> None:
    who = f"attempt {attempt} of {name} asks for {count} blocks, and as many are free"
    if attempt > 1:
        who += ", those of its older attempt among them"
    if not isinstance(blocks, list) or len(set(blocks)) != count:
        raise CheckFailed(f"{who}: it got {blocks!r:.60}, not a list of {count}", evidence=blocks)
    if foreign := [block for block in blocks if block in others or not 0 <= block < num_blocks]:
        raise CheckFailed(f"{who}: it got block {foreign[0]}, which is not free", evidence=blocks)


def _judge_state(side: Any, num_blocks: int, held: dict[str, list[int]], content: dict) -> None:
    used = sorted(block for blocks in held.values() for block in blocks)
    free = sorted(set(range(num_blocks)) - set(used))
    if sorted(side.free) != free:
        raise CheckFailed(
            f"blocks {used} are held, so {free} are free; side.free says {sorted(side.free)}",
            evidence=sorted(side.free),
        )
    for name, blocks in held.items():
        for index, block in enumerate(blocks):
            told = content[name].get(block)
            if told and side.cache.get(block) != told:
                raise CheckFailed(
                    f"block {block} is number {index} of {name} and holds {side.cache.get(block)!r:.60}, where "
                    f"{told!r} arrived last for this request",
                    evidence=side.cache.get(block),
                )
