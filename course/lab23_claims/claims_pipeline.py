"""Statements about pipelines: bubbles, schedules, messages, staleness."""

from course.kit.receipts import Row, formula, row
from course.shared.statement import at, claim, computed
from minillm.equivalence import SPLIT_CASES, ParallelConfig, compare
from minillm.parallel.pipeline_parallel.schedule.check import check
from minillm.parallel.pipeline_parallel.schedule.schedules import SCHEDULES
from minillm.parallel.pipeline_parallel.schedule.simulate import Durations, simulate
from minillm.predict.training import pipeline

GPIPE = "Huang et al. 2019: https://arxiv.org/abs/1811.06965"
INTERLEAVED = "Narayanan et al. 2021: https://arxiv.org/abs/2104.04473"
MEGATRON = "Narayanan et al. 2021: https://arxiv.org/abs/2104.04473"


@claim(
    "pipeline",
    "The bubble is (stages - 1) / microbatches of the step.",
    "false",
    "That is idle over useful time; of the step it is (n-1)/(M+n-1).",
    "many microbatches, where both agree",
    at(GPIPE, "section 2.3"),
)
def bubble_over_microbatches() -> list[Row]:
    idle = simulate(SCHEDULES["gpipe"](4, 8)).idle_share
    return [
        row("idle share of 4 stages and 8 microbatches, simulated", 3 / 11, idle, tolerance=1e-6, kind="simulated"),
        formula("claimed", 3 / 8),
    ]


@claim(
    "pipeline",
    "1F1B idles as much as GPipe.",
    "true",
    "The bubble is the same; what shrinks is the number of microbatches in flight.",
    "with interleaved or zero-bubble schedules, which do shrink it",
    at(INTERLEAVED, "section 2.2.1"),
)
def one_f_one_b_and_gpipe_idle_alike() -> list[Row]:
    gpipe, ours = (simulate(SCHEDULES[name](4, 8)) for name in ("gpipe", "1f1b"))
    return [
        row("slots of a step (F = 1, B = 2): GPipe, 1F1B", [33, 33], [gpipe.makespan, ours.makespan], kind="simulated"),
        row(
            "in flight on stage 0: GPipe 8, 1F1B 4",
            [8, 4],
            [gpipe.peak_in_flight[0], ours.peak_in_flight[0]],
            kind="simulated",
        ),
    ]


@claim(
    "pipeline",
    "1F1B needs several versions of the weights.",
    "depends",
    "As PipeDream introduced it, yes: n - s versions on stage s. With a flush in every step one is enough, and "
    "gradients are exact.",
    "asynchronous training, without a flush",
    "Harlap et al. 2018: https://arxiv.org/abs/1806.03377",
)
def versions_of_one_f_one_b() -> list[Row]:
    kinds = _kinds(SCHEDULES["1f1b"](4, 8).orders[0])
    return [
        computed("microbatches forward on stage 0 within a step", 8, sum(kind == "F" for kind in kinds)),
        computed(
            "all of them backward before it ends, so no weight is updated in between",
            8,
            sum(kind == "B" for kind in kinds),
        ),
        computed("versions that asynchronous PipeDream keeps there", 4, pipeline.weight_versions(4, 0)),
    ]


def _kinds(order) -> list[str]:
    """F and B in the order of one rank's schedule."""
    return [action.kind for step in order for action in (step if isinstance(step, tuple) else (step,))]


@claim(
    "pipeline",
    "Interleaving is memory-efficient and time-efficient.",
    "depends",
    "It shortens the bubble, and holds more than plain 1F1B; it is lean against GPipe only.",
    "compared with GPipe",
    at(INTERLEAVED, "section 2.2.2"),
)
def interleaving_is_lean() -> list[Row]:
    plain, cut = simulate(SCHEDULES["1f1b"](4, 8)), simulate(SCHEDULES["interleaved"](4, 8))
    return [
        row("idle share falls", True, cut.idle_share < plain.idle_share, kind="simulated"),
        row("stages' worth in flight on stage 0, 1F1B", 4, plain.peak_in_flight[0], kind="simulated"),
        computed("    interleaved with 2 chunks", 5.5, pipeline.in_flight_interleaved(4, 2, 8)),
    ]


@claim(
    "pipeline",
    "PP = 2 means that the model has 4 stages.",
    "depends",
    "Two ranks are two stages, unless each has two chunks (interleaved).",
    "with two chunks per rank (virtual stages)",
    at(INTERLEAVED, "section 2.2.2"),
)
def two_ranks_four_stages() -> list[Row]:
    plain, cut = SCHEDULES["1f1b"](2, 4), SCHEDULES["interleaved"](2, 4)
    return [
        computed("parts, 1F1B on 2 ranks", 2, plain.num_parts),
        computed("parts, interleaved on 2 ranks", 4, cut.num_parts),
    ]


@claim(
    "pipeline",
    "3(n-1) microbatches keep the bubble of n stages at a quarter.",
    "true",
    "(n-1)/(M+n-1) is 1/4 there; the rule of 4n gives 11 % on 2 stages and 18 % on 8.",
    "with v chunks per rank a v-th of them is enough",
    at(GPIPE, "section 2.3"),
)
def three_microbatches_per_stage() -> list[Row]:
    return [
        computed("needed for 8 stages", 21, pipeline.microbatches_needed(8, 0.25)),
        computed("idle share of 8 stages with 21", 0.25, pipeline.idle_share(8, 21)),
        computed("    with 20 it is more than a quarter", True, pipeline.idle_share(8, 20) > 0.25),
        computed("    with 4n on 2, 4 and 8 stages", [0.111, 0.158, 0.179], _idle_with_4n()),
    ]


