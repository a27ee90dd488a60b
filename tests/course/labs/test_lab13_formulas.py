"""P83-P87 against counting: slots laid out one by one, a pool that is really shared."""

import itertools

import pytest

from course.lab13_paged_attention import formulas as paging
from minillm.serve.schedule.blocks import BlockPool


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_waste_is_what_is_left_in_the_last_block(block_size):
    counted = []
    for tokens in range(1, 6 * block_size + 1):
        blocks = len({token // block_size for token in range(tokens)})
        assert paging.blocks_for(tokens, block_size) == blocks
        counted.append(paging.unused_slots(tokens, block_size))
        assert 0 <= counted[-1] == blocks * block_size - tokens < block_size
    assert sum(counted) / len(counted) == pytest.approx(paging.mean_unused_slots(block_size))


def test_the_published_numbers():
    """Uniform 1 .. 2048: 7.5 tokens of a block of 16; a reservation of 4096 wastes three quarters."""
    lengths = range(1, 2049)
    assert paging.mean_unused_slots(16) == 7.5
    assert paging.reserved_waste(lengths, 4096) == pytest.approx(0.75, abs=1e-3)
    assert (10 * paging.blocks_for(4096, 16), 10 * paging.blocks_for(2048, 16)) == (2560, 1280)


@pytest.mark.parametrize(
    ("prefix", "own", "requests", "block_size"), itertools.product((0, 3, 8, 13), (1, 2, 7), (1, 2, 5), (1, 4))
)
def test_sharing_counted_in_sets(prefix, own, requests, block_size):
    """A block is known by all tokens up to its end; those that are full and inside the prefix are one block."""
    held, computed, known = set(), 0, set()
    for request in range(requests):
        tokens = [("shared", i) for i in range(prefix)] + [(request, i) for i in range(own)]
        hit = 0
        for end in range(block_size, len(tokens), block_size):  # < len(tokens): the last token is always computed
            if tuple(tokens[:end]) not in known:
                break
            hit = end
        computed += len(tokens) - hit
        cuts = range(0, len(tokens), block_size)
        blocks = [tuple(tokens[: start + block_size]) for start in cuts]
        full = [block for block in blocks if len(block) % block_size == 0]
        known |= set(full)
        held |= {block if block in full else (block, request) for block in blocks}
    assert computed == paging.computed_tokens(prefix, own, requests, block_size)
    assert len(held) == paging.shared_blocks(prefix, own, requests, block_size)
    apart = requests * paging.blocks_for(prefix + own, block_size)
    assert apart - len(held) == paging.saved_blocks(prefix, requests, block_size)


@pytest.mark.parametrize(("prompt", "answer", "samples"), [(8, 3, 4), (9, 3, 4), (11, 1, 2), (5, 9, 3), (4, 4, 1)])
def test_forks_of_a_real_pool(prompt, answer, samples):
    pool = BlockPool(64, 4)
    first = pool.allocate(pool.blocks_for(prompt))
    tables = [first, *(pool.share(first) for _ in range(samples - 1))]
    for at in range(prompt, prompt + answer):
        for table in tables:
            if at // 4 == len(table):
                table += pool.allocate(1)
            pool.copy_on_write(table, at // 4)
    assert pool.copied == paging.fork_copies(prompt, samples, 4)
    assert pool.used == paging.fork_blocks(prompt, answer, samples, 4)


def test_saved_share_of_ordinary_chats():
    """E000-16: "10-30 %" is anything from 9 to 81 %."""
    assert paging.saved_share(100, 400, 2) == pytest.approx(0.1)
    assert paging.saved_share(1000, 200, 40) == pytest.approx(0.8125)
    small = [paging.saved_blocks(1000, r, 1) / (r * paging.blocks_for(1200, 1)) for r in (2, 40)]
    assert small == pytest.approx([paging.saved_share(1000, 200, r) for r in (2, 40)])


def test_pool_room_and_collisions():
    assert paging.requests_in_pool(4096, 300, 16) == 13 and paging.requests_in_pool(4096, 300, 512) == 8
    assert paging.collision_chance(23, 1) > 0.99 and paging.collision_chance(1, 8) == 0
    assert paging.collision_chance(2, 8) == pytest.approx(1 / 256, rel=0.01)
