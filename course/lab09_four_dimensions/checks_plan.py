"""Lab 09, a plan: the estimate of one layout against the planner's formulas, and the reader's own layout.

The planner knows more terms than the exercise asks for. Its buffers are left out, and so are the seconds of all axes
but tp; with attention and latencies for nothing, both must agree to the last digit.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, cycle
from typing import Any

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab09_four_dimensions import experiments_plan as plans
from course.shared.diagnose import expect, expect_list, expect_number, forbidding
from minillm.equivalence import CONTEXT_CASES, compare
from minillm.predict.planner import memory, search
from minillm.predict.planner import step as steps
from minillm.predict.planner.architectures import Architecture, architecture
from minillm.predict.planner.clusters import GIB, Cluster, cluster
from minillm.predict.planner.layout import Layout
from minillm.train.parallel_config import ParallelConfig

FREE = 1e30  # rate of what takes no time
# What the planner's functions and its search stand on, by whatever name they are called.
_PLANNER = ((memory, "layers_per_stage"), (steps, "layers_per_stage"))
_SEARCH = ((plans, "_best"), (plans, "_everything"), (search, "_settings"))


@exercise(
    "layout-estimate",
    minutes=20,
    difficulty=3,
    hints=(
        "Count the numbers of one rank of the first stage before anything is sharded. Which kind does each ZeRO stage "
        "divide, and by how many ranks?",
        "Bytes: 2, 4 and 12 per parameter; ZeRO divides the 12 from stage 1 on, the 4 from stage 2 on, the 2 in stage "
        "3, by dp · cp. Activations: layers / pp · tokens · token_bytes, for min(pp, microbatches) microbatches. "
        "Seconds: microbatches + pp - 1 times what one microbatch takes on a stage.",
    ),
)
def check_estimate(learner: Callable) -> Receipt:
    rows = []
    cases = *_plain_cases(), *(_draw_case() for _ in range(4))
    for (model, layout, seq), device in zip(cases, cycle(("h100", "a100-80")), strict=False):
        machine = _bare(layout, device)
        rate, link = machine.device.matmul_rate(model.hidden_size / layout.tp), machine.device.link
        asked = "two numbers, bytes and seconds"
        with forbidding(
            _PLANNER, "a function of the planner other than `token_bytes` was called; write what it computes"
        ):
            found = learner(model, layout, seq, rate, link)
        found = expect_list(list(found) if hasattr(found, "__array__") else found, asked, count=2)
        held, seconds = (expect_number(each, asked) for each in found)
        kinds = memory.memory(model, layout, seq)
        spent = steps.step(model, layout, machine, seq)
        turns = (layout.microbatches + layout.pp - 1) / layout.microbatches
        states, right = kinds.total - kinds.buffers, turns * (spent.compute + spent.tp)
        rows += [
            row(f"{model.name}, {layout}: bytes", states, held, "B", 1e-6),
            row("    seconds", right, seconds, "s", 1e-6),
        ]
        if not rows[-2].verdict == "ok" == rows[-1].verdict:
            wrong = "bytes" if rows[-2].verdict == "off" else "seconds"
            say = (
                f"{held / GIB:.2f} of {states / GIB:.2f} GiB" if wrong == "bytes" else f"{seconds:.4g} of {right:.4g} s"
            )
            raise CheckFailed(f"{model.name}, {layout}: wrong {wrong}, {say}", rows, evidence=[held, seconds])
    return receipt("bytes of the first stage, seconds of a step", rows)


def _plain_cases() -> list[tuple[Architecture, Layout, int]]:
    """One rank, so that a forgotten table shows; each axis alone; and all of them, with every way of ZeRO."""
    model = architecture("llama-2-7b")
    all_axes = dict(dp=2, cp=2, tp=2, pp=4, micro_batch=2, microbatches=3)
    layouts = [Layout(), Layout(dp=4, zero=2), Layout(tp=4, microbatches=2), Layout(pp=8, microbatches=6)]
    layouts += [Layout(**all_axes, zero=zero) for zero in range(4)]
    return [(model, layout, 2048) for layout in layouts]


def _draw_case() -> tuple[Architecture, Layout, int]:
    model = architecture(random.choice(("llama-2-7b", "llama-2-13b", "llama-2-70b")))
    layout = Layout(
        dp=random.choice((2, 4)),
        zero=random.randint(0, 3),
        tp=random.choice((1, 2, 4)),
        cp=random.choice((1, 2)),
        pp=random.choice((2, 4, 8)),
        micro_batch=random.choice((1, 2)),
        microbatches=random.choice((3, 6, 32)),
    )
    return model, layout, random.choice((2048, 4096))


def _bare(layout: Layout, device: str) -> Cluster:
    """A node for each tensor-parallel group, whose links deliver their rate at once and hide nothing; what is no matrix
    product takes no time."""
    bare = cluster(device, layout.world_size, per_node=layout.tp, latency=(0.0, 0.0), link_efficiency=1.0)
    return replace(bare, contention=1.0, device=replace(bare.device, attention=FREE, bandwidth=FREE))


# A plan.


@exercise(
    "plan-for-64",
    minutes=20,
    difficulty=3,
    hints=(
        "Start from what cannot be avoided: the states of 70B take 18 bytes a parameter. Over how many of the 64 ranks "
        "must they be divided, and what is left of 35 GiB for activations?",
        "Two families fit. Fully sharded over many ranks, with every layer computed again, takes at least a "
        "quarter longer than the best. The other divides the model by tp and pp and keeps activations; a long pipeline "
        "needs many microbatches or chunks.",
        "Layout(tp=8, pp=4, dp=2, zero=1, microbatches=256) is one of the second family, and a little too large. What "
        "else shrinks or divides its activations? experiments_plan.judge(layout) says what a layout holds.",
    ),
)
def check_plan(learner: Callable) -> Receipt:
    with forbidding(_SEARCH, "the planner's search was called; choose a layout yourself, and ask `judge` about it"):
        layout = learner()
    _judge_layout(layout)
    found, best = plans.judge(layout), plans.best()
    rows = [row("GiB held, at most those that are usable", True, found.fits)]
    if not found.fits:
        raise CheckFailed(
            f"{layout} does not fit: {found.held / GIB:.1f} GiB of {plans.SIXTY_FOUR.usable / GIB:.1f}",
            rows,
            evidence=layout,
        )
    times = found.seconds / best.step.seconds
    rows.append(row("times the seconds of the planner's best, at most 1.15", True, times <= plans.NEAR))
    if times > plans.NEAR:
        raise CheckFailed(
            f"{layout} fits and takes {found.seconds:.1f} s, {times:.2f} times as long as the best, which takes "
            f"{best.step.seconds:.1f} s",
            rows,
            evidence=layout,
        )
    copies = small_copies(layout)
    outcomes = compare(copies, {"tied": CONTEXT_CASES["tied"]}, steps=1) if copies else []
    for copy, outcome in zip(copies, outcomes, strict=True):
        error = max(outcome.worst_gradient, outcome.worst_weight)
        rows.append(row(f"its small copy on {copy.world_size} ranks equals one process: {copy}", True, outcome.ok))
        if not outcome.ok:
            raise CheckFailed(f"a small copy of {layout}, {copy}, is off by {error:.2g} from one process", rows)
    return receipt(f"{layout}: {found.held / GIB:.1f} GiB, {found.seconds:.1f} s", rows)


def _judge_layout(layout: Any) -> None:
    expect(type(layout) is Layout, layout, "a Layout")
    if layout.world_size != plans.SIXTY_FOUR.gpus:
        raise CheckFailed(f"{layout} takes {layout.world_size} GPUs of 64", evidence=layout)
    if layout.batch != plans.BATCH:
        raise CheckFailed(
            f"{layout} takes {layout.batch} sequences of {plans.BATCH}: dp · micro_batch · microbatches",
            evidence=layout,
        )
    model = plans.SEVENTY
    if model.num_heads % layout.tp or plans.SEQ % (2 * layout.cp * layout.tp):
        raise CheckFailed(f"{layout}: {model.num_heads} heads do not divide over tp {layout.tp}", evidence=layout)
    if model.num_layers % (layout.pp * layout.chunks):
        raise CheckFailed(
            f"{layout}: {model.num_layers} layers do not divide over {layout.pp} stages of {layout.chunks} chunks",
            evidence=layout,
        )
    if layout.chunks > 1 and (layout.pp == 1 or layout.microbatches % layout.pp):
        raise CheckFailed(
            f"{layout}: chunks need a pipeline, and microbatches that are a multiple of its stages", evidence=layout
        )
    if layout.ep > 1 or layout.schedule != "1f1b":
        raise CheckFailed(f"{layout}: ep and DualPipe are for models with experts, which this is not", evidence=layout)


def small_copies(layout: Layout) -> list[ParallelConfig]:
    """The layout with two ranks on each axis that has more than one; if these are more than four ranks, every pair."""
    used = [axis for axis in ("dp", "tp", "cp", "pp") if layout.size(axis) > 1]
    return [_small(layout, pair) for pair in (combinations(used, 2) if len(used) > 2 else [tuple(used)]) if pair]


def _small(layout: Layout, axes: Sequence[str]) -> ParallelConfig:
    sizes = dict.fromkeys(axes, 2)
    return ParallelConfig(
        **sizes,
        zero=layout.zero if {"dp", "cp"} & set(axes) else 0,
        accumulate=2,
        sequence=layout.sequence and "tp" in axes,
        schedule="interleaved" if layout.chunks > 1 else "1f1b",
    )
