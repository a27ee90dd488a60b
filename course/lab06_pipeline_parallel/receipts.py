"""Lab 06's claims, each once: the notebook prints them, the tour and the tests run `CLAIMS`.

Every function yields the rows of its receipt; without arguments it measures for itself. Times are those of devices
emulated by sleeping.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from course.kit.receipts import Row, formula, row, titled
from course.lab06_pipeline_parallel import experiments, experiments_breaks
from course.lab06_pipeline_parallel import experiments_overlap as overlap
from course.lab06_pipeline_parallel import experiments_stale as stale
from course.lab06_pipeline_parallel.experiments import FORWARD_S, PRINTED_CHART, ROWS, SEQ, Job, PipelineRecord
from course.shared.table import Table, seconds, table
from minillm.parallel.pipeline_parallel.schedule import schedules
from minillm.parallel.pipeline_parallel.schedule.schedules import Durations, simulate
from minillm.predict.training import pipeline as predict
from minillm.predict.training import tensor

Findings = dict[Job, list[PipelineRecord]]
EXACT = 1e-12  # relative error of gradients in float64


@cache
def _quick() -> Findings:
    """Five schedules on 4 ranks whose stages take 10 ms."""
    return experiments.run(list(map(_quick_job, ("gpipe", "1f1b", "interleaved", "zero_bubble", "dualpipe"))))


def _quick_job(name: str) -> Job:
    return Job(name, 4, 8, (0.01,) * 4)


@titled("4 stages, 8 microbatches: idle share of the step", open_rows=2)
def idle_share(guess: float | None = None, n: int = 4, m: int = 8) -> Iterator[Row]:
    due, found = predict.idle_share(n, m), simulate(schedules.gpipe(n, m)).idle_share
    yield row(f"{n} stages, {m} microbatches: (n-1)/(M+n-1)", due, found, "", 1e-9, guess=guess, kind="simulated")
    yield formula("    idle time over useful time, (n-1)/M", predict.overhead(n, m))
    yield formula("4 stages, 4 microbatches: (n-1)/(M+n-1)", predict.idle_share(4, 4))
    yield formula("    idle time over useful time, (n-1)/M", predict.overhead(4, 4))


@titled("the printed chart beside the simulator's", open_rows=2)
def printed_chart() -> Iterator[Row]:
    chart = schedules.parse_chart(PRINTED_CHART)
    right = simulate(schedules.one_f_one_b(4, 8), Durations(F=1, B=1, W=0))
    found = chart.schedule.orders == right.schedule.orders, len(schedules.violations(chart))
    name = "printed chart: its orders are 1F1B's; gradients used too early, of 24"
    yield row(name, (True, 24), found, kind="simulated")
    yield row("idle share: as printed, of a chart that is possible", None, (chart.idle_share, right.idle_share))


@titled("what the split gains")
def splitting(n: int = 4) -> Iterator[Row]:
    idle = {name: simulate(schedules.SCHEDULES[name](n, 2 * n)).idle[0] for name in ("1f1b", "zero_bubble")}
    due = 3 * (n - 1), predict.zero_bubble_idle(n, 1, 2, 1)
    name = f"{n} stages, F = I = W = 1: idle slots of a stage, 1F1B and zero bubble"
    yield row(name, due, tuple(idle.values()), kind="simulated")


@titled("4 stages on emulated devices: time of a step", open_rows=1)
def step_times(found: Findings | None = None) -> Iterator[Row]:
    """Of one step on emulated devices."""
    tolerance = 0.3 if found else 0.6  # quick stages: a busy machine is slower than its plan
    found = found or _quick()
    for job, ranks in found.items():
        took, plan = experiments.measured(job, ranks).makespan, experiments.planned(job).makespan
        yield row(f"{job.schedule}, {job.microbatches} microbatches", plan, took, "s", tolerance, noisy=True)


def all_to_alls(layers: int = 4) -> Table:
    """A forward and a backward through layers with experts elsewhere: in turns, and each beside the other."""
    forward, backward = overlap.FORWARD * layers, overlap.BACKWARD * layers
    compute, link = (overlap.busy(what, forward, backward) for what in ("compute", "link"))
    lines = [
        ("in turns: compute + messages", compute + link, overlap.together((*forward, *backward)),
         overlap.emulated((*forward, *backward))),
        ("side by side: at least max(compute, messages)", max(compute, link), overlap.together(forward, backward),
         overlap.emulated(forward, backward)),
    ]  # fmt: skip
    title = f"forward of one microbatch and backward of another, {layers} layers, in times of an attention"
    return table(title, ("", "formula", "simulated", "measured, emulated device"), lines)


@titled("4 stages, 8 microbatches", open_rows=2)
def held(found: Findings | None = None) -> Iterator[Row]:
    """Microbatches in flight by stage, and gradients beside one process."""
    found, told = found or _quick(), ("1f1b", "interleaved")  # of these two the text speaks
    for job, ranks in sorted(found.items(), key=lambda each: each[0].schedule not in told):
        n, m, name = job.stages, job.microbatches, job.schedule
        due = {
            "gpipe": [predict.in_flight_gpipe(m)] * n,
            "1f1b": [predict.in_flight_1f1b(n, s, m) for s in range(n)],
            "interleaved": [predict.in_flight_interleaved(n, 2, m, s) for s in range(n)],
            "zero_bubble": [predict.in_flight_zero_bubble(n, m)] * n,
            "zero_bubble_v": [predict.in_flight_zero_bubble(n, m)] * n,
            "dualpipe": [predict.in_flight_dualpipe(n)] * n,
        }[name]
        peaks = tuple(rank.peak_in_flight for rank in ranks)
        yield row(f"{name}: microbatches in flight, by stage", tuple(map(float, due)), peaks)
    worst = max(rank.error for ranks in found.values() for rank in ranks)
    yield row("every schedule: gradients of one process (within 1e-12)", True, worst < EXACT)


@titled("activations of stage 0 at most; predicted: in flight x one microbatch", open_rows=1)
def activation_bytes() -> Iterator[Row]:
    """Of stage 0 at its fullest moment, from one microbatch's bytes and the number in flight."""
    one = Job("gpipe", microbatches=1, speed=None, census=True)
    jobs = [replace(one, schedule=name, microbatches=8) for name in ("1f1b", "gpipe", "interleaved")]
    census = experiments.run([one, *jobs])
    for job in jobs:
        due = int(schedules.peak_in_flight(job.built)[0] * census[one][0].activation)
        yield row(job.schedule, due, census[job][0].activation, "B", tolerance=0.1)


