"""From a wrong tensor to the mistake behind it."""

import pytest
import torch

from course.kit.exercises import CheckFailed
from course.shared.diagnose import expect, expect_like, expect_list, say_parts, say_sum, whole_numbers

INPUTS = [whole_numbers(torch.Generator().manual_seed(seed), 12) for seed in range(4)]


def chunk(rank, place):
    return INPUTS[rank].chunk(4)[place]


@pytest.mark.parametrize(
    ("counts", "place", "said"),
    [
        ((1, 1, 1, 1), 2, r"the sum over all ranks of chunk 2 \(its own is chunk 1\): off by one\?"),
        ((1, 1, 1, 0), 1, "a sum of chunk 1 without rank 3"),
        ((1, 0, 1, 0), 1, "a sum of chunk 1 without ranks 1, 3"),
        ((1, 1, 2, 1), 1, "a sum of chunk 1 with rank 2 twice"),
        ((0, 0, 2, 1), 0, r"a sum of chunk 0 \(its own is chunk 1\) without ranks 0, 1 and with rank 2 twice"),
        ((0, 1, 0, 0), 1, "just rank 1's own chunk 1: nothing was added"),
    ],
)
def test_a_wrong_sum_is_traced(counts, place, said):
    result = sum(count * chunk(rank, place) for rank, count in enumerate(counts))
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(say_sum(result, INPUTS, 1, 4))


def test_a_mean_and_a_mess_are_told_apart():
    total = sum(chunk(rank, 1) for rank in range(4))
    assert say_sum(total / 4, INPUTS, 1, 4).endswith("divided by the 4 ranks")
    assert "no sum of the ranks' inputs" in say_sum(total + 0.5, INPUTS, 1, 4)


def test_a_wrong_part_is_named():
    known = {f"rank {rank}'s tensor": x for rank, x in enumerate(INPUTS)}
    swapped = torch.cat([INPUTS[0], INPUTS[2], INPUTS[1]])
    assert say_parts(swapped, INPUTS[:3], known) == "place 1 of it holds rank 2's tensor"
    assert "no rank ever had" in say_parts(swapped + 0.5, INPUTS[:3], known)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, "returned nothing"),
        ([1, 2], "returned a list"),
        (torch.zeros(3), r"returned \[3\] float32, but the exercise asks for a pair, here \[2\] float32"),
        (torch.zeros(2, dtype=torch.float64), r"\[2\] float64"),
    ],
)
def test_a_wrong_kind_of_result_is_named(result, said):
    with pytest.raises(CheckFailed, match=said):
        expect_like("rank 0", result, torch.zeros(2), "a pair")


def test_another_kind_than_what_is_asked_for_is_said():
    expect(True, 3, "a number")
    with pytest.raises(CheckFailed, match="rank 0: you returned 3; the exercise asks for a text"):
        expect(False, 3, "a text", "rank 0: you")
    with pytest.raises(CheckFailed, match="is there a return"):
        expect(False, None, "a text")


def test_a_list_is_of_the_size_and_kind_asked_for():
    assert expect_list((1, 2), "two numbers", count=2, of=int) == [1, 2] and expect_list([], "a list") == []
    for wrong in ((1, 2, 3), (1, "2"), {1, 2}, None):
        with pytest.raises(CheckFailed, match="asks for two numbers"):
            expect_list(wrong, "two numbers", count=2, of=int)
