"""Every exhibit of the bug museum: it looks right, leaves its trace, is repaired by minillm's own code, and is gone
afterwards."""

import itertools
import random

import pytest

from course.lab22_bug_museum import judge
from course.lab22_bug_museum.exhibit import LEAST_FIXES, LEAST_SUSPECTS
from course.lab22_bug_museum.game import failure_of, same_failure
from course.lab22_bug_museum.museum import EXHIBITS
from course.shared.faults.patches import code_hash, planted, sound

SEEDS = [range(2), pytest.param(range(2, 20), marks=pytest.mark.full)]


@pytest.mark.parametrize("name", EXHIBITS)
@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"{len(seeds)} seeds")
def test_fault_looks_right_and_leaves_its_trace(name, seeds):
    exhibit = EXHIBITS[name]
    before = [code_hash(fault.target) for fault in exhibit.faults]
    records = exhibit.runs(exhibit.faults, seeds)
    for seed, record in zip(seeds, records, strict=True):
        assert [row for row in exhibit.looks(record) if row.verdict != "ok"] == [], seed
        off = [row for row in exhibit.trace(record) if row.verdict == "off"]
        assert not off if exhibit.innocent else off, seed
    for measurement in exhibit.measurements:
        assert str(measurement.show(records[0])).strip(), measurement.name
    assert [code_hash(fault.target) for fault in exhibit.faults] == before


@pytest.mark.full
@pytest.mark.parametrize("name", EXHIBITS)
def test_minillms_own_code_leaves_no_trace(name):
    exhibit = EXHIBITS[name]
    random.seed(5)
    assert all(row.verdict != "off" for row in judge.verify(exhibit, [sound(f.target) for f in exhibit.faults]))


@pytest.mark.full
@pytest.mark.parametrize("name", EXHIBITS)
def test_each_wrong_fix_is_refused_in_a_way_of_its_own(name):
    """So that the sentence that a learner reads is that of the repair that they have tried."""
    exhibit = EXHIBITS[name]
    failures = {fix.label: failure_of(exhibit, fix, 1) for fix in exhibit.wrong_fixes}
    assert [label for label, failure in failures.items() if failure is None] == []
    pairs = itertools.combinations(failures.items(), 2)
    assert [(a, b) for (a, one), (b, other) in pairs if same_failure(one, other)] == []


@pytest.mark.parametrize("name", EXHIBITS)
def test_enough_wrong_ways(name):
    exhibit = EXHIBITS[name]
    assert len(exhibit.suspects) - len(exhibit.culprits) >= LEAST_SUSPECTS
    assert len(exhibit.wrong_fixes) >= LEAST_FIXES
    assert exhibit.par <= exhibit.budget


@pytest.mark.parametrize("name", EXHIBITS)
def test_patch_changes_the_code_and_is_taken_away(name):
    for fault in EXHIBITS[name].faults:
        before = code_hash(fault.target)
        with planted([fault]):
            assert code_hash(fault.target) != before
        assert code_hash(fault.target) == before