@titled("messages, bytes, parameters")
def sent(
    found: Findings | None = None, plain: Job | None = None, dual: Job | None = None, same_batch: Job | None = None
) -> Iterator[Row]:
    """Messages of 1F1B and of interleaving, bytes, and DualPipe's second copy of the parameters."""
    found, plain, dual = found or _quick(), plain or _quick_job("1f1b"), dual or _quick_job("dualpipe")
    width, both = experiments.MODEL.hidden_size, (plain, replace(plain, schedule="interleaved"))
    due = tuple(predict.sends(job.stages, job.microbatches, chunks) for job, chunks in zip(both, (1, 2), strict=True))
    messages = tuple(sum(rank.messages for rank in found[job]) for job in both)
    yield row(f"messages, 2M(nv-1): {plain.schedule}, interleaved", due, messages)
    whole = sum(rank.bytes for rank in found[plain])
    due = predict.sent_bytes(plain.stages, plain.microbatches * ROWS, SEQ, width, 8)
    yield row(f"{plain.schedule}: bytes, 2(n-1)·B·S·H·b", due, whole, "B")
    if same_batch is not None:
        half = sum(rank.bytes for rank in found[same_batch])
        yield row("    with half as many microbatches, twice as large", whole, half, "B")
    once, twice = (sum(rank.parameters for rank in found[job]) for job in (plain, dual))
    yield row("DualPipe: parameters on all ranks / the model's", 2, twice / once)


@titled("PipeDream, 4 stages", open_rows=1)
def asynchronous() -> Iterator[Row]:
    late = stale.play(4, 16)
    versions, updates = (tuple(f(4, s) for s in range(4)) for f in (predict.weight_versions, predict.staleness))
    both = (versions, updates), (tuple(late.versions), tuple(late.late))
    yield row("versions kept, n - s, and updates a gradient is late, n - 1 - s, by stage", *both)
    yield row("gradients off from those of one process, by stage", None, tuple(late.off))


@titled("one model, three scales", open_rows=2)
def scaled(found: dict[str, Any]) -> Iterator[Row]:
    ratios = {
        "divided": 1,
        "not divided": experiments_breaks.MICROBATCHES,
        "divided twice": 1 / experiments_breaks.MICROBATCHES,
    }
    measured = tuple(round(found[name]["ratio"], 6) for name in ratios)
    yield row(f"gradient / that of one process: loss {', '.join(ratios)}", tuple(ratios.values()), measured)
    last = (tuple(found[name][optimizer][-1] for name in ratios) for optimizer in ("AdamW", "SGD"))
    yield row("the three losses after 6 steps of AdamW, and of SGD", None, tuple(last))


@titled("two copies of one matrix, relative distance", open_rows=1)
def tied(found: dict[str, list[float]]) -> Iterator[Row]:
    for name, apart in reversed(found.items()):
        yield row(f"{name}: distance of the two copies after 1 and 6 steps", None, (apart[0], apart[-1]))


