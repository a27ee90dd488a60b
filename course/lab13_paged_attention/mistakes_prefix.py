"""Spoilers of lab 13, prefixes: keys and hits as people get them wrong, and right ones that look different."""

import hashlib
from array import array

from course.kit.exercises import KnownAnswers

# Keys.

block_keys = KnownAnswers("block-keys")

block_keys.mistake(
    "one byte of each token",
    {"list(tokens[start : start + block_size])": "[t & 0xFF for t in tokens[start : start + block_size]]"},
    expect="hash whole ids",
)
block_keys.mistake(
    "two bytes of each token",
    {"list(tokens[start : start + block_size])": "[t & 0xFFFF for t in tokens[start : start + block_size]]"},
    expect="not their last two bytes",
)
block_keys.mistake(
    "a block and its place",
    {
        (
            "parent = hashlib.sha256(parent + block).digest()\n        keys.append(parent)"
        ): 'keys.append(hashlib.sha256(parent + b"%d" % start + block).digest())'
    },
    expect="chain in the key of the block before",
)
block_keys.mistake(
    "a key for the last block too, full or not",
    {"len(tokens) - block_size + 1": "len(tokens)"},
    expect="can still be written to",
)
block_keys.mistake(
    "no adapter in it", {'("root", adapter, salt)': '("root", salt)'}, expect="an adapter changes the weights"
)
block_keys.mistake(
    "no salt in it", {'("root", adapter, salt)': '("root", adapter)'}, expect="tenants with different salts"
)
block_keys.mistake(
    "adapter and salt in one list of strings",
    {'("root", adapter, salt)': "[name for name in (adapter, salt) if name]"},
    expect="keep the two apart",
)
block_keys.mistake(
    "adapter and salt with a sign between them",
    {'repr(("root", adapter, salt))': 'f"{adapter}|{salt}"'},
    expect="where the adapter ends",
)
block_keys.mistake(
    "each name with its label, joined by a sign",
    {
        'repr(("root", adapter, salt)).encode()': (
            '"|".join(\n        f"{label}={name}"\n'
            '        for label, name in (("adapter", adapter), ("salt", salt))\n'
            "        if name is not None\n    ).encode()"
        )
    },
    expect="where the adapter ends",
)
block_keys.mistake(
    "a letter before each name, and a sign between them",
    {'repr(("root", adapter, salt))': 'f"A{adapter}|S{salt}"'},
    expect="where the adapter ends",
)
block_keys.mistake(
    "each name in quotes, with its label",
    {'repr(("root", adapter, salt))': "f\"adapter='{adapter}' salt='{salt}'\""},
    expect="where the adapter ends",
)
block_keys.mistake(
    "a checksum of 61 bits",
    {"keys.append(parent)": "keys.append(int.from_bytes(parent) % (2**61 - 1))"},
    expect="these keys have 61 bits",
)
block_keys.mistake(
    "no adapter is the adapter called None",
    {'repr(("root", adapter, salt))': 'f"{len(str(adapter))}:{adapter}{salt}"'},
    expect="must not be the same as no adapter",
)
block_keys.mistake(
    "a checksum of 32 bits",
    {"(parent + block).digest()": "(parent + block).digest()[:4]"},
    expect="these keys have 32 bits",
)
block_keys.mistake(
    "token ids as digits in a row",
    {"repr(list(tokens[start : start + block_size]))": '"".join(map(str, tokens[start : start + block_size]))'},
    expect="digits run together",
)
block_keys.mistake(
    "hashes the whole beginning for every block",
    {"tokens[start : start + block_size]": "tokens[: start + block_size]"},
    expect="all before again for every block",
)
block_keys.mistake(
    "hashes the whole beginning of a copy",
    {
        "parent, keys = hashlib": "tokens = list(tokens)\n    parent, keys = hashlib",
        "tokens[start : start + block_size]": "tokens[: start + block_size]",
    },
    expect="all before again for every block",
)
block_keys.mistake(
    "two bytes of the key before",
    {"sha256(parent + block)": "sha256(parent[:2] + block)"},
    expect="all of the key of the block before",
)
block_keys.mistake(
    "an empty name for none",
    {'("root", adapter, salt)': '("root", adapter or "", salt or "")'},
    expect="and another one than no",
)
block_keys.mistake(
    "a block as a set of tokens",
    {"list(tokens[start : start + block_size])": "sorted(set(tokens[start : start + block_size]))"},
    expect="the order of the tokens in a block",
)


