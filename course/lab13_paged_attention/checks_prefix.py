"""Lab 13's prefixes: a key for every full block, and a hit that is compared."""

import math
import random
from collections.abc import Callable, Iterator
from itertools import product
from numbers import Integral
from typing import Any, NamedTuple

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab13_paged_attention import formulas as predict
from course.lab13_paged_attention.paging import Read, written_in
from course.shared.diagnose import expect_list

ANSWERS = answers_of("13_paged_attention")


SEPARATORS = ("", "|", ":", ",", "/", "-", "_", ";", " ", "#", ".", "+", "=", "\0", "\n")  # put between two names
BASES = {1, 2, 3, 31, 33, 37, 53, 131, 257}  # of a polynomial of the ids
LABELS = ("", "{name}", "{name}=", "{name}:", "{letter}", "{letter}=", "{letter}:", "+", "0", "1")  # before the second


class Entry(NamedTuple):
    """What a cache keeps with a key: the block, the tokens in it, the block before it (None: it is a first one)."""

    block: int
    tokens: tuple[int, ...]
    parent: int | None


# Keys.


@exercise(
    "block-keys",
    minutes=15,
    difficulty=3,
    hints=(
        "The keys and values of a token depend on everything before it, on its position, and on the weights. So what "
        "must a block's key depend on, besides its own tokens?",
        "Chain: key of a block = hash(key of the block before, all its token ids in full). The chain begins with "
        "something made of adapter and salt, kept apart. A block that is not full has no key.",
    ),
)
def check_block_keys(learner: Callable) -> Receipt:
    size, pairs = 4, 0
    for a, b, common, why in _pairs(size, *written_in(learner)):
        keys = [learner(list(tokens), size, **options) for tokens, options in (a, b)]
        for found, (tokens, _) in zip(keys, (a, b), strict=True):
            _judge_count(found, len(tokens), size)
        same = [x == y for x, y in zip(*keys, strict=False)]
        wanted = [index < common for index in range(len(same))]
        if same != wanted:
            at = next(i for i, pair in enumerate(zip(same, wanted, strict=True)) if pair[0] != pair[1])
            raise CheckFailed(f"block {at} of {_say(a)} and of {_say(b)} {_wrong(same[at])}: {why}")
        pairs += 1
    block = [random.randrange(32_000) for _ in range(size)]
    if (known := len({learner([*divmod(first, 50), 7, 7, *block], size)[1] for first in range(2500)})) < 2500:
        raise CheckFailed(
            f"after 2,500 different first blocks the same second block has {known:,} different keys: all of the key of "
            "the block before goes into the hash"
        )
    size = random.choice((3, 5, 6, 7, 9))
    tokens = Read([random.randrange(32_000) for _ in range(256 * size)])
    bits = _bits(learner(tokens, size))
    if bits < 62:  # a hash of Python has 63 and a sign
        chance = predict.collision_chance(10**9, bits)
        raise CheckFailed(
            f"right here, but these keys have {bits:.0f} bits: among a billion blocks two have the same key with a "
            f"chance of {chance:.0%}. Use a hash of 64 bits at least; 256, as of sha256, cannot be attacked either"
        )
    if (reads := max(tokens.reads, tokens.written)) > 2 * len(tokens):
        raise CheckFailed(
            f"right, but for {len(tokens)} tokens it reads {reads:,}: all before again for every block. "
            "The key of the block before already stands for all of it"
        )
    longer = [7] * (len(tokens) + size - 1)
    return receipt(
        "your keys",
        [
            row("pairs of token rows told apart, or not, as they should be", None, pairs),
            row(f"keys of {len(longer)} tokens: full blocks only", 256, len(learner(longer, size))),
            row(f"tokens read for {len(tokens)} tokens: each once", len(tokens), reads, tolerance=1.0),
        ],
    )


