"""Every exhibit of the bug museum: it looks right, leaves its trace, is repaired by minillm's own code, and is gone
afterwards."""

import itertools
import os
import random
from dataclasses import replace

import pytest

from course.kit.exercises import CheckFailed
from course.lab22_bug_museum import judge
from course.lab22_bug_museum.exhibit import LEAST_FIXES, LEAST_SUSPECTS
from course.lab22_bug_museum.game import same_failure
from course.lab22_bug_museum.museum import EXHIBITS
from course.lab22_bug_museum.training_runs import Run, Scene, together
from course.shared.faults import serving, training
from course.shared.faults.patches import Fault, Patch, code_hash, planted, sound
from minillm.comm import RankError
from minillm.train.parallel_config import ParallelConfig

pytestmark = pytest.mark.drawn(2)

TWO_SHARDS = Scene(ParallelConfig(dp=2, zero=1))
MORE_SEEDS = range(1, 20)
if os.environ.get("MINILLM_PROOF") != "all":
    MORE_SEEDS = random.Random(int(os.environ["MINILLM_SEED"])).sample(MORE_SEEDS, 4)
ON_TWO_RANKS = [n for n, its in EXHIBITS.items() if isinstance(its.run, Run) and its.run.scene.layout.world_size == 2]
OTHERS = [name for name in EXHIBITS if name not in ON_TWO_RANKS]


def looks_right_and_leaves_its_trace(exhibit, record) -> bool:
    assert [row for row in exhibit.looks(record) if row.verdict != "ok"] == [], exhibit.name
    return exhibit.innocent != any(row.verdict == "off" for row in exhibit.trace(record))


def can_be_measured(exhibit, record) -> None:
    for measurement in exhibit.measurements:
        assert str(measurement.show(record)).strip(), measurement.name


def test_faults_on_two_ranks_look_right_and_leave_their_traces():
    exhibits = [EXHIBITS[name] for name in ON_TWO_RANKS]
    records = together([(exhibit.run, exhibit.faults, 0) for exhibit in exhibits])
    for exhibit, record in zip(exhibits, records, strict=True):
        assert looks_right_and_leaves_its_trace(exhibit, record), exhibit.name
        can_be_measured(exhibit, record)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", OTHERS)
def test_fault_looks_right_and_leaves_its_trace(name):
    exhibit = EXHIBITS[name]
    before = [code_hash(fault.target) for fault in exhibit.faults]
    record = exhibit.run(exhibit.faults, 0)
    assert looks_right_and_leaves_its_trace(exhibit, record)
    can_be_measured(exhibit, record)
    assert [code_hash(fault.target) for fault in exhibit.faults] == before


@pytest.mark.full
@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", EXHIBITS)
def test_more_seeds_and_every_repair(name):
    """Four more, or nineteen with MINILLM_PROOF=all. minillm's own code leaves no trace. Each wrong fix fails in a way
    of its own, so that the sentence that a learner reads is that of the repair that they have tried."""
    exhibit = EXHIBITS[name]
    own = exhibit.repaired([sound(fault.target) for fault in exhibit.faults])
    repairs = {"own": own} | {fix.label: exhibit.repaired(fix.code) for fix in exhibit.wrong_fixes}
    jobs = [(exhibit.faults, seed) for seed in MORE_SEEDS] + [(patches, 1) for patches in repairs.values()]
    records = exhibit.runs(jobs)
    shown = [looks_right_and_leaves_its_trace(exhibit, record) for record in records[: len(MORE_SEEDS)]]
    assert [seed for seed, ok in zip(MORE_SEEDS, shown, strict=True) if not ok] == []
    runs = zip(repairs.items(), records[len(MORE_SEEDS) :], strict=True)
    failures = {label: failure(exhibit, patches, record) for (label, patches), record in runs}
    assert failures.pop("own") is None
    assert [label for label, failed in failures.items() if failed is None] == []
    pairs = itertools.combinations(failures.items(), 2)
    assert [(a, b) for (a, one), (b, other) in pairs if same_failure(one, other)] == []


def failure(exhibit, patches, record) -> CheckFailed | None:
    try:
        judge.judged(exhibit, patches, record)
    except CheckFailed as failed:
        return failed
    return None


@pytest.mark.full
def test_an_overflow_in_one_shard_is_no_exhibit_since_it_is_not_silent():
    """Each rank decides alone whether to skip, by its own shard. A clipped gradient spreads the overflow to all shards,
    so the ranks agree all the same; without clipping, the norm that all ranks know ends the run."""
    clips, never_clips = (
        Run(replace(TWO_SHARDS, settings=(("precision", "fp16"), ("max_grad_norm", norm)))) for norm in (1.0, None)
    )
    high_scale = Patch(
        "minillm.train.precision:LossScaler.__init__", {"scale: float = 2.0**16": "scale: float = 2.0**21"}
    )
    faults = (training.OWN_OVERFLOW, high_scale)
    one, other = clips(faults, 0).ranks
    assert [step.applied for step in one.steps] == [step.applied for step in other.steps]
    assert not all(step.applied for step in one.steps)
    with pytest.raises(RankError, match=r"the gradient norm is (nan|inf)"):
        never_clips.many([(faults, seed) for seed in range(6)])


@pytest.mark.parametrize("name", EXHIBITS)
def test_enough_wrong_ways(name):
    exhibit = EXHIBITS[name]
    assert len(exhibit.suspects) - len(exhibit.culprits) >= LEAST_SUSPECTS
    assert len(exhibit.wrong_fixes) >= LEAST_FIXES
    assert exhibit.par <= exhibit.budget


FAULTS = {name: its for part in (training, serving) for name, its in vars(part).items() if isinstance(its, Fault)}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_changes_the_code_and_is_taken_away(name):
    fault = FAULTS[name]
    before = code_hash(fault.target)
    with planted([fault]):
        assert code_hash(fault.target) != before
    assert code_hash(fault.target) == before
    assert fault.place and fault.mechanism and fault.threads


def test_a_fault_stands_in_the_table_once_and_exhibits_have_no_other():
    assert len({(fault.target, *fault.code.items()) for fault in FAULTS.values()}) == len(FAULTS)
    assert all(fault in FAULTS.values() for its in EXHIBITS.values() for fault in its.faults)