@block_keys.mistake("a sum over the blocks before", expect="the order of the blocks before counts")
def summed(tokens, block_size, adapter=None, salt=None):
    total, keys = hash(("root", adapter, salt)), []
    for at in range(0, len(tokens) - block_size + 1, block_size):
        total += hash(tuple(tokens[at : at + block_size]))
        keys.append(total)
    return keys


@block_keys.mistake("a polynomial of the ids", expect="lets one id make up for another")
def polynomial(tokens, block_size, adapter=None, salt=None):
    key, keys = hash(("root", adapter, salt)), []
    for count, token in enumerate(tokens, 1):
        key = (key * 31 + token) % 2**64
        if count % block_size == 0:
            keys.append(key)
    return keys


@block_keys.alternative("nested tuples")
def nested(tokens, block_size, adapter=None, salt=None):
    parent, keys = (adapter, salt), []
    for at in range(0, len(tokens) - block_size + 1, block_size):
        parent = (parent, tuple(tokens[at : at + block_size]))
        keys.append(parent)
    return keys


@block_keys.alternative("Python's own hash of (parent, tokens)")
def own_hash(tokens, block_size, adapter=None, salt=None):
    parent, keys = hash((("adapter", adapter), ("salt", salt))), []
    for at in range(0, len(tokens) // block_size * block_size, block_size):
        parent = hash((parent, tuple(tokens[at : at + block_size])))
        keys.append(parent)
    return keys


@block_keys.alternative("eight bytes a token, one running hash")
def running(tokens, block_size, adapter=None, salt=None):
    state, keys, block = hashlib.blake2b(repr({"adapter": adapter, "salt": salt}).encode()), [], []
    for token in tokens:
        block.append(token)
        if len(block) == block_size:
            state.update(array("q", block).tobytes())
            keys.append(state.hexdigest())
            block = []
    return keys


# Hits.

find_prefix = KnownAnswers("find-prefix")

find_prefix.mistake(
    "believes the hash", {" or entry.tokens != mine or entry.parent != parent": ""}, expect="compare the tokens"
)
find_prefix.mistake("compares the block's tokens only", {" or entry.parent != parent": ""}, expect="compare its parent")
find_prefix.mistake(
    "compares the tokens in any order",
    {"entry.tokens != mine": "sorted(entry.tokens) != sorted(mine)"},
    expect="in another order",
)
find_prefix.mistake(
    "compares the last token", {"entry.tokens != mine": "entry.tokens[-1] != mine[-1]"}, expect="compare all of them"
)
find_prefix.mistake(
    "compares the first and the last token",
    {"entry.tokens != mine": "(entry.tokens[0], entry.tokens[-1]) != (mine[0], mine[-1])"},
    expect="compare all of them",
)
find_prefix.mistake(
    "takes block 0 for no parent",
    {"entry.parent != parent": "(entry.parent and entry.parent != parent)"},
    expect="compare its parent",
)
find_prefix.mistake(
    "does not look at the first block's parent",
    {"entry.parent != parent": "(blocks and entry.parent != parent)"},
    expect="no first block",
)
find_prefix.mistake(
    "goes on after a hole", {" or entry.parent != parent": "", "break": "continue"}, expect="what comes after a hole"
)
find_prefix.mistake(
    "takes a fully cached prompt as it is",
    {"(len(tokens) - 1) // block_size": "len(tokens) // block_size"},
    expect="query of length 0",
)
find_prefix.mistake(
    "never uses the last full block",
    {"(len(tokens) - 1) // block_size": "len(tokens) // block_size - 1"},
    expect="one token is left to compute|all three blocks",
)


@find_prefix.alternative("finds all, then cuts")
def finds_then_cuts(tokens, keys, cache, block_size):
    chain = []
    for at, key in enumerate(keys):
        entry = cache.get(key)
        if not entry or list(entry.tokens) != tokens[at * block_size : (at + 1) * block_size]:
            break
        if (entry.parent is None) != (at == 0) or (at and entry.parent != chain[-1]):
            break
        chain.append(entry.block)
    if len(chain) * block_size == len(tokens):
        chain.pop()
    return chain