def _pairs(size: int, texts: set[str], numbers: set[int]):
    """((tokens, options), (tokens, options), blocks that share a key, the lesson). texts, numbers: those in the answer,
    which it may put between two names, and multiply ids by."""
    draw = lambda n, low=300, high=32_000: [random.randrange(low, high) for _ in range(n)]  # noqa: E731
    a, b, c = draw(size), draw(size), draw(size)
    yield (a + b + c, {}), (a + b + c, {}), 3, "the same tokens must give the same key"
    yield (a + b, {}), (a + b + c[:2], {}), 2, "what comes later changes nothing before it"
    yield (
        (a + b, {}),
        (c + b, {}),
        0,
        ("the same tokens after another beginning have other keys and values: chain in the key of the block before"),
    )
    yield (a + b + c, {}), (b + a + c, {}), 0, "the order of the blocks before counts: chain them"
    yield (a + a, {}), (a + b, {}), 1, "only the first blocks are equal"
    for place in range(size):
        other = [t + (index == place) for index, t in enumerate(a)]
        yield (a + b, {}), (other + b, {}), 0, f"token {place} of the block differs: hash every token of it"
    other = [t ^ 0x100 for t in a]
    yield (a, {}), (other, {}), 0, f"token {a[0]} is not token {other[0]}, though their last byte is: hash whole ids"
    ordered = sorted(set(a)) if len(set(a)) == size else list(range(size))
    yield (ordered, {}), (ordered[::-1], {}), 0, "the order of the tokens in a block counts"
    other = [t + (1 << 16) for t in a]
    yield (a, {}), (other, {}), 0, f"token {a[0]} is not token {other[0]}: hash whole ids, not their last two bytes"
    for base, (digits, cut) in product((10, 16), (("123", 1), ("123415678", 4), ("12345167890", 5))):
        one, other = ([int(digits[:at], base), int(digits[at:], base), 5, 6] for at in (cut, cut + 1))
        yield (one, {}), (other, {}), 0, "digits run together: separate the ids, or give each its own bytes"
    for base in sorted(BASES.union(n for n in numbers if 0 < n < 2**20)):
        for one, other in (([a[0], a[1] + base], [a[0] + 1, a[1]]), ([a[0] + base, a[1]], [a[0], a[1] + 1])):
            why = f"h·{base} + t lets one id make up for another (and anybody can construct such prompts): use a hash"
            yield (one + a[2:], {}), (other + a[2:], {}), 0, why
    yield (a + b, {"adapter": "x"}), (a + b, {}), 0, "an adapter changes the weights, so the keys and values"
    yield (a + b, {"adapter": "x"}), (a + b, {"adapter": "y"}), 0, "another adapter, other keys and values"
    yield (a + b, {"salt": "x"}), (a + b, {"salt": "y"}), 0, "tenants with different salts must not share"
    yield (a + b, {"salt": "x"}), (a + b, {}), 0, "a tenant with a salt shares with none that has no salt"
    yield (
        (a + b, {"adapter": "x"}),
        (a + b, {"salt": "x"}),
        0,
        ("an adapter called x is not a salt x: keep the two apart in the hash"),
    )
    yield (a + b, {"adapter": "x", "salt": "s"}), (a + b, {"adapter": "x", "salt": "s"}), 2, "both equal: share"
    apart = "where the adapter ends and the salt begins is lost when the two are joined as text: hash the pair"
    yield (a, {"adapter": "xy", "salt": "z"}), (a, {"adapter": "x", "salt": "yz"}), 0, apart
    for first, second, sign in _joins({"adapter", "salt", *texts}):
        yield (a, {first: f"x{sign}y", second: "z"}), (a, {first: "x", second: f"y{sign}z"}), 0, apart
        yield (a, {first: f"x{sign}y"}), (a, {first: "x", second: "y"}), 0, apart
    for name in ("adapter", "salt"):
        why = (
            f"{name}='None' is a name that a customer may choose, and must not be the same as no {name}: hash its repr"
        )
        yield (a, {name: "None"}), (a, {}), 0, why
        yield (a, {name: ""}), (a, {}), 0, f"{name}='' is a name, too, and another one than no {name}"


def _joins(texts: set[str]) -> Iterator[tuple[str, str, str]]:
    """(a name, the name behind it, what an answer may have put between the two, up to three of the texts in it among
    them): a customer may choose a name with exactly that in it."""
    short = sorted(texts, key=lambda text: (len(text), text))[:10]
    for first, second in (("adapter", "salt"), ("salt", "adapter")):
        for count in (1, 2, 3):
            yield from ((first, second, "".join(parts)) for parts in product(short, repeat=count))
        labels = {label.format(name=name, letter=name[0]) for label in LABELS for name in (second, second.capitalize())}
        for sign, times, label in product(SEPARATORS, (1, 2), sorted(labels)):
            if between := sign * times + label:
                yield first, second, between


def _bits(keys: Any) -> float:
    """Bits in which the keys differ at most; 64 where that cannot be seen."""
    if all(isinstance(key, Integral) for key in keys):
        return max(int(key).bit_length() for key in keys)
    if all(isinstance(key, tuple) for key in keys) and len({len(key) for key in keys}) == 1:
        return sum(map(_bits, zip(*keys, strict=True)))
    if all(isinstance(key, bytes) for key in keys):
        keys = ["".join(f"{byte:08b}" for byte in key) for key in keys]
    if all(isinstance(key, str) for key in keys):
        return sum(math.log2(len(set(place))) for place in zip(*keys, strict=False))  # different signs at each place
    return 64


def _judge_count(found: Any, count: int, size: int) -> None:
    found = expect_list(found, "a list of keys, one per full block")
    if len(found) != count // size:
        raise CheckFailed(
            f"{count} tokens in blocks of {size} have {count // size} full blocks, and you gave {len(found)} keys: a "
            "block that can still be written to must not be found by others"
        )


def _say(side) -> str:
    tokens, options = side
    named = "".join(f", {name}={value!r}" for name, value in options.items())
    return f"{tokens}{named}"


