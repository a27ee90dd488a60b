"""Lab 13, paged attention: where a token's keys lie, and how many tables hold a block.

Attention over blocks: `checks_attention.py`. Keys and hits: `checks_prefix.py`. Copies on write and eviction:
`checks_sharing.py`.
"""

import random
from collections import Counter
from collections.abc import Callable
from operator import index

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab13_paged_attention import formulas as predict
from course.lab13_paged_attention.paging import counts_of, steps_of

ANSWERS = answers_of("13_paged_attention")

# Slots.


@exercise(
    "slot-mapping",
    minutes=5,
    difficulty=1,
    hints=(
        "Position 13 with blocks of 4: in which logical block is it, and at which place of it?",
        "Logical block p // block_size lies in physical block table[p // block_size]; a block has block_size slots.",
    ),
)
def check_slot_mapping(learner: Callable) -> Receipt:
    small, large = random.choice((3, 4)), random.choice((5, 6, 7))
    first, second = _mapped(learner, small), _mapped(learner, large)
    return receipt(first.title, [*first.rows, *second.rows])


def _mapped(learner: Callable, block_size: int) -> Receipt:
    lengths = [3 * block_size + 1, *(random.randint(block_size + 1, 4 * block_size) for _ in range(2))]
    ids = random.sample(range(1, 40), sum(predict.blocks_for(n, block_size) for n in lengths))
    memory: dict[int, tuple[int, int]] = {}
    tables = []
    for sequence, length in enumerate(lengths):
        table = [ids.pop() for _ in range(predict.blocks_for(length, block_size))]
        tables.append(table)
        pieces = _pieces(length, block_size, last=sequence == 0)  # as a prompt comes
        slots = [learner(list(table), start, count, block_size) for start, count in pieces]
        slots = _judged_slots(slots, table, pieces, block_size)
        for position, slot in enumerate(slot for piece in slots for slot in piece):
            if slot in memory:
                raise CheckFailed(f"slot {slot} was given to two tokens: {memory[slot]} and {sequence, position}")
            memory[slot] = (sequence, position)
    read = [
        [memory[table[p // block_size] * block_size + p % block_size] for p in range(n)]
        for table, n in zip(tables, lengths, strict=True)
    ]
    touched = {slot // block_size for slot in memory}
    blocks = sum(predict.blocks_for(n, block_size) for n in lengths)
    return receipt(
        f"sequences of {', '.join(map(str, lengths))} tokens, {block_size} slots a block",
        [
            row("tokens written, each in a slot of its own", sum(lengths), len(memory)),
            row("read back through the tables: all in order", True, all(x == sorted(x) for x in read)),
            row("blocks touched: Σ ceil(tokens / block_size)", blocks, len(touched)),
            row("slots of them unused", blocks * block_size - sum(lengths), len(touched) * block_size - len(memory)),
        ],
    )


def _pieces(length: int, block_size: int, last: bool) -> list[tuple[int, int]]:
    """(start, count) of pieces of up to a block's length that make up a sequence. last: the second is all the rest."""
    pieces, start = [], 0
    while start < length:
        most = length if last and pieces else random.randint(1, block_size)
        pieces.append((start, min(most, length - start)))
        start += pieces[-1][1]
    return pieces


def _judged_slots(slots: list, table: list[int], pieces: list[tuple[int, int]], block_size: int) -> list[list[int]]:
    """The slots as lists: an array or a generator will do. CheckFailed if one is wrong."""
    try:
        slots = [[index(slot) for slot in found] for found in slots]
    except TypeError:
        said = f"you returned {slots[0]!r}; the exercise asks for a list of slots, one whole number per token"
        raise CheckFailed(said) from None
    for found, (start, count) in zip(slots, pieces, strict=True):
        expected = ANSWERS.slot_mapping(table, start, count, block_size)
        if found != expected:
            case = f"table {table}, {block_size} slots a block, positions {start} to {start + count - 1}"
            raise CheckFailed(f"{case}: you returned {found}, but the slots are {expected}", evidence=slots)
    return slots


# The pool.


@exercise(
    "block-pool",
    minutes=15,
    difficulty=2,
    hints=(
        "A list of free blocks is a stack: take from its end, put back at its end. When may a block go back?",
        "references[block] is 1 after allocate, one more after share, one less after release; at 0, and only then, the "
        "block is appended to the free list. Searching `references` for a 0 would cost more in a larger pool.",
    ),
)
def check_pool(learner: Callable) -> Receipt:
    _judge_refusals(learner)
    most, operations, lost = _play(learner, num_blocks=random.randint(5, 9), turns=300)
    rows = [
        row("operations, each compared with a count on paper", None, operations),
        row("    most holders of one block", None, most),
        row("blocks that were lost or given out twice", 0, lost),
    ]
    for state, free in (("nearly all held", 2), ("all free", None)):
        small, large = (_steps(learner, size, free) for size in (64, 4096))
        if large > 2 * small:
            raise CheckFailed(
                f"right, but it searches: with {state}, 20 allocations and releases take {small:,} steps in a pool of "
                f"64 blocks and {large:,} in one of 4,096 (lines run, entries walked over). Keep the free blocks "
                "in a list, take from its end and put back there: `in`, pop(0), insert, slices, copies walk over all",
                rows,
            )
        rows.append(row(f"steps of 20 allocations and releases, 64 blocks, {state}", None, small))
        rows.append(row("    4,096 blocks: at most twice as many", True, large <= 2 * small))
    return receipt("your pool", rows)


def _judge_refusals(learner: Callable) -> None:
    pool, other = learner(3), learner(7)
    blocks = [pool.allocate() for _ in range(3)]
    if sorted(blocks) != [0, 1, 2]:
        raise CheckFailed(f"three allocations from 3 blocks gave {blocks}: each of 0, 1, 2 once, please")
    if (counts := counts_of(pool, 3)) != [1, 1, 1]:
        raise CheckFailed(f"after three allocations references[b] is {counts} for b = 0, 1, 2: each has one holder")
    _expect(RuntimeError, pool.allocate, "allocate from a pool with no free block")
    pool.release(blocks[0])
    _expect(ValueError, lambda: pool.release(blocks[0]), "release a block twice: two tables would get it")
    if (counts := counts_of(pool, 3)) != [int(block != blocks[0]) for block in range(3)]:
        raise CheckFailed(f"after a refused release references[b] is {counts}: a refusal changes nothing")
    _expect(ValueError, lambda: pool.share(blocks[0]), "share a free block: it holds no sequence's keys")
    others = sorted(other.allocate() for _ in range(7))
    if others != list(range(7)) or counts_of(pool, 3) != [int(block != blocks[0]) for block in range(3)]:
        raise CheckFailed(
            f"a second pool, of 7 blocks, gave out {others}, and references of the first are {counts_of(pool, 3)}: "
            "each pool needs a list of its own (self.references, self.free), made in __init__"
        )


def _expect(error: type[Exception], call: Callable, what: str) -> None:
    try:
        call()
    except error:
        return
    except Exception as other:
        raise CheckFailed(f"to {what}: raise a {error.__name__}; yours raised {type(other).__name__}") from None
    raise CheckFailed(f"to {what}: nothing was raised; it must be a {error.__name__}")


def _play(learner: Callable, num_blocks: int, turns: int) -> tuple[int, int, int]:
    """Random tables against a count on paper; (most holders seen, operations, blocks lost at the end)."""
    pool, held, most, operations = learner(num_blocks), [], 0, 0
    for _ in range(turns):
        paper = Counter(held)
        move = random.choice(("allocate", "share", "release", "release"))
        if move == "allocate" and len(paper) < num_blocks:
            block = pool.allocate()
            if block in paper:
                raise CheckFailed(
                    f"allocate returned block {block}, which {paper[block]} tables still hold: a block is free only "
                    "when its last holder has released it"
                )
            held.append(block)
        elif move == "share" and held:
            block = random.choice(held)
            pool.share(block)
            held.append(block)
        elif move == "release" and held:
            block = held.pop(random.randrange(len(held)))
            pool.release(block)
        else:
            continue
        operations += 1
        paper = Counter(held)
        expected = [paper[b] for b in range(num_blocks)]
        if (counts := counts_of(pool, num_blocks)) != expected:
            raise CheckFailed(f"after {move} of block {block} references[b] is {counts} by block, not {expected}")
        most = max(most, *expected)
    for _ in range(num_blocks - len(set(held))):
        held.append(pool.allocate())
    return most, operations, num_blocks - len(set(held))


def _steps(learner: Callable, size: int, free: int | None) -> int:
    """Steps of 20 allocations and releases in a pool of which all but `free` blocks are held; None: nothing is."""
    pool = learner(size)
    if free is not None:
        for block in sorted(pool.allocate() for _ in range(size))[-free:]:
            pool.release(block)

    def turn() -> None:
        for _ in range(20):
            pool.release(pool.allocate())

    return steps_of(pool, turn)
