"""Lab 13's sharing: a copy before a shared block is written, and blocks that stay findable until room is needed."""

import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from numbers import Integral

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Row, row
from course.lab13_paged_attention import formulas as predict
from course.lab13_paged_attention.paging import Contents, counts_of

ANSWERS = answers_of("13_paged_attention")

# Copy on write.


@exercise(
    "copy-on-write",
    changes=("table",),
    minutes=10,
    difficulty=3,
    hints=(
        "Which tables would see it if you wrote into this block? Where does the table say where to write?",
        "If the table ends before the position's block: allocate and append. If the block has other holders: allocate "
        "one, copy the contents, give back your share of the old one, put the new one into your table. Else nothing.",
    ),
)
def check_copy_on_write(learner: Callable) -> list[Row]:
    rows: list[Row] = []
    sizes = random.sample(range(3, 9), 6)
    cases = ((2, 1, 3, 4), (2, 0, 3, 4), (1, -1, 2, 1), (3, 2, 1, 3), (0, 0, 2, 4))  # the last has no prompt
    for size, (full, more, samples, answer) in zip(sizes, cases, strict=False):
        rows += _fork_and_write(learner, full * size + more, samples, answer, size)
    rows += _fork_and_write(learner, 2 * sizes[-1], 3, 2, sizes[-1], reserved=True)
    return rows


