import json

import pytest

from minillm.bench.harness import (
    BenchReport,
    BenchRow,
    Comparison,
    bench_row,
    interquartile_range,
    seconds_per_call,
    side_by_side,
)

ORIGIN = {"hardware": "abacus", "cores": 2, "versions": {"torch": "2.13.0"}, "date": "2026-01-02T03", "command": "x"}


class Clock:
    """Time stands still unless somebody works."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def work(self, seconds):
        self.now += seconds


def test_order_swaps_every_pair_after_the_check_and_the_warm_up():
    log = []

    def say(name, value):
        return lambda: (log.append(name), value)[1]

    found = side_by_side(say("check", True), say("a", 1.0), say("b", 3.0), repeats=5, warmup=2)
    assert log == ["check", *"abab", *"ab", *"ba", *"ab", *"ba", *"ab"]
    assert found == Comparison(True, ((1.0, 3.0),) * 5)


def test_wrong_results_are_not_timed():
    def never():
        raise AssertionError("timed in spite of a wrong result")

    found = side_by_side(lambda: False, never, never)
    row = bench_row("sum", "peer", found, "ms")
    assert row == BenchRow("sum", "peer", None, None, "ms", None, None, 0, False)
    report = BenchReport("title", ORIGIN, (row,))
    assert not report.ok and "NO" in str(report) and "| NO |" in report.markdown()


@pytest.mark.parametrize("repeats", [0, 4])
def test_too_few_repeats(repeats):
    with pytest.raises(ValueError, match=f"repeats={repeats} is too few.*5 or more"):
        side_by_side(lambda: True, float, float, repeats=repeats)


def test_seconds_per_call_times_the_calls_and_what_comes_after_only():
    clock = Clock()
    sample = seconds_per_call(
        lambda: clock.work(2.0), 4, before=lambda: clock.work(100.0), after=lambda: clock.work(1.0), clock=clock
    )
    assert sample() == (4 * 2.0 + 1.0) / 4


def test_ratio_is_taken_pair_by_pair():
    # The machine slows down tenfold halfway; each pair still sees the peer take twice as long.
    pairs = tuple((scale, 2 * scale) for scale in (1.0, 1.0, 1.0, 10.0, 10.0))
    row = bench_row("step", "peer", Comparison(True, pairs), "ms", scale=1e3)
    assert (row.ours, row.theirs, row.ratio, row.spread, row.runs, row.correct) == (1000.0, 2000.0, 2.0, 0.0, 5, True)


def test_above_one_is_ahead_whatever_the_unit():
    pairs = ((300.0, 100.0), (400.0, 100.0), (200.0, 100.0), (300.0, 100.0), (300.0, 100.0))
    assert bench_row("serve", "peer", Comparison(True, pairs), "tokens/s", higher_is_better=True).ratio == 3.0
    assert bench_row("serve", "peer", Comparison(True, pairs), "s").ratio == pytest.approx(1 / 3)


def test_spread_is_the_interquartile_range_of_the_ratios():
    assert interquartile_range([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0
    row = bench_row("x", "peer", Comparison(True, tuple((1.0, t) for t in (5.0, 1.0, 4.0, 2.0, 3.0))), "s")
    assert (row.ratio, row.spread) == (3.0, 2.0)


def test_table_markdown_and_json_say_the_same():
    rows = (
        BenchRow("ring all-reduce", "gloo", 1.2345, 2.469, "ms", 2.0, 0.1, 7, True),
        BenchRow("x", "y", 10.0, 5.0, "ms", 0.5, 0.0, 7, True),
    )
    noted = BenchReport("comm", ORIGIN, rows, ("z was not compared.",))
    assert "z was" in str(noted) and "z was" in noted.markdown() and noted.to_json()["notes"] == ["z was not compared."]
    report = BenchReport("comm", ORIGIN, rows)
    text = str(report).splitlines()
    assert text[0] == "comm" and "abacus" in text[1] and report.ok
    assert text[-2].split() == ["ring", "all-reduce", "gloo", "1.23", "2.47", "ms", "2.00", "0.10", "7", "yes"]
    assert len({line.index("ms") for line in text[-2:]}) == 1  # columns line up
    assert "| ring all-reduce | gloo | 1.23 | 2.47 | ms | 2.00 | 0.10 | 7 | yes |" in report.markdown()
    saved = json.loads(json.dumps(report.to_json()))
    assert saved["provenance"] == ORIGIN
    keys = {"name", "peer", "ours", "theirs", "unit", "ratio", "spread", "runs", "correct"}
    assert all(row.keys() == keys for row in saved["rows"]) and saved["rows"][1]["ratio"] == 0.5
