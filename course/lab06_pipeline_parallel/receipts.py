"""Stop 06: pipeline schedules on emulated devices: one process's gradients, planned times, messages, what is held."""

from collections.abc import Iterator

from course.lab06_pipeline_parallel import experiments
from course.lab06_pipeline_parallel import experiments_stale as stale
from course.lab06_pipeline_parallel.experiments import HANDBOOK, ROWS, SEQ, Job
from minillm.labkit.receipts import Row, row
from minillm.parallel.pipeline_parallel import schedules
from minillm.predict import pipeline as predict

STAGES, MICROBATCHES, FORWARD_S = 4, 8, 0.01


def rows() -> Iterator[Row]:
    """GPipe, 1F1B, interleaved, zero bubble and DualPipe on 4 ranks; a chart that cannot be; an asynchronous pipeline.

    Times are those of devices emulated by sleeping; a busy machine is slower, so 60 % more is let pass.
    """
    names = ("gpipe", "1f1b", "interleaved", "zero_bubble", "dualpipe")
    jobs = {name: Job(name, STAGES, MICROBATCHES, (FORWARD_S,) * STAGES) for name in names}
    found = experiments.run(list(jobs.values()))
    for job, ranks in found.items():
        line, plan = experiments.measured(job, ranks), experiments.planned(job)
        yield row(f"{job.schedule}: step on emulated devices", plan.makespan, line.makespan, "s", tolerance=0.6)
        if (formula := experiments.idle_formula(job)) is not None:
            yield row("    idle share by the formula", formula, plan.idle_share, "", tolerance=1e-9)
        yield row("    idle share measured", None, line.idle_share)
        yield row("    gradients of one process (within 1e-12)", True, max(rank.error for rank in ranks) < 1e-12)
        yield row("    messages", len(job.built.messages), sum(rank.messages for rank in ranks))
        in_flight = tuple(rank.peak_in_flight for rank in ranks)
        yield row("    microbatches in flight", tuple(schedules.peak_in_flight(job.built)), in_flight)
    sent = sum(rank.bytes for rank in found[jobs["1f1b"]])
    width = experiments.MODEL.hidden_size
    yield row("1f1b: bytes sent", predict.sent_bytes(STAGES, MICROBATCHES * ROWS, SEQ, width, 8), sent, "B")
    whole = sum(rank.parameters for rank in found[jobs["1f1b"]])
    twice = sum(rank.parameters for rank in found[jobs["dualpipe"]])
    yield row("dualpipe: parameters, of the model's", 2, twice / whole)
    yield row(
        "a printed 1F1B chart: dependencies broken", 24, len(schedules.violations(schedules.parse_chart(HANDBOOK)))
    )
    late = stale.play(STAGES)
    yield row("pipedream: weight versions by stage", (4, 3, 2, 1), tuple(late.versions))
    yield row("    updates a gradient is late", (3, 2, 1, 0), tuple(late.late))


CLAIMS = (rows,)
