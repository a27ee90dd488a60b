"""Policies, health and the budget against independent reckoning: exact enumeration, simulation, the papers' claims."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.api.router.budget import RetryBudget
from minillm.api.router.health import Health
from minillm.api.router.policies import POLICIES, LeastOutstanding, Load, PrefixAffinity, RoundRobin, TwoChoices

counts = st.lists(st.integers(0, 50), min_size=1, max_size=12)


def loads(outstanding) -> list[Load]:
    return [Load(f"replica-{index}", count) for index, count in enumerate(outstanding)]


@given(counts, st.binary(max_size=8))
def test_each_policy_names_one_of_the_replicas(outstanding, key):
    for make in POLICIES.values():
        assert 0 <= make(1.25).choose(loads(outstanding), key) < len(outstanding)


def test_round_robin_takes_turns_and_least_outstanding_takes_the_least():
    turns = RoundRobin()
    assert [turns.choose(loads([9, 0, 0])) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    least = LeastOutstanding(seed=1)
    chosen = Counter(least.choose(loads([3, 1, 1, 2])) for _ in range(1000))
    assert set(chosen) == {1, 2} and min(chosen.values()) > 400


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=6, unique=True))
def test_two_choices_chooses_as_often_as_all_pairs_say(outstanding):
    """Of distinct loads, the one of rank r among n wins the pairs with those above it: (n - 1 - r) / C(n, 2)."""
    n, policy = len(outstanding), TwoChoices(seed=7)
    chosen = Counter(policy.choose(loads(outstanding)) for _ in range(3000))
    ranked = sorted(range(n), key=outstanding.__getitem__)
    for rank, index in enumerate(ranked):
        share = (n - 1 - rank) / math.comb(n, 2)
        assert abs(chosen[index] / 3000 - share) < 5 * math.sqrt(0.25 / 3000)


def test_two_choices_keeps_the_longest_queue_short():
    """Balls into bins (Mitzenmacher 2001): n balls in n bins, of which none ever leaves."""

    def longest(choose, n=2000):
        bins = [0] * n
        for _ in range(n):
            bins[choose(bins)] += 1
        return max(bins)

    draw, two = random.Random(3), TwoChoices(seed=3)

    def by_policy(bins):
        pair = draw.sample(range(len(bins)), 2)
        return pair[two.choose([Load("a", bins[pair[0]]), Load("b", bins[pair[1]])])]

    one = longest(lambda bins: draw.randrange(len(bins)))
    assert longest(by_policy) <= 4 < one  # log2 log 2000 + O(1), and about log n / log log n


@given(st.integers(2, 8), st.integers(1, 400), st.sampled_from([1.0, 1.25, 2.0]), st.integers(1, 20))
def test_affinity_never_exceeds_its_bound(n, requests, bound, keys):
    policy, open_ = PrefixAffinity(bound), [0] * n
    for number in range(requests):
        open_[policy.choose(loads(open_), b"%d" % (number % keys))] += 1
        assert max(open_) <= math.ceil(bound * (number + 1) / n)


def test_affinity_moves_only_the_keys_of_who_left():
    policy, names = PrefixAffinity(math.inf), [f"http://host:{port}" for port in range(8)]
    keys = [b"prefix %d" % number for number in range(4000)]

    def owners(present):
        return [present[policy.choose([Load(name, 0) for name in present], key)] for key in keys]

    whole, lacking = owners(names), owners(names[:3] + names[4:])
    moved = [before for before, after in zip(whole, lacking, strict=True) if before != after]
    assert set(moved) == {names[3]} and len(moved) == whole.count(names[3])
    assert max(Counter(whole).values()) < 1.5 * len(keys) / len(names)


def test_a_bound_below_the_mean_is_refused():
    for bound in (0.9, float("nan"), -1):
        with pytest.raises(ValueError, match="use 1 or more"):
            PrefixAffinity(bound)


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 4), st.integers(1, 4))
def test_health_follows_the_last_outcomes(outcomes, fall, rise):
    health, ready, seen = Health(fall, rise), False, False
    for number, ok in enumerate(outcomes, 1):
        health.observe(ok)
        row = 0
        while row < number and outcomes[number - 1 - row] == ok:
            row += 1
        if ok and not ready and row >= (rise if seen else 1):
            ready = seen = True
        elif not ok and ready and row >= fall:
            ready = False
        assert health.ready == ready


def test_an_ejected_replica_needs_its_successes_from_then_on():
    health = Health(fall=2, rise=2)
    health.observe(True)
    health.eject()
    health.observe(True)
    assert not health.ready
    health.observe(True)
    assert health.ready


@given(st.lists(st.booleans(), max_size=300), st.sampled_from([0.0, 0.1, 0.2, 0.5]), st.integers(0, 5))
def test_retries_stay_below_the_share_and_the_reserve(events, share, reserve):
    budget, requests, retries = RetryBudget(share, reserve), 0, 0
    for is_request in events:
        if is_request:
            budget.deposit()
            requests += 1
        else:
            retries += budget.withdraw()
        assert retries <= reserve + share * requests + 1e-9


def test_a_storm_sends_a_fifth_more_and_not_three_times_as_much():
    """Every attempt fails: with three attempts each and no budget, 1,000 requests would become 3,000."""
    budget = RetryBudget(0.2, 10)
    sent = 0
    for _ in range(1000):
        budget.deposit()
        sent += 1
        for _ in range(2):
            sent += budget.withdraw()
    assert 1200 <= sent <= 1210
