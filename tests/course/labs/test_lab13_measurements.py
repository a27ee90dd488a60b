"""Lab 13's measurements count what they say: waste, hits, copies, and each broken engine's own trace."""

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from course.kit.answers import answers_of, changed_answer
from course.lab13_paged_attention import experiments, paging
from course.lab13_paged_attention import experiments_breaks as breaks
from course.lab13_paged_attention import experiments_engine as small
from course.lab13_paged_attention import experiments_sharing as sharing
from course.lab13_paged_attention import experiments_stale as stale
from course.lab13_paged_attention import experiments_window as sliding
from course.lab13_paged_attention import figures as pictures
from course.lab13_paged_attention import formulas as predict

right = answers_of("13_paged_attention")
PARTS = {
    "slot_mapping": right.slot_mapping,
    "pool": right.Pool,
    "paged_attention": right.paged_attention,
    "block_keys": right.block_keys,
    "find_prefix": right.find_prefix,
    "prepare_write": right.prepare_write,
}


def test_the_small_engine_is_the_plain_loop_and_computes_only_what_is_not_cached():
    engine = small.SmallEngine(small.Parts(**PARTS), 12, 4)
    prompt = experiments.cut(11, 1)
    sibling = prompt[:9] + experiments.cut(3, 2)
    assert engine.answer(prompt, 3) == experiments.naive(prompt, 3)
    assert engine.answer(sibling, 2) == experiments.naive(sibling, 2)
    assert engine.passes == [11, 1, 1, 12 - 8, 1]


def test_the_small_engine_shows_a_missing_copy():
    no_copy = changed_answer(
        "copy-on-write", "13_paged_attention", {"elif pool.references[table[index]] > 1": "elif False"}
    )
    engine = small.SmallEngine(small.Parts(**PARTS | {"prepare_write": no_copy}), 12, 4)
    prompt = experiments.cut(10, 1)
    table, logits = engine.prefill(prompt)
    first, second = logits.topk(2).indices.tolist()
    fork = engine.fork(table)
    engine.decode(table, 10, first)
    written = engine.memory[:, :, table[2], 2].clone()
    engine.decode(fork, 10, second)
    assert not torch.equal(engine.memory[:, :, table[2], 2], written)  # the fork wrote over it
    assert engine.copies == []


@pytest.mark.parametrize(("window", "held"), [(None, 9), (64, 5), (17, 2)])
def test_a_window_bounds_what_a_sequence_holds(window, held):
    found = sliding.most_held(window)
    assert found.equal and found.held == found.expected == held


def test_a_checksum_names_each_damaged_block_though_most_answers_stay():
    found = stale.flipped_bits(answer=4, bits=(0, 30))
    assert found["named"] == found["of"] == found["repaired"] == 2


@pytest.mark.parametrize("block_size", [4, 16])
def test_waste_stays_below_a_block(block_size):
    found = experiments.waste(block_size, count=4)
    assert found["correct"] and found["preemptions"] == 0
    assert max(found["unused"]) < block_size and min(found["unused"]) >= 0
    assert found["held"] - found["filled"] == sum(found["unused"])


def test_a_shared_prefix_is_stored_and_computed_once():
    prefix, own, requests, size = 21, 6, 3, 8
    found = sharing.share(prefix, own, requests, size, answer=3)
    assert found["equal"] and found["holders"] == requests
    assert found["passed"] == found["computed"] == predict.computed_tokens(prefix, own, requests, size)
    assert found["hit"] == (requests - 1) * predict.cacheable_tokens(prefix, prefix + own, size)
    assert found["blocks"] == predict.shared_blocks(prefix, own, requests, size)
    assert found["held"] == requests * predict.blocks_for(prefix + own, size)


def test_forks_and_their_pictures():
    found = pictures.forks()
    assert found["equal"] and found["left"][0] == found["left"][1]
    assert found["copied"] == predict.fork_copies(22, 3, 4)
    assert found["blocks"] == predict.fork_blocks(22, 13, 3, 4)
    first = pictures.forks_before_and_after().axes[0]
    assert [text.get_text() for text in first.texts] == ["3×"] * predict.blocks_for(22, 4)
    for step in (1, 7, 99):
        assert pictures.forks_over_time(step).axes[0].get_title(loc="left").startswith(f"Step {min(step, 14)}, ")


def test_the_wrong_block_is_felt_from_layer_1_on():
    found = sharing.same_tokens_elsewhere(block=16)
    assert found["keys, there"][0] < 1e-5 and found["values, later"][0] < 1e-5
    assert min(found["keys, there"][1:]) > 0.01 and found["keys, later"][0] > 0.1
    assert 0 < found["moved"] <= 1


@pytest.mark.parametrize(
    ("bug", "hits", "counts", "ends"),
    [
        ("none", False, False, True),
        ("frees shared blocks", False, True, True),
        ("one byte per token", True, False, True),
        ("whole prompt from the cache", True, False, False),
        ("no salt in the key", True, False, True),
    ],
)
def test_each_bug_leaves_its_own_trace(bug, hits, counts, ends):
    found = breaks.run(bug)
    assert (found.hit != found.hit_expected, found.uncounted > 0, found.unfinished == 0) == (hits, counts, ends)
    assert (found.wrong > 0) == (bug in ("frees shared blocks", "one byte per token"))
    assert (found.empty_steps > 0) == (not ends)


def test_what_checks_look_at():
    walks = (
        lambda o: o.held.index(5), lambda o: min(o.held), lambda o: 999 in o.held, lambda o: o.held.pop(0),
        lambda o: o.held[1:], lambda o: o.queue.count(5), lambda o: set(range(9)) - o.free, lambda o: torch.ones(1000),
        lambda o: max(o.counts.values()), lambda o: (o.array == 0)[0], lambda o: o.array.argmin(),
        lambda o: o.lists[0].index(7),
    )  # fmt: skip
    quick = (
        lambda o: o.held.pop(), lambda o: o.held[-1], lambda o: 999 in o.free, lambda o: o.queue.popleft(),
        lambda o: next(iter(o.free)), lambda o: o.held.append(1), lambda o: o.counts[7], lambda o: o.array[7] == 0,
    )  # fmt: skip

    def steps(call):
        owner = SimpleNamespace(held=list(range(1000)), free=set(range(1000)), queue=deque(range(1000)))
        owner.counts, owner.array, owner.lists = dict.fromkeys(range(1000), 0), np.arange(1000), [list(range(1000))]
        return paging.steps_of(owner, lambda: call(owner))

    assert min(map(steps, walks)) > 990 and max(map(steps, quick)) < 20
    tokens = paging.Read(range(10))
    assert (list(tokens), tokens[2:5], tokens[0], tokens.reads) == (list(range(10)), [2, 3, 4], 0, 14)
    x = torch.zeros(100)
    with paging.NewTensors(x) as made:
        (x[:50].view(5, 10) + 1).sum()
    assert made.largest == 50


def test_figures_of_formulas():
    assert "72% fewer" in pictures.sharing().axes[0].get_title(loc="left")


def test_a_reservation_is_counted_in_the_cache():
    written, lengths = experiments.reserve(256, count=1)
    assert written == lengths
