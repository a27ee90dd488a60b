"""P99-P104: closed forms of speculation against simulation, exact sums and the numbers printed in the papers."""

import random
from itertools import product

import pytest

from course.lab15_speculative_decoding.formulas import acceptance
from minillm.bench.speculate_formulas import batch_passes, batch_seconds, going
from minillm.predict.serving.speculation import best_k, speedup, tokens_per_pass


def test_acceptance_is_the_overlap_and_one_minus_the_total_variation():
    rng = random.Random(0)
    for _ in range(20):
        p, q = ([rng.random() ** 3 for _ in range(9)] for _ in range(2))
        p, q = ([x / sum(each) for x in each] for each in (p, q))
        distance = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
        accepted = sum(b * min(1, a / b) for a, b in zip(p, q, strict=True))
        assert acceptance(p, q) == pytest.approx(1 - distance) == pytest.approx(accepted)
    assert acceptance([1, 0], [0, 1]) == 0 and acceptance([0.2, 0.8], [0.2, 0.8]) == 1


def test_tokens_per_pass_by_enumeration():
    """Σ over every outcome of K coins: probability · (accepted before the first failure + 1)."""
    for alphas in ([0.3], [0.9, 0.5], [0.8] * 5, [1.0, 0.2, 0.0], [0.5, 0.9, 0.7, 0.99]):
        expected = 0.0
        for coins in product((True, False), repeat=len(alphas)):
            probability = 1.0
            for heads, alpha in zip(coins, alphas, strict=True):
                probability *= alpha if heads else 1 - alpha
            expected += probability * (1 + next((i for i, heads in enumerate(coins) if not heads), len(coins)))
        assert tokens_per_pass(alphas) == pytest.approx(expected)
    for alpha, k in product((0.0, 0.3, 0.8), (0, 1, 4, 9)):
        assert tokens_per_pass(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))
    assert tokens_per_pass(1.0, 4) == 5 and tokens_per_pass(0.684, 4) == pytest.approx(2.69, abs=0.01)


def test_the_handbooks_numbers():
    assert tokens_per_pass(0.8, 4) == pytest.approx(3.36, abs=0.005)
    assert speedup(0.8, 0.1, 4) == pytest.approx(2.40, abs=0.005) and best_k(0.8, 0.1) == 6
    assert speedup(0.8, 0.1, 8) == pytest.approx(2.41, abs=0.01)
    assert speedup(0.8, 0.02, best_k(0.8, 0.02)) == pytest.approx(3.82, abs=0.01)
    # Leviathan et al. 2023, table 1: α, γ -> operations' and speed's factors at c = 0
    assert speedup(0.6, 0, 2) == pytest.approx(1.96, abs=0.005) and speedup(0.7, 0, 3) == pytest.approx(2.53, abs=0.005)
    assert speedup(0.8, 0, 5) == pytest.approx(3.69, abs=0.005) and speedup(0.9, 0, 10) == pytest.approx(
        6.86, abs=0.005
    )


def test_best_k():
    assert best_k(0.3, 0.5) == 0 and speedup(0.3, 0.5, 1) < 1 == speedup(0.3, 0.5, 0)
    assert best_k(1.0, 0.1, 12) == 12 and best_k(0.0, 0.0) == 0 and best_k(0.5, 0.0, 5) == 5
    for alpha, c in product((0.2, 0.5, 0.7, 0.95), (0.01, 0.1, 0.4)):
        k = best_k(alpha, c)
        assert all(speedup(alpha, c, k) >= speedup(alpha, c, other) for other in range(65))


def test_a_dearer_check_is_worth_less():
    assert speedup(0.8, 0.1, 4, verify=1.5) == pytest.approx(tokens_per_pass(0.8, 4) / 1.9)


def ways(alpha, k, tokens):
    """{passes: probability} of one sequence, by following every outcome to its end."""
    if tokens <= 0:
        return {0: 1.0}
    found, guesses = {}, min(k, tokens - 1)
    for right in range(guesses + 1):
        chance = alpha**right * (1 - alpha if right < guesses else 1)
        for passes, rest in ways(alpha, k, tokens - right - 1).items():
            found[passes + 1] = found.get(passes + 1, 0.0) + chance * rest
    return found


def test_passes_of_a_batch_by_enumeration():
    for alpha, k, tokens in product((0.0, 0.4, 0.9, 1.0), (0, 1, 3), (1, 2, 7)):
        chances = ways(alpha, k, tokens)
        expected = [sum(c for passes, c in chances.items() if passes >= j) for j in range(1, tokens + 1)]
        found = going(alpha, k, tokens)
        assert found + [0.0] * (tokens - len(found)) == pytest.approx(expected)
    alphas = (0.2, 0.5, 0.9)
    longest = total = 0.0
    for outcome in product(*(ways(alpha, 3, 7).items() for alpha in alphas)):
        chance = outcome[0][1] * outcome[1][1] * outcome[2][1]
        longest += chance * max(passes for passes, _ in outcome)
        total += chance * sum(passes for passes, _ in outcome)
    assert batch_passes(alphas, 3, 7) == pytest.approx((longest, total))


def test_a_batch_lasts_as_long_as_its_last_sequence():
    assert batch_seconds([0.3] * 4, 0, 50, 2.0, 0.5) == pytest.approx(
        50 * (2.0 + 4 * 0.5)
    )  # without guesses: all of it
    one, _ = batch_passes([0.6], 3, 400)
    assert 400 / one == pytest.approx(tokens_per_pass(0.6, 3), rel=0.01)  # alone, and long: the papers' formula
    longest, total = batch_passes([0.6] * 8, 3, 64)
    assert longest > 1.1 * total / 8 == pytest.approx(1.1 * batch_passes([0.6], 3, 64)[1])
    slow, _ = batch_passes([0.6] * 7 + [0.1], 3, 64)
    assert longest < batch_passes([0.1], 3, 64)[0] == pytest.approx(slow, rel=0.001)  # nearly all wait for the one
    alike = batch_seconds([0.6] * 8, 3, 64, 0.0, 1.0) / batch_seconds([0.6], 3, 64, 0.0, 1.0)
    assert alike == pytest.approx(8)  # where a pass costs only what is in it, nobody waits


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: acceptance([1.0], [0.5, 0.5]), "p has 1 tokens and q 2"),
        (lambda: tokens_per_pass(0.5), "give k"),
        (lambda: tokens_per_pass(1.2, 3), "must lie in 0 .. 1"),
        (lambda: tokens_per_pass([0.5], 2), "does not fit the 1 places"),
        (lambda: tokens_per_pass(0.5, -1), "k -1 be at least 0"),
        (lambda: speedup(0.5, -0.1, 2), "c -0.1 must be at least 0"),
        (lambda: best_k(0.5, 0.1, -1), "most -1 must be"),
        (lambda: going(0.5, 2, 0), "tokens 0 must be at least 1"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