def _idle_with_4n() -> list[float]:
    return [round(pipeline.idle_share(stages, 4 * stages), 3) for stages in (2, 4, 8)]


@claim(
    "pipeline",
    "A pipeline sends as many bytes in a step whatever the number of microbatches.",
    "true",
    "There are more messages, and each is smaller: 2(n-1) times the batch's activations in all.",
    "never; interleaving with v chunks sends about v times as much",
    at(GPIPE, "section 2.3"),
)
def microbatches_leave_the_bytes() -> list[Row]:
    def sent(microbatches: int) -> float:
        """Of all stages: an activation behind every forward but the last stage's, a gradient behind every backward."""
        each = 8 * 16 * 32 * 4 / microbatches
        orders = SCHEDULES["1f1b"](4, microbatches).orders
        forward = sum(_kinds(order).count("F") for order in orders[:-1])
        return (forward + sum(_kinds(order).count("B") for order in orders[1:])) * each

    expected = pipeline.sent_bytes(4, 8, 16, 32, 4)
    return [
        row(f"bytes of a step of 4 stages, {count} microbatches", expected, sent(count), "B", kind="simulated")
        for count in (4, 8)
    ]


@claim(
    "pipeline",
    "In 1F1B all stages can run their first backward in the same time slot.",
    "false",
    "Stage s needs the gradient that stage s + 1 has just computed: backwards start one after the other, from "
    "the last.",
    "never",
    at(MEGATRON, "section 2.2.1"),
)
def backwards_start_together() -> list[Row]:
    schedule = SCHEDULES["1f1b"](4, 8)
    check(schedule)
    found = simulate(schedule, Durations(F=1, B=1, W=0))
    first = [next(bar.start for bar in bars if bar.action.kind == "B") for bars in found.bars]
    return [
        row("slots of 4 stages and 8 microbatches, F = B = 1", 22.0, found.makespan, kind="simulated"),
        row(
            "slots before the first backward, by stage", [7, 6, 5, 4], [int(start) for start in first], kind="simulated"
        ),
        formula("slots of a step without any idle one", 16),
    ]


@claim(
    "pipeline",
    "The bytes that a stage in the middle of a pipeline sends do not grow with the number of stages.",
    "true",
    "It sends one activation forward and one gradient back per microbatch, however many stages there are.",
    "counted over all stages together, where they grow with the borders",
    at(MEGATRON, "section 3.2"),
)
def a_middle_stage_sends_as_much() -> list[Row]:
    per_device = [pipeline.sent_bytes(n, 8, 16, 32, 2) / (n - 1) for n in (4, 16)]
    return [computed("bytes per border with 16 stages / with 4", 1.0, per_device[1] / per_device[0])]


@claim(
    "pipeline",
    "A pipeline of 8 stages over 32 sequences of 2,048 tokens, of GPT-3's width, sends 45 GB per step in 16 bits.",
    "false",
    "2 · 7 borders · 32 · 2,048 · 12,288 · 2 bytes are half of that; 45 is with 32-bit activations.",
    "counting what is received too",
    at(MEGATRON, "section 3.2"),
)
def pipeline_moves_45() -> list[Row]:
    return [computed("bytes in 16 bits", 22.5e9, pipeline.sent_bytes(8, 32, 2048, 12288, 2), "B", tolerance=0.01)]


@claim(
    "pipeline",
    "A pipeline trains on stale gradients.",
    "depends",
    "Synchronous ones do not: all microbatches of a step see the same weights, and the step waits for all of them.",
    "asynchronous pipelines, such as PipeDream without a flush",
    "Harlap et al. 2018: https://arxiv.org/abs/1806.03377",
)
def pipelines_are_stale() -> list[Row]:
    layout = ParallelConfig(pp=2, accumulate=4, schedule="1f1b")
    (result,) = compare(layout, {"plain": SPLIT_CASES["plain"]}, steps=1)
    return [
        row("worst gradient on 2 real stages against one process, below 1e-10", True, result.worst_gradient < 1e-10),
        formula("steps behind on the first of 4 stages, asynchronous PipeDream", pipeline.staleness(4, 0)),
    ]


@claim(
    "pipeline",
    "A pipeline has to keep the activations of all M microbatches.",
    "depends",
    "GPipe does; under 1F1B stage s keeps n - s of them, whatever M.",
    "GPipe, or fewer microbatches than stages",
    at(MEGATRON, "section 2.2.1"),
)
def all_microbatches_are_kept() -> list[Row]:
    peaks = {
        name: [simulate(SCHEDULES[name](4, count)).peak_in_flight[0] for count in (8, 32)] for name in ("gpipe", "1f1b")
    }
    return [
        row("GPipe, in flight on stage 0 for 8 and 32 microbatches", [8, 32], peaks["gpipe"], kind="simulated"),
        row("1F1B", [4, 4], peaks["1f1b"], kind="simulated"),
    ]


@claim(
    "pipeline",
    "The idle share of a pipeline of n stages is (1 - M)/(M + n - 1).",
    "false",
    "That is negative for two microbatches or more; the numerator is n - 1.",
    "never",
    "Huang et al. 2019, section 2.3: https://arxiv.org/abs/1811.06965",
)
def idle_share_formula() -> list[Row]:
    idle = simulate(SCHEDULES["gpipe"](2, 4)).idle_share
    return [
        row("idle share of 2 stages and 4 microbatches", 1 / 5, idle, tolerance=1e-6, kind="simulated"),
        computed("claimed", -3 / 5, (1 - 4) / (4 + 2 - 1)),
    ]
