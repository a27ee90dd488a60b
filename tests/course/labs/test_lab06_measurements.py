"""Lab 06's predictions agree: closed forms with the simulator, the emulated devices' pace with the plan, and the
asynchronous pipeline that is played with the one that is counted."""

import pytest

from course.lab06_pipeline_parallel import experiments
from course.lab06_pipeline_parallel import experiments_breaks as breaks
from course.lab06_pipeline_parallel import experiments_overlap as overlap
from course.lab06_pipeline_parallel import experiments_stale as stale
from course.lab06_pipeline_parallel import figures as pictures
from course.lab06_pipeline_parallel.experiments import FORWARD_S, MODEL, PRINTED_CHART, ROWS, SEQ, Job
from minillm.parallel.pipeline_parallel.schedule import schedules
from minillm.parallel.pipeline_parallel.schedule.schedules import Action
from minillm.predict.training import pipeline as predict

NAMES = list(schedules.SCHEDULES)


@pytest.mark.parametrize("name", NAMES)
def test_idle_formula_is_the_simulators(name):
    for stages, microbatches in ((4, 8), (2, 8), (4, 16)):
        job = Job(name, stages, microbatches, (FORWARD_S,) * stages)
        if (formula := experiments.idle_formula(job)) is not None:
            assert experiments.planned(job).idle_share == pytest.approx(formula)


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_model_takes_the_same_time_however_it_is_cut(name):
    """Chunks take their share: a microbatch needs 4 forwards and 4 whole backwards of a stage in every schedule."""
    job = Job(name)
    schedule = job.built
    work = sum(experiments.pace(job, schedule, rank)(action) for rank, action in schedule.tasks)
    assert work == pytest.approx(8 * 4 * 3 * FORWARD_S)


def test_uneven_stages_keep_the_sum_and_balancing_helps():
    cuts = experiments.uneven_stages()
    assert all(sum(speed) == pytest.approx(4 * FORWARD_S) for speed in cuts.values())
    slowest = {name: max(speed) for name, speed in cuts.items()}
    assert FORWARD_S < slowest["balanced"] < slowest["as many layers each"]
    for speed in cuts.values():
        closed = predict.uneven_makespan(speed, [2 * f for f in speed], 8)
        assert experiments.planned(Job("gpipe", speed=speed)).makespan == pytest.approx(closed)


def test_the_printed_chart_breaks_every_gradient_that_travels():
    chart = schedules.parse_chart(PRINTED_CHART)
    assert chart.schedule.orders == schedules.one_f_one_b(4, 8).orders
    assert len(schedules.violations(chart)) == sum(edge.is_gradient for edge in chart.schedule.messages) == 24


def test_messages_hide_behind_the_other_direction_and_no_chain_overtakes_itself():
    assert overlap.together(overlap.FORWARD) == 4  # alone nothing overlaps
    for layers in (1, 3, 8):
        chains = overlap.FORWARD * layers, overlap.BACKWARD * layers
        compute, link = (overlap.busy(what, *chains) for what in ("compute", "link"))
        assert (compute, link) == (6 * layers, 4 * layers)
        assert overlap.together((*chains[0], *chains[1])) == compute + link
        assert max(compute, link) <= overlap.together(*chains) < compute + link
    began = overlap.emulated(overlap.FORWARD, overlap.BACKWARD, unit_s=0.001)
    assert began > 6 * (1 - 1e-9)  # sleeping cannot be quicker than the unit that both need


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_played_pipeline_has_the_counted_versions(stages):
    played = stale.play(stages, 12)
    counted = schedules.weight_versions(schedules.pipedream(stages, 12))
    assert played.versions == [versions.held for versions in counted]
    assert played.late == [versions.late[-1] for versions in counted]
    assert played.late == [predict.staleness(stages, stage) for stage in range(stages)]
    assert all(off < 1e-12 for off in played.off) == (stages == 1)  # one stage is one process


def test_a_job_on_ranks_does_what_was_planned():
    """Gradients, messages, bytes and microbatches in flight of one real step; times are not looked at."""
    jobs = [Job("1f1b", 2, 4, (0.001, 0.001)), Job("interleaved", 2, 4, None), Job("1f1b", 2, 2, None, rows=2)]
    found = experiments.run(jobs)
    for job, ranks in found.items():
        assert max(rank.error for rank in ranks) < 1e-12
        assert sum(rank.messages for rank in ranks) == len(job.built.messages)
        assert [rank.peak_in_flight for rank in ranks] == schedules.peak_in_flight(job.built)
        line = experiments.measured(job, ranks)
        assert schedules.violations(line) == []
        assert experiments.planned(job, line).schedule is line.schedule
    sent = [sum(rank.bytes for rank in found[job]) for job in (jobs[0], jobs[2])]
    assert sent == [predict.sent_bytes(2, 4 * ROWS, SEQ, MODEL.hidden_size, 8)] * 2
    assert all(
        bar.end - bar.start >= 0.001 for bars in experiments.measured(jobs[0], found[jobs[0]]).bars for bar in bars
    )


def test_rows_are_ready_for_json():
    job = Job("1f1b", 2, 2, (0.001, 0.001))
    (row,) = experiments.rows_of(experiments.run([job]))
    assert row["emulated"] and row["formula_idle"] == pytest.approx(1 / 3) and row["messages"] == 4
    assert row["planned_idle"] == pytest.approx(1 / 3) and row["in_flight"] == [2, 1]


def test_the_deadlock_names_both_ranks():
    assert "waits to send F1" in _refusal()
    table = breaks.deadlock(timeout=1.0)
    assert table.count("send") == 2 and "rank 1" in table and "rank 0" in table


def _refusal() -> str:
    with pytest.raises(schedules.ScheduleError) as refused:
        schedules.check(schedules.messages_as_used(schedules.one_f_one_b(2, 4)), batched=False)
    return str(refused.value)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("schedule", [*NAMES, "pipedream"])
def test_figures_that_stand_still(schedule):
    title = pictures.schedule_on_a_clock(schedule, 4, 8).axes[0].get_title(loc="left")
    assert title.startswith(f"{schedule}, 4 stages, 8 microbatches: idle")
    assert "from 9 microbatches on" in pictures.idle_by_microbatches(4, 0.25).axes[0].get_title(loc="left")


def test_pace_follows_the_part_not_the_rank_alone():
    job = Job("gpipe", speed=(0.01, 0.02, 0.03, 0.04))
    paces = [experiments.pace(job, job.built, rank)(Action("B", 0)) for rank in range(4)]
    assert paces == pytest.approx([0.02, 0.04, 0.06, 0.08])
