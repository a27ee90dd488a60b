"""Every exhibit of the bug museum: it looks right, leaves its trace, is repaired by minillm's own code, and is gone
afterwards."""

import random

import pytest

from course.kit.exercises import CheckFailed
from course.lab22_bug_museum import judge
from course.lab22_bug_museum.exhibit import LEAST_FIXES, LEAST_SUSPECTS
from course.lab22_bug_museum.museum import EXHIBITS
from course.lab22_bug_museum.patches import code_hash, planted, sound

SEEDS = [range(2), pytest.param(range(2, 20), marks=pytest.mark.full)]


@pytest.mark.parametrize("name", EXHIBITS)
@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"{len(seeds)} seeds")
def test_fault_looks_right_and_leaves_its_trace(name, seeds):
    exhibit = EXHIBITS[name]
    before = [code_hash(fault.target) for fault in exhibit.faults]
    for seed, record in zip(seeds, exhibit.runs(exhibit.faults, seeds), strict=True):
        assert [row for row in exhibit.looks(record) if row.verdict != "ok"] == [], seed
        off = [row for row in exhibit.trace(record) if row.verdict == "off"]
        assert not off if exhibit.innocent else off, seed
    assert [code_hash(fault.target) for fault in exhibit.faults] == before


@pytest.mark.parametrize("name", EXHIBITS)
def test_minillms_own_code_leaves_no_trace(name):
    exhibit = EXHIBITS[name]
    random.seed(5)
    assert all(row.verdict != "off" for row in judge.verify(exhibit, [sound(f.target) for f in exhibit.faults]))


@pytest.mark.parametrize("name", EXHIBITS)
def test_measurements_show_something(name):
    exhibit = EXHIBITS[name]
    record = exhibit.run(exhibit.faults, 3)
    for measurement in exhibit.measurements:
        assert str(measurement.show(record)).strip(), measurement.name


@pytest.mark.parametrize("name", EXHIBITS)
def test_enough_wrong_ways(name):
    exhibit = EXHIBITS[name]
    assert len(exhibit.suspects) - len(exhibit.culprits) >= LEAST_SUSPECTS
    assert len(exhibit.wrong_fixes) >= LEAST_FIXES
    assert exhibit.par <= exhibit.budget


@pytest.mark.parametrize(
    ("name", "label"), [(its.name, fix.label) for its in EXHIBITS.values() for fix in its.wrong_fixes]
)
def test_wrong_fix_is_refused(name, label):
    exhibit = EXHIBITS[name]
    fix = next(each for each in exhibit.wrong_fixes if each.label == label)
    with pytest.raises(CheckFailed):
        judge.verify(exhibit, fix.code)


@pytest.mark.parametrize("name", EXHIBITS)
def test_patch_changes_the_code_and_is_taken_away(name):
    for fault in EXHIBITS[name].faults:
        before = code_hash(fault.target)
        with planted([fault]):
            assert code_hash(fault.target) != before
        assert code_hash(fault.target) == before
