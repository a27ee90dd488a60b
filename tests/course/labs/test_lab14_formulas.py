"""Batching in closed forms against schedules walked step by step, exact enumeration and the scheduler itself."""

import itertools
import random
from dataclasses import replace

import pytest

from course.lab14_continuous_batching import formulas as predict
from course.shared.step_cost import H100_8B
from minillm.serve import BlockPool, Scheduler, Sequence


def walked(lengths, max_num_seqs):
    """Continuous batching, one step after the other."""
    left, waiting, running, steps = list(lengths), list(range(len(lengths))), [], 0
    while waiting or running:
        while waiting and len(running) < max_num_seqs:
            running.append(waiting.pop(0))
        for request in running:
            left[request] -= 1
        running = [request for request in running if left[request]]
        steps += 1
    return steps


def test_steps_of_the_docstring():
    assert predict.static_steps([2, 4, 1, 3], 2) == 7
    assert predict.continuous_steps([2, 4, 1, 3], 2) == 6
    assert predict.least_steps([2, 4, 1, 3], 2) == 5


@pytest.mark.parametrize("seed", range(20))
def test_continuous_steps_are_those_of_a_walk_and_within_grahams_bound(seed):
    rng = random.Random(seed)
    lengths, max_num_seqs = [rng.randint(1, 30) for _ in range(rng.randint(1, 40))], rng.randint(1, 9)
    steps, least = predict.continuous_steps(lengths, max_num_seqs), predict.least_steps(lengths, max_num_seqs)
    assert steps == walked(lengths, max_num_seqs)
    assert least <= steps < sum(lengths) / max_num_seqs + max(lengths)
    assert steps <= predict.static_steps(lengths, max_num_seqs)


def test_equal_lengths_that_fill_their_batches_need_as_many_steps_either_way():
    for max_num_seqs, batches in itertools.product((1, 3, 8), (1, 2, 5)):
        lengths = [7] * max_num_seqs * batches
        assert (
            predict.static_steps(lengths, max_num_seqs)
            == predict.continuous_steps(lengths, max_num_seqs)
            == 7 * batches
        )


def test_mean_longest_is_the_enumerated_mean():
    shares = [0.1, 0.4, 0.3, 0.2]
    for max_num_seqs in (1, 2, 4):
        mean = 0.0
        for each in itertools.product(range(1, 5), repeat=max_num_seqs):
            chance = 1.0
            for length in each:
                chance *= shares[length - 1]
            mean += chance * max(each)
        assert predict.mean_longest(shares, max_num_seqs) == pytest.approx(mean)
    assert predict.static_over_continuous([0.0, 0.0, 1.0], 8) == 1
    assert predict.static_over_continuous([1e-3] * 1000, 8) == pytest.approx(2 * 8 / 9, rel=0.01)


@pytest.mark.parametrize(("patience", "gap"), [(0, 3), (1, 1), (4, 2), (16, 1)])
def test_overtakers_are_the_schedulers(patience, gap):
    scheduler = Scheduler(BlockPool(4, 4), max_num_seqs=1, patience=patience)
    patient = Sequence([1, 2], 3, priority=gap)
    scheduler.add(patient)
    for number in range(100):
        scheduler.add(Sequence([3, number], 3))
    passed = 0
    while patient not in (plan := scheduler.schedule()).admitted:
        passed += 1
        for sequence in scheduler.advance(plan):
            scheduler.finish(sequence)
    assert passed == predict.overtakers(patience, gap)


def test_a_step_is_the_larger_of_compute_and_traffic():
    decode = H100_8B.step([(999, 1)])
    assert decode == (H100_8B.weight_bytes + 1000 * H100_8B.kv_bytes) / H100_8B.bandwidth
    prompt = H100_8B.step([(0, 2048)])
    assert prompt == pytest.approx(H100_8B.recompute(2048))
    assert H100_8B.step([(999, 1), (0, 2048)]) > prompt > decode


def test_crossover_is_where_both_take_as_long():
    slow = replace(H100_8B, link=12e9)
    where = slow.crossover(16)
    assert slow.recompute(round(where)) == pytest.approx(2 * slow.swap(round(where / 16), 16), rel=1e-3)
    assert slow.recompute(round(where / 2)) < 2 * slow.swap(round(where / 32), 16)
    assert H100_8B.crossover(16) == 0
    assert replace(slow, copy_s=1e-5).crossover(1) > replace(slow, copy_s=1e-5).crossover(16) > where


def test_the_worst_gap_is_a_chunks_and_the_prompt_takes_all_of_them():
    held = [512] * 16
    gaps = [predict.worst_gap(H100_8B, 8192, chunk, held) for chunk in (256, 512, 2048, 8192, None)]
    assert gaps == sorted(gaps) and gaps[-1] == gaps[-2]
    assert predict.chunked_prefill(H100_8B, 8192, None, held) == gaps[-1]
    assert predict.chunked_prefill(H100_8B, 8192, 128, held) > predict.chunked_prefill(H100_8B, 8192, 1024, held)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: predict.static_steps([3], 0),
        lambda: predict.continuous_steps([3, 0], 2),
        lambda: predict.mean_longest([0.5, 0.4], 2),
        lambda: predict.worst_gap(H100_8B, 0, None, []),
    ],
)
def test_bad_input_is_one_sentence(wrong):
    with pytest.raises(ValueError, match=r"give at least 1|sum to 1"):
        wrong()