def _wrong(same: bool) -> str:
    return "have the same key" if same else "have different keys"


# Hits.


@exercise(
    "find-prefix",
    minutes=10,
    difficulty=3,
    hints=(
        "Two different beginnings may have one hash. What else does an entry hold that tells them apart?",
        "Walk from the first block on and stop at the first that is missing, or whose tokens are not yours, or whose "
        "parent is not the block you found before it. Its own tokens alone do not say what came before them.",
    ),
)
def check_find_prefix(learner: Callable) -> Receipt:
    size = random.choice((3, 4))
    draw = lambda: tuple(random.randrange(32_000) for _ in range(size))  # noqa: E731
    a, c, x = (draw() for _ in range(3))
    b = tuple(random.sample(range(32_000), size))  # different tokens, so that another order of them is another block
    turned, others = b[::-1], [(*b[:place], b[place] + 1, *b[place + 1 :]) for place in range(size)]
    ids = [0, *random.sample(range(1, 50), 7)]  # block 0 is a block like any other
    chain = {"a": Entry(ids[0], a, None), "ab": Entry(ids[1], b, ids[0]), "abc": Entry(ids[2], c, ids[1])}
    tail, cases = [1, 2], 0
    for tokens, keys, cache, right, why in (
        ([*a, *b, *c, *tail], ["a", "ab", "abc"], chain, ids[:3], "all three blocks are cached"),
        ([*a, *b, *x, *tail], ["a", "ab", "abx"], chain, ids[:2], "the third block is not cached"),
        ([*x, *b, *c, *tail], ["x", "xb", "xbc"], chain, [], "nothing of it is cached"),
        (
            [*a, *b, *c, *tail],
            ["a", "ab", "abc"],
            {key: chain[key] for key in ("a", "abc")},
            ids[:1],
            "the second block was evicted: what comes after a hole cannot be used, its beginning is not there",
        ),
        (
            [*a, *x, *tail],
            ["a", "ab"],  # the hash of (a, x) happens to be that of (a, b)
            chain,
            ids[:1],
            "a hash that two blocks have in common: compare the tokens",
        ),
        (
            [*a, *turned, *tail],
            ["a", "ab"],
            chain,
            ids[:1],
            "the entry holds your tokens in another order: compare them one by one, as they stand",
        ),
        *(
            (
                [*a, *other, *tail],
                ["a", "ab"],
                chain,
                ids[:1],
                f"of the entry's tokens only number {place} is not yours: compare all of them",
            )
            for place, other in enumerate(others)
        ),
        (
            [*x, *b, *tail],
            ["x", "ab"],  # the second hash collides, and its own tokens are equal
            {"x": Entry(ids[3], x, None), "ab": chain["ab"]},
            [ids[3]],
            "the second entry holds your tokens after another beginning: compare its parent with the block before",
        ),
        (
            [*b, *tail],
            ["ab"],  # the entry's tokens are those of your first block, but it comes second in its own sequence
            chain,
            [],
            "the entry is no first block: its parent is a block, and yours has none",
        ),
        (
            [*a, *x, *b, *tail],
            ["a", "ax", "ab"],  # the third hash collides with that of (a, b), and its parent is your first block
            chain,
            ids[:1],
            "the second block is not cached: what comes after a hole cannot be used",
        ),
        ([*a, *b], ["a", "ab"], chain, ids[:1], "the whole prompt is cached, but its last token's logits are wanted"),
        ([*a], ["a"], chain, [], "the whole prompt is cached, but its last token's logits are wanted"),
        ([*a, 5], ["a"], chain, ids[:1], "one token is left to compute, that is enough"),
    ):
        found = learner(list(tokens), list(keys), dict(cache), size)
        found = expect_list(found, "a list of blocks")
        if found != list(right):
            left = len(tokens) - size * len(found)
            more = f" ({left} tokens would be left to compute: a query of length 0)" if left < 1 else ""
            raise CheckFailed(f"you found blocks {list(found)} where {list(right)} are right: {why}{more}")
        cases += 1
    size = random.randint(5, 9)
    long = [t for _ in range(20) for t in draw()]
    keys = ANSWERS.block_keys(long, size)
    blocks = random.sample(range(100), 20)
    cache = {
        key: Entry(blocks[i], tuple(long[i * size : (i + 1) * size]), blocks[i - 1] if i else None)
        for i, key in enumerate(keys)
    }
    shared = random.randint(size, len(long) - 1)
    mine = long[:shared] + [40_000] * 9
    hits = learner(mine, ANSWERS.block_keys(mine, size), cache, size)
    return receipt(
        f"{shared} cached tokens, then 9 others",
        [
            row("corner cases", None, cases),
            row("tokens found", predict.cacheable_tokens(shared, len(mine), size), size * len(hits)),
            row("    left to compute", len(mine) - shared // size * size, len(mine) - size * len(hits)),
        ],
    )
