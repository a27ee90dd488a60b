"""Closed forms of a cache of keys and values in blocks: what is wasted, what is shared, what is copied.

Symbols: b tokens per block, P tokens of a prefix that R requests share, U tokens of each request's own.
Paging: Kwon et al. 2023 (PagedAttention), §3.1 on waste, §4.3 and 4.4 on sharing and copy on write.
"""

import math
from collections.abc import Sequence


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens: ceil(tokens / b)."""
    return -(-tokens // block_size)


def unused_slots(tokens: int, block_size: int) -> int:
    """Slots of a sequence's blocks without a token: 0 .. b - 1, all of them in its last block."""
    return blocks_for(tokens, block_size) * block_size - tokens


def mean_unused_slots(block_size: int) -> float:
    """Expected `unused_slots` when the last block is filled evenly: (b - 1) / 2."""
    return (block_size - 1) / 2


def reserved_waste(lengths: Sequence[int], reserved: int) -> float:
    """Share of the slots without a token if each sequence reserves `reserved` in one piece: 1 - mean / reserved."""
    return 1 - sum(lengths) / (len(lengths) * reserved)


def cacheable_tokens(shared: int, prompt: int, block_size: int) -> int:
    """Tokens of a prompt that a hit covers, of which the first `shared` are cached.

    Full blocks only, and never the last token of the prompt: its logits are wanted.
    """
    return min(shared, prompt - 1) // block_size * block_size


def computed_tokens(prefix: int, own: int, requests: int, block_size: int) -> int:
    """Prompt tokens put through the model for R requests of P + U tokens, one of them before the others."""
    prompt = prefix + own
    return requests * prompt - (requests - 1) * cacheable_tokens(prefix, prompt, block_size)


def shared_blocks(prefix: int, own: int, requests: int, block_size: int) -> int:
    """Blocks that R requests of P + U tokens hold together, the full blocks of the prefix once (U at least 1)."""
    once = prefix // block_size
    return once + requests * (blocks_for(prefix + own, block_size) - once)


def saved_blocks(prefix: int, requests: int, block_size: int) -> int:
    """Blocks that sharing saves: (R - 1) · floor(P / b)."""
    return (requests - 1) * (prefix // block_size)


def saved_share(prefix: int, own: int, requests: int) -> float:
    """Share of the tokens held that sharing saves, blocks so small that they do not matter: (R-1)·P / (R·(P+U))."""
    return (requests - 1) * prefix / (requests * (prefix + own))


def fork_copies(prompt: int, samples: int, block_size: int) -> int:
    """Blocks copied when n samples go on from one prompt: its last block, if it has room, for all but one of them."""
    return 0 if prompt % block_size == 0 else samples - 1


def fork_blocks(prompt: int, answer: int, samples: int, block_size: int) -> int:
    """Blocks that n samples of one prompt hold when each has written `answer` (at least 1) tokens of its own."""
    return shared_blocks(prompt, answer, samples, block_size)


def requests_in_pool(slots: int, length: int, block_size: int) -> int:
    """Sequences of `length` tokens that a pool of so many slots holds at once; b = the reservation if contiguous."""
    return slots // block_size // blocks_for(length, block_size)


def collision_chance(blocks: int, bits: int) -> float:
    """Chance that any two of so many blocks have one hash of `bits` bits: about 1 - exp(-n(n-1) / 2^(bits+1))."""
    return -math.expm1(-blocks * (blocks - 1) / 2 ** (bits + 1))
