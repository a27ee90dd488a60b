import math

import pytest

from course.lab11_data_pipeline import formulas as data


def test_bits_per_byte_and_perplexity():
    # errata: 3.0 nats per token at 4 characters per token
    assert data.perplexity(3.0) == pytest.approx(20.09, abs=0.01)
    assert data.bits_per_byte(3.0, tokens=100, text_bytes=400) == pytest.approx(1.08, abs=0.01)


def test_guessing_bytes_blindly_costs_eight_bits():
    assert data.bits_per_byte(math.log(256), 1000, 1000) == pytest.approx(8)
    assert data.entropy([1] * 256) == pytest.approx(math.log(256))
    assert data.entropy([5, 0, 0]) == 0
    assert data.entropy([1, 3]) == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3))


def test_padding_waste_is_one_minus_mean_over_max():
    assert data.padding_waste([[2, 4, 6, 8]]) == pytest.approx(1 - 5 / 8)
    assert data.padding_waste([[4, 4], [1, 1]]) == 0
    assert data.padding_waste([[1, 4], [10, 10]]) == pytest.approx(3 / 28)
    assert data.uniform_padding_waste(8) == 7 / 16
    assert data.uniform_padding_waste(1) == 0


def test_packing_wastes_only_the_tail():
    assert data.packing_waste(101, 10) == pytest.approx(1 / 101)
    assert data.packing_waste(110, 10) == pytest.approx(10 / 110)


def test_sampler_duplicates():
    assert [data.sampler_duplicates(10, n) for n in (1, 2, 3, 4, 16)] == [0, 0, 2, 2, 6]


def test_step_seconds():
    assert data.step_seconds(2, 3, prefetch=False) == 5
    assert data.step_seconds(2, 3, prefetch=True) == 3
    assert data.step_seconds(8, 3, prefetch=True) == 8
    assert data.step_seconds(8, 3, prefetch=True, workers=2) == 4