def _fork_and_write(
    learner: Callable, prompt: int, samples: int, answer: int, size: int, reserved: bool = False
) -> list[Row]:
    """n samples of one prompt write on in turn; each must read what it wrote.

    reserved: the prompt's table already had its next block, still empty, when it was forked.
    """
    case = f"{samples} samples of {prompt} tokens, blocks of {size}{', the next one reserved' if reserved else ''}"
    pool, contents = ANSWERS.Pool(40), Contents(40, size)
    first: list[int] = []
    for position in range(prompt):
        if position % size == 0:
            first.append(pool.allocate())
        contents.write(first, position, ("prompt", position))
    if reserved:
        first.append(pool.allocate())
    tables = [first]
    for _ in range(samples - 1):
        for block in first:
            pool.share(block)
        tables.append(list(first))
    for position in range(prompt, prompt + answer):
        for sample, table in enumerate(tables):
            learner(table, position, pool, contents.copy, size)
            if len(table) != position // size + 1:
                raise CheckFailed(
                    f"{case}: for position {position} the table is {table}, {len(table)} blocks where "
                    f"{position // size + 1} are needed: change the list that you were given, and look whether the "
                    "block is there already"
                )
            if not all(isinstance(block, Integral) for block in table):
                raise CheckFailed(f"{case}: for position {position} the table is {table}: it holds numbers of blocks")
            if pool.references != [sum(b in other for other in tables) for b in range(40)]:
                raise CheckFailed(
                    f"{case}: after position {position} of sample {sample} the counts of holders and the tables "
                    f"{tables} disagree: give back your share of the block you copied from"
                )
            block = table[position // size]
            if pool.references[block] != 1:
                raise CheckFailed(
                    f"{case}: sample {sample} is about to write into block {block}, which {pool.references[block]} "
                    "tables hold: the others would find its token among theirs"
                )
            contents.write(table, position, (sample, position))
    for sample, table in enumerate(tables):
        right = [("prompt", p) for p in range(prompt)] + [(sample, p) for p in range(prompt, prompt + answer)]
        if (found := contents.read(table, prompt + answer)) != right:
            at = next(i for i, pair in enumerate(zip(found, right, strict=True)) if pair[0] != pair[1])
            raise CheckFailed(
                f"{case}: at position {at} sample {sample} reads {found[at]} instead of {right[at]}: a new block is "
                "empty, copy what the old one holds: copy(old, new)"
            )
    copies = samples - 1 if reserved else predict.fork_copies(prompt, samples, size)
    held = predict.fork_blocks(prompt, answer, samples, size)
    used = sum(count > 0 for count in pool.references)
    rows = [
        row(f"{case}: copies", copies, len(contents.copies)),
        row("    blocks held", held, used),
    ]
    if len(contents.copies) > copies:
        raise CheckFailed(
            f"{case}: right, but {len(contents.copies)} blocks were copied where {copies} are enough: a block that "
            "only this table holds is written in place, and full blocks of the prompt are never written",
            rows,
        )
    for table in tables:
        for block in table:
            pool.release(block)
    return rows


# Eviction.


@exercise(
    "lru-eviction",
    minutes=15,
    difficulty=3,
    hints=(
        "Three kinds of blocks: held, idle (no table holds it, its key is still known), free. Which moves are there?",
        "release: at 0 holders a block with a key joins `idle`, one without goes to `free`. share takes it out of "
        "`idle`. allocate prefers `free`; else the oldest of `idle`, whose key must be forgotten in both dictionaries. "
        "A prefix is found from its first block on, so its last one must go first: release in reversed order.",
    ),
)
def check_eviction(learner: Callable) -> list[Row]:
    first = _judge_chain_order(learner)
    _judge_twins(learner)
    evicted = sum(_judge_random_cache(learner) for _ in range(20))
    return [
        row("two prefixes of 3 blocks, 'old' used last: evicted first", "new 2", first),
        row("random traffic: evictions, each the one that was due", None, evicted),
    ]


def _judge_chain_order(learner: Callable) -> str:
    """Two prefixes of three blocks in six; a hit on all of "old"; then one block is asked for at a time."""
    pool = learner(6)
    chains = {name: [pool.allocate() for _ in range(3)] for name in ("old", "new")}
    for name, blocks in chains.items():
        for index, block in enumerate(blocks):
            pool.cache_block(block, (name, index))
    for name in ("old", "new"):
        pool.release(list(chains[name]))
    if any(counts := counts_of(pool, 6)):
        raise CheckFailed(f"two sequences that shared nothing have left, and references is {counts}: one less for each")
    if len(pool.idle) != 6:
        raise CheckFailed(
            f"two sequences with 6 cached blocks have left, and idle holds {len(pool.idle)} of them: keep what can "
            "still be found"
        )
    for block in chains["old"]:  # a hit: it is the recently used one now
        pool.share(block)
    if len(pool.idle) != 3:
        raise CheckFailed(f"a hit on 3 idle blocks leaves {len(pool.idle)} of 6 idle: what is held cannot be evicted")
    pool.release(list(chains["old"]))
    order = [(name, index) for name in ("new", "old") for index in (2, 1, 0)]
    taken = []
    for key in order:
        taken.append(pool.allocate())
        gone = [k for k in order if k not in pool.block_of and k not in order[: len(taken) - 1]]
        if gone == [key]:
            continue
        if not gone:
            raise CheckFailed(
                f"block {taken[-1]} was given away and its key can still be found: forget it in block_of and key_of"
            )
        if gone[0] == (key[0], 0):
            raise CheckFailed(
                f"prefix '{gone[0][0]}' lost its first block before its last: a prefix is found from its beginning on, "
                "so the blocks left over are dead weight. Release the last block first"
            )
        raise CheckFailed(f"evicted was {gone}, but {key} was unused for longest")
    return f"{order[0][0]} {order[0][1]}"


def _judge_twins(learner: Callable) -> None:
    """Two blocks with the same tokens, computed in one step: the second has no key, so it is free once it is let go."""
    pool = learner(2)
    twins = [pool.allocate(), pool.allocate()]
    for block in twins:
        pool.cache_block(block, "same")
    for block in twins:
        pool.release([block])
    if dict(pool.block_of) != {"same": twins[0]} or dict(pool.key_of) != {twins[0]: "same"}:
        raise CheckFailed(
            f"blocks {twins} were cached under one key, as two equal prompts in one step are: key_of is "
            f"{dict(pool.key_of)} and block_of {dict(pool.block_of)}. The first stays the one to find; a second entry "
            "would forget the first one's key when it is evicted"
        )
    if list(pool.idle) != twins[:1] or {pool.allocate(), pool.allocate()} != set(twins):
        raise CheckFailed(
            f"of blocks {twins}, cached under one key, only {twins[0]} can be found: {twins[1]} is free once its "
            "sequence has left"
        )


def _judge_random_cache(learner: Callable) -> int:
    """Random sequences against a model; returns evictions. A sequence begins with blocks of an earlier one if they are
    still found, then come its own: cached ones, and at the end some that are not."""
    total = random.randint(6, 10)
    pool, paper, tables, cached, evicted = learner(total), Counter(), [], OrderedDict(), 0
    found_by: dict[int, int] = {}  # block -> key of all that can be found
    histories: list[list[int]] = [[]]  # the keys of each sequence so far, in its order
    for _ in range(60):
        if tables and random.random() < 0.45:
            blocks = tables.pop(random.randrange(len(tables)))
            pool.release(list(blocks))
            for block in reversed(blocks):
                paper[block] -= 1
                if not paper[block] and block in found_by:
                    cached[block] = None
            _judge_state(pool, paper, cached, found_by, total, f"a sequence let go of {blocks}")
            continue
        table, keys = [], []
        for key in random.choice(histories):
            if key in keys or key not in found_by.values():
                break
            table.append(pool.block_of[key])
            keys.append(key)
            pool.share(table[-1])
            cached.pop(table[-1], None)
            paper[table[-1]] += 1
            _judge_state(pool, paper, cached, found_by, total, f"a hit on block {table[-1]}")
        own = min(random.randint(1, 4), total - len(+paper))
        unfilled = random.randint(0, 2)
        for index in range(own):
            block = pool.allocate()
            if paper[block]:
                raise CheckFailed(f"allocate gave away block {block}, which {paper[block]} tables hold")
            if block in cached:
                unused = total - len(+paper) - len(cached)
                if unused:
                    raise CheckFailed(f"cached block {block} was evicted although {unused} blocks are free")
                if block != (oldest := next(iter(cached))):
                    raise CheckFailed(f"block {block} was evicted, but {oldest} was unused for longest")
                del cached[block], found_by[block]
                evicted += 1
            paper[block] += 1
            table.append(block)
            _judge_keys(pool, found_by, f"after block {block} was given out")
            if index < own - unfilled:
                twin = random.choice([0, *found_by.values()]) if random.random() < 0.2 else 0
                keys.append(twin if twin and twin not in keys else random.getrandbits(60))
                pool.cache_block(block, keys[-1])
                if keys[-1] not in found_by.values():
                    found_by[block] = keys[-1]
        tables.append(table)
        histories.append(keys)
    return evicted


def _judge_state(pool, paper: Counter, cached: OrderedDict, found_by: dict[int, int], total: int, what: str) -> None:
    """CheckFailed unless the pool is as the model says."""
    _judge_keys(pool, found_by, "after a hit or a release")
    if (counts := counts_of(pool, total)) != [paper[b] for b in range(total)]:
        raise CheckFailed(f"{what}: references is {counts}, not {[paper[b] for b in range(total)]}")
    if list(pool.idle) != list(cached):
        raise CheckFailed(f"{what}: idle is {list(pool.idle)}, not {list(cached)} (longest unused first)")
    if len(pool.free) + len(pool.idle) + len(+paper) != total:
        raise CheckFailed(
            f"{what}: {len(pool.free)} free + {len(pool.idle)} idle + {len(+paper)} held are not {total}: a block is "
            "counted twice, or lost"
        )


def _judge_keys(pool, found_by: dict[int, int], when: str) -> None:
    """CheckFailed unless both dictionaries name exactly the blocks that can be found."""
    if stale := set(pool.key_of) - set(found_by):
        block = stale.pop()
        raise CheckFailed(
            f"{when} key_of still holds the key of block {block}, which was evicted. Its next holder did not cache "
            "it, but on release it would count as cached, and evicting it would forget another block's key"
        )
    if dict(pool.key_of) != found_by or dict(pool.block_of) != {key: block for block, key in found_by.items()}:
        raise CheckFailed(f"{when} key_of is {dict(pool.key_of)} and block_of {dict(pool.block_of)}, not {found_by}")