@titled("norm of one gradient on 2 stages", open_rows=2)
def norms(found: Sequence[dict[str, float]]) -> Iterator[Row]:
    whole = found[0]["one process"]
    yield row(
        "the whole gradient's norm; stage 0's own, stage 1's own", None, (whole, *(f["this stage"] for f in found))
    )
    yield row("root of the sum of both squares", None, found[0]["all stages hold"])
    yield row("every parameter once", whole, found[0]["each parameter once"], "", 1e-6)


@titled("gradients of this stage", open_rows=2)
def bug_hunt(found: dict[str, list[float]]) -> Iterator[Row]:
    for name, errors in reversed(found.items()):
        yield row(f"{name}: relative error of the gradient, by stage", None, tuple(errors))


@titled("gradients of your stage")
def without_the_bug(found: dict[str, list[float]]) -> Iterator[Row]:
    yield row("largest relative error, in every order of work", None, max(map(max, found.values())))


@titled("GPipe on uneven stages, 8 microbatches", open_rows=2)
def uneven(found: Findings, cuts: dict[str, Job]) -> Iterator[Row]:
    for cut, job in cuts.items():
        closed = predict.uneven_makespan(job.speed, [2 * f for f in job.speed], 8)
        line = experiments.measured(job, found[job])
        yield row(f"{cut}: one step, emulated", closed, line.makespan, "s", tolerance=0.3, noisy=True)
    yield formula("if all stages could cost the same", predict.makespan(4, 8, FORWARD_S, 2 * FORWARD_S), "s")


@titled("torch.distributed.pipelining, 4 microbatches", open_rows=1)
def peers(theirs: Sequence[dict[str, Any]]) -> Iterator[Row]:
    for name in sorted(theirs[-1], key=lambda name: "False" not in name):
        scale, ratio = (4 if "False" in name else 1), max(rank[name]["ratio"] for rank in theirs)
        yield row(f"{name}: gradient / that of one process", scale, ratio, "", 1e-6)
    yield row("every loss is minillm's", True, max(map(_off(theirs), theirs[-1])) < 1e-9)


def _off(theirs: Sequence[dict[str, Any]]) -> Callable[[str], float]:
    ours = theirs[-1]["minillm"]["loss"]
    return lambda name: abs(theirs[-1][name]["loss"] / ours - 1)


@titled("your pipeline: one stage and 4")
def trained(ours: Sequence[float], alone: Sequence[float]) -> Iterator[Row]:
    yield row(f"loss of step {len(ours)}", alone[-1], ours[-1], tolerance=1e-4)


def design_depth(tp: int = 8, gpus: int = 64, parameters: float = 70e9, sequences: int = 1024) -> Table:
    """70B on 64 GPUs with tensor and sequence parallelism over 8, one sequence of 4,096 tokens per microbatch."""
    one_layer, rows = tensor.activation_bytes(1, 4096, 8192, 0, tp, sequence=True), []  # heads=0: without the scores
    for n in (2, 4, 8):
        dp = gpus // tp // n
        held = predict.in_flight_1f1b(n, 0, sequences // dp) * (80 // n) * one_layer
        states = 16 * parameters / tp / n, (4 + 12 / dp) * parameters / tp / n
        idle = f"{predict.idle_share(n, sequences // dp):.1%}"
        rows.append((f"{n} stages x {dp} replicas", idle, *(f"{each / 1e9:.1f} GB" for each in (*states, held))))
    return table("70B, 64 GPUs", ("", "idle", "states", "with ZeRO-1", "activations, stage 0"), rows)


def design_bubble(n: int = 16, m: int = 64) -> Table:
    """16 stages, 64 microbatches: chunks, or a backward in two halves."""
    rows = [("1F1B", f"{predict.idle_share(n, m):.1%}", f"{predict.in_flight_1f1b(n, 0, m)}", "1.00")]
    for v in (2, 4):
        more = predict.sends(n, m, v) / predict.sends(n, m)
        held = f"{predict.in_flight_interleaved(n, v, m)}"
        rows.append((f"{v} chunks", f"{predict.idle_share(n, m, v):.1%}", held, f"{more:.2f}"))
    idle = predict.zero_bubble_idle(n, 1, 2, 1)
    rows.append(("zero bubble", f"{idle / (3 * m + idle):.1%}", f"{predict.in_flight_zero_bubble(n, m)}", "1.00"))
    one = seconds(4096 * 8192 * 2 / 50e9)
    return table(f"16 stages, 64 microbatches; one message takes {one}", ("", "idle", "in flight", "messages"), rows)


CLAIMS = (idle_share, splitting, printed_chart, step_times, held, sent, asynchronous)
