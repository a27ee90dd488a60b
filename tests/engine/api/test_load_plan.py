"""What is sent when: arrivals of each spread, lengths, prefix groups, traces, and their refusals."""

import json
from itertools import pairwise
from statistics import mean, pstdev

import pytest

from minillm.api.load.plan import Lengths, Plan, replayed
from minillm.bench.arrival_times import bursty_times, poisson_times, read_trace, stretched


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_gaps_have_the_rate_and_the_spread_asked_for(cv):
    gaps = [b - a for a, b in pairwise([0.0, *bursty_times(60_000, 5.0, cv, seed=4)])]
    assert mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.05, abs=1e-9)


def test_poisson_is_a_spread_of_one():
    assert poisson_times(50, 3.0, seed=2) == bursty_times(50, 3.0, 1.0, seed=2)


def test_groups_begin_alike_and_differ_from_each_other():
    coming = Plan(200, Lengths((40, 60), (3, 9)), prefix=32, groups=5, vocab_size=500).at(10.0)
    heads = {tuple(each.prompt[:32]) for each in coming}
    assert len(heads) == 5 and len({tuple(each.prompt) for each in coming}) == 200
    assert {len(each.prompt) for each in coming} == {*range(40, 61)}
    assert {each.params.max_tokens for each in coming} == {*range(3, 10)}


def test_rates_change_times_and_nothing_else():
    slow, fast = (Plan(30, prefix=8, groups=2).at(rate) for rate in (1.0, 4.0))
    assert [each.prompt for each in slow] == [each.prompt for each in fast]
    assert [each.at for each in slow] == pytest.approx([4 * each.at for each in fast])


def test_a_trace_is_replayed_and_stretched(tmp_path):
    file = tmp_path / "trace.jsonl"
    rows = [
        {"at": 2.0, "prompt_tokens": 20, "answer_tokens": 4, "group": "a"},
        {"at": 0.0, "prompt_tokens": 12, "answer_tokens": 3, "tenant": "ada", "group": "a"},
        {"at": 4.0, "prompt_tokens": 7, "answer_tokens": 1},
    ]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    lines = read_trace(file)
    first, second, third = replayed(lines, None)
    assert [each.at for each in (first, second, third)] == [0.0, 2.0, 4.0]
    assert second.prompt[:12] == first.prompt and len(second.prompt) == 20 and len(third.prompt) == 7
    assert (first.tenant, first.params.max_tokens) == ("ada", 3)
    assert [each.at for each in replayed(lines, 2.0)] == [0.0, 0.5, 1.0]
    with pytest.raises(ValueError, match="all requests of this trace come at once"):
        stretched(lines[:1], 2.0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no request"),
        ("[1]", "line 1: .* is no JSON object"),
        ("nothing", "line 1: "),
        ('{"at": 0, "prompt_tokens": 3}', "line 1: answer_tokens is missing"),
        ('{"at": -1, "prompt_tokens": 3, "answer_tokens": 1}', "at -1 must be seconds"),
        ('{"at": 0, "prompt_tokens": true, "answer_tokens": 1}', "prompt_tokens True must be a whole number"),
        ('{"at": 0, "prompt_tokens": 3, "answer_tokens": 1, "colour": 2}', "'colour' is unknown"),
        ('{"at": 0, "prompt_tokens": 3, "answer_tokens": 1, "tenant": 2}', "tenant 2 must be a text"),
        ('{"at": NaN, "prompt_tokens": 3, "answer_tokens": 1}', "at nan must be seconds"),
    ],
)
def test_a_bad_trace_names_its_line(content, said, tmp_path):
    file = tmp_path / "trace"
    file.write_text(content)
    with pytest.raises(ValueError, match=said):
        read_trace(file)


@pytest.mark.parametrize("text", ["64", "64:", "0:4", "9-4:2", "a:b", "1:2:3"])
def test_bad_lengths_are_one_sentence(text):
    with pytest.raises(ValueError, match="write PROMPT:ANSWER in tokens"):
        Lengths.parse(text)


def test_lengths_are_numbers_or_ranges():
    assert Lengths.parse("64:8-32") == Lengths((64, 64), (8, 32))
